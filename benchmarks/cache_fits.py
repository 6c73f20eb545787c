"""One training over samples that are expensive to decode, with one way of keeping them; the body of a process."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from intune_callbacks import live, pure
from intune_callbacks.cache.arena import Arena
from intune_callbacks.cache.pure import use
from intune_callbacks.measure.resources import MachineProbe

__all__ = ["EPOCHS", "SYSTEMS", "fit"]

EPOCHS, BATCH, WORKERS = 3, 4, 2
SYSTEMS = ("none", "dict per worker", "MONAI CacheDataset", "Dataset.cache()", "static", "InTune")
MB = 1 << 20

_decode_s, _sample_bytes = 0.0, 0


@pure
def decode(number: int) -> np.ndarray[Any, Any]:
    """Return a sample that takes a while, as a read or a decoder that releases the CPU does."""
    time.sleep(_decode_s)
    return np.random.default_rng(number).integers(0, 255, _sample_bytes, np.uint8)


class _Samples:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return decode(index)


class _WithDict(_Samples):
    """As users write it: what this worker has decoded stays with it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._known:
            self._known[index] = decode(index)
        return self._known[index]


def fit(system: str, count: int, decode_s: float, sample_bytes: int, static_bytes: int, where: dict[str, Any]) -> Any:
    """Train for some epochs and return the samples/s of each, a digest of each, and what was in use.

    Args:
        system: of `SYSTEMS`.
        count: samples of an epoch.
        decode_s: seconds that one takes.
        sample_bytes: that it has.
        static_bytes: that may be kept, of all processes; of ``static`` and, per sample, of MONAI's.
        where: ``kind`` (``torch`` or ``tf``), ``rank``, ``ranks``, ``folder``, ``seed``.
    """
    global _decode_s, _sample_bytes
    _decode_s, _sample_bytes = decode_s, sample_bytes
    with _kept(system, static_bytes, where):
        loader, set_epoch = _loader(system, count, static_bytes, where)
        epochs = []
        tuned = live(loader, mode="tune" if system == "InTune" else "off", max_workers=WORKERS, show_card=False)
        for epoch in range(EPOCHS):
            set_epoch(epoch)
            digest, begin_s, samples = 0, time.perf_counter(), 0
            for batch in tuned:
                values = batch.numpy()
                samples += len(values)
                digest = zlib.crc32(values, digest)
            epochs.append({"samples_per_s": samples / (time.perf_counter() - begin_s), "digest": digest})
        used_bytes = MachineProbe().read().memory_used_bytes
        if hasattr(tuned, "close"):
            tuned.close()
    return {"epochs": epochs, "used_bytes": used_bytes}


@contextmanager
def _kept(system: str, static_bytes: int, where: dict[str, Any]) -> Iterator[None]:
    if system != "static":
        yield
        return
    shared = Path(where["folder"]) / "arena"
    if where["rank"]:
        for _ in range(600):
            if shared.exists():
                break
            time.sleep(0.1)
        arena = Arena.at(shared.read_text())
    else:
        arena = Arena(room_bytes=max(static_bytes, MB))
        arena.limit(static_bytes)
        written = shared.with_suffix(".part")
        written.write_text(arena.address)
        written.rename(shared)
    use(arena)
    try:
        yield
        if where["ranks"] > 1:
            import torch

            torch.distributed.barrier()  # the first one's end is the arena's
    finally:
        use(None)
        arena.close()


def _loader(system: str, count: int, static_bytes: int, where: dict[str, Any]) -> tuple[Any, Any]:
    if where["kind"] == "tf":
        return _dataset(system, count), lambda epoch: None
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    if where["ranks"] > 1:
        os.environ |= {"LOCAL_RANK": str(where["rank"]), "RANK": str(where["rank"]), "WORLD_SIZE": str(where["ranks"])}
        os.environ |= {"LOCAL_WORLD_SIZE": str(where["ranks"]), "GLOO_SOCKET_IFNAME": "lo"}
        store = f"file://{Path(where['folder']) / 'store'}"
        torch.distributed.init_process_group("gloo", store, rank=where["rank"], world_size=where["ranks"])
    dataset: Any = _WithDict(count) if system == "dict per worker" else _Samples(count)
    if system == "MONAI CacheDataset":
        from monai.data import CacheDataset

        kept = min(count, static_bytes // _sample_bytes)
        dataset = CacheDataset(list(range(count)), decode, cache_num=kept, num_workers=WORKERS, progress=False)
    sampler = DistributedSampler(dataset, where["ranks"], where["rank"], seed=where["seed"])
    loader: Any = DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS, persistent_workers=True)
    return loader, sampler.set_epoch


def _dataset(system: str, count: int) -> Any:
    import tensorflow as tf

    def decoded(number: Any) -> Any:
        value = tf.numpy_function(lambda one: decode(int(one)), [number], tf.uint8)
        return tf.ensure_shape(value, [_sample_bytes])

    dataset = tf.data.Dataset.range(count).map(decoded, num_parallel_calls=WORKERS)
    if system == "Dataset.cache()":
        dataset = dataset.cache()
    return dataset.batch(BATCH).prefetch(2)
