"""Given what a trainer holds: what can be tuned; and when nothing can, why, and the smallest change that would help."""

from __future__ import annotations

import multiprocessing
import operator
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from intune_callbacks.pipelines.base import LIVE, LIVE_ALREADY, LiveLoader, cpus_allowed
from intune_callbacks.pipelines.look import plain_values
from intune_callbacks.pipelines.watched import FOLLOWS_WORKERS, WatchedLoader
from intune_callbacks.types import Clock, Hint

__all__ = ["ONLY_MAP_STYLE", "Found", "find"]

STARTS = multiprocessing.get_all_start_methods()
OWN_START = (
    "its workers are what {} starts, no processes, and stay as they are; InTuneCallback(workers_kind='thread') makes "
    "their number live, if the dataset may be used by several threads"
)
LEFT_ALONE = (
    "num_workers=0: the dataset is computed in the training loop and stays there, for it may need that process; "
    "set num_workers=1, or give InTuneCallback workers_kind='process' or 'thread', to make its workers live"
)

ONLY_MAP_STYLE = (
    "workers_kind='ray' is for a map-style DataLoader, whose samples do not depend on who makes them; of this {} other "
    "machines can make none: leave workers_kind out"
)
HIDES = "{} is an iterator, which hides what makes its batches; give InTune the loader or tf.data.Dataset behind it"
UNKNOWN = (
    "{} is not a loader InTune knows; wrap the dataset in torch.utils.data.DataLoader or build the pipeline from "
    "torchdata.nodes or tf.data"
)
SHARED = "was 0; open {!r} in each worker (worker_init_fn): several that inherit it read each other's bytes"


@dataclass(frozen=True)
class Found:
    """What `find` made of a loader.

    Args:
        pipeline: the live loader, None when nothing can be tuned.
        why: what can be changed and what cannot; without a pipeline, the smallest change that would help.
        hints: oddities of the user's pipeline that can be seen without running it.
    """

    pipeline: LiveLoader | None
    why: str
    hints: tuple[Hint, ...] = ()


HELPED = (
    "the dataset is iterable-style, and it is known which function makes its samples: its {} workers and their shards "
    "stay, and helpers that make batches come and go beside them"
)


def find(
    loader: Any,
    *,
    clock: Clock | None = None,
    max_workers: int | None = None,
    workers_kind: str | None = None,
    ray_address: str = "",
    order: str = "same",
    live: bool = True,
    wait: bool = True,
) -> Found:
    """Return the pipeline behind a loader.

    Args:
        loader: a `torch.utils.data.DataLoader`, `StatefulDataLoader`, `torchdata.nodes.Loader` or `tf.data.Dataset`
            (then iterate over `pipeline.dataset` instead); anything else is answered with the reason why it cannot be
            tuned. A wrapper stands for the one DataLoader inside: Accelerate's, Fabric's, timm's loaders, a WebLoader.
        clock: wall and CPU clock.
        max_workers: upper limit of workers per stage.
        workers_kind: what a map-style DataLoader computes in, ``process`` or ``thread`` (only if the dataset is
            thread-safe and releases the GIL). With None it is processes, and a loader with ``num_workers=0`` is left
            alone: its dataset may hold open files, learn from the training, or use a device or a runtime that does not
            survive a fork. ``ray`` has workers on other machines beside processes here.
        ray_address: of the cluster of these, ``host:port``.
        order: ``any`` allows another order of the same samples; a torchdata graph keeps its own, for its state counts
            items in their order.
        live: False only watches (modes observe and advise).
        wait: compile the tf.data operations now where that was not done; False leaves it to the pipeline's `compile`
            and `late`, and a pipeline may have no stages yet.
    """
    clock = clock or Clock()
    # A loader of a framework exists only if that framework was imported: nothing is imported to look at it.
    if workers_kind == "ray" and live and not _is_map_style(loader):
        return Found(None, ONLY_MAP_STYLE.format(type(loader).__name__))
    if "torchdata.nodes" in sys.modules and _is(loader, "torchdata.nodes", "Loader"):
        return _node_graph(loader, clock, max_workers, live)
    if "torch.utils.data" in sys.modules:
        from intune_callbacks.pipelines.torch.reach import is_loader, unwrapped, why_several

        inner = unwrapped(loader)
        if is_loader(inner):
            return _data_loader(inner, clock, max_workers, workers_kind, order == "same", live, ray_address)
        if why := why_several(loader):
            return Found(None, why)
    if "tensorflow" in sys.modules and hasattr(sys.modules["tensorflow"], "data"):
        if _is(loader, "tensorflow", "data.Dataset"):
            return _dataset(loader, clock, max_workers, order == "same", live, wait)
        if _is(loader, "tensorflow", "distribute.DistributedDataset"):
            return Found(
                None,
                "a distribution strategy has spread the dataset over the devices, where its stages cannot be reached; "
                "train on one device per process",
            )
    if _is_grain(loader):
        return _grain(loader, clock, max_workers, live)
    if "fastai.data.load" in sys.modules and _is(loader, "fastai.data.load", "DataLoader"):
        return _fastai(loader)
    if type(loader).__module__ == LIVE and loader._fit is not None:
        return Found(None, LIVE_ALREADY)
    is_what = HIDES if hasattr(type(loader), "__next__") else UNKNOWN
    return Found(None, is_what.format(type(loader).__name__))


def _is_map_style(loader: Any) -> bool:
    if "torch.utils.data" not in sys.modules:
        return False
    from torch.utils import data

    from intune_callbacks.pipelines.torch.reach import dataset_of, is_loader, keeps_states, unwrapped

    inner = unwrapped(loader)
    others = (data.IterDataPipe, data.MapDataPipe, data.IterableDataset)
    return is_loader(inner) and not (isinstance(dataset_of(inner), others) or keeps_states(inner))


def _fastai(loader: Any) -> Found:
    name, workers = type(loader).__name__, getattr(getattr(loader, "fake_l", None), "num_workers", None)
    why = (
        f"fastai's {name} starts workers of its own, whose number stays while it runs; it is yours to set, such as "
        "dataloaders(num_workers=4), and keeps the order of the batches"
    )
    if workers != 0:
        return Found(None, why)
    what = f"fastai's {name} is read with num_workers=0: each batch is made while the training waits"
    return Found(None, why, (Hint(what, f"num_workers={max(1, min(4, cpus_allowed() - 1))}", "loader"),))


def _is_grain(value: object) -> bool:
    grain = sys.modules.get("grain")
    kinds = (getattr(grain, name, None) for name in ("MapDataset", "IterDataset", "DataLoader"))
    return issubclass(type(value), tuple(kind for kind in kinds if isinstance(kind, type)))


def _grain(dataset: Any, clock: Clock, max_workers: int | None, live: bool) -> Found:
    from intune_callbacks.pipelines.grain_threads import GrainPipeline, why_not

    why = why_not(dataset) if live else "the Grain pipeline is only timed"
    if why:
        return Found(None, why)
    return Found(GrainPipeline(dataset, clock=clock, max_workers=max_workers), "Grain's threads and buffer are live")


def _is(value: object, module: str, name: str) -> bool:
    # Not `isinstance`: what wraps a loader may say that it is one.
    return issubclass(type(value), operator.attrgetter(name)(sys.modules[module]))


def _dataset(dataset: Any, clock: Clock, max_workers: int | None, in_order: bool, live: bool, wait: bool) -> Found:
    try:
        from intune_callbacks.pipelines.tf.tfdata import DatasetPipeline
    except ImportError as error:
        return Found(
            None, f"this version of TensorFlow lacks what a tf.data pipeline is tuned by, so nothing is: {error}"
        )
    given: dict[str, Any] = {"clock": clock, "max_workers": max_workers, "in_order": in_order}
    pipeline = DatasetPipeline(dataset, **given, live=live, wait=wait)
    return Found(pipeline if pipeline.stages() or not wait else None, pipeline.why, pipeline.hints)


def _node_graph(loader: Any, clock: Clock, max_workers: int | None, live: bool) -> Found:
    from intune_callbacks.pipelines.torch.private import why_not

    if why := why_not("torchdata"):
        return Found(None, why)
    from intune_callbacks.pipelines.torch.torchdata import NodeGraph

    graph = NodeGraph(loader, clock=clock, max_workers=max_workers, live=live)
    if not graph.stages():
        return Found(
            None,
            "the torchdata.nodes graph has no ParallelMapper with num_workers >= 1 and no Prefetcher; "
            "set num_workers=1 on the mapper that does the work",
        )
    return Found(graph, "workers and window of each ParallelMapper and the depth of each Prefetcher are live")


def _data_loader(
    loader: Any,
    clock: Clock,
    max_workers: int | None,
    workers_kind: str | None,
    in_order: bool,
    live: bool,
    ray_address: str,
) -> Found:
    from torch.utils import data

    from intune_callbacks.pipelines.torch.private import why_not
    from intune_callbacks.pipelines.torch.reach import dataset_of

    if why := why_not("torch"):
        return Found(None, why)
    dataset = dataset_of(loader)
    if isinstance(dataset, (data.IterDataPipe, data.MapDataPipe)):
        why = "datapipes shard themselves by worker; use a map-style Dataset or torchdata.nodes"
        return Found(None, why, _loader_hints(loader, is_iterable=True))
    map_style = not isinstance(dataset, data.IterableDataset)
    found = _live_loader(loader, clock, max_workers, workers_kind, in_order, live, map_style, ray_address)
    return replace(found, hints=(*found.hints, *_loader_hints(loader, is_iterable=not map_style)))


def _loader_hints(loader: Any, *, is_iterable: bool) -> tuple[Hint, ...]:
    workers, cpus = loader.num_workers, cpus_allowed()
    if workers > cpus:
        what = f"the DataLoader has {workers} workers on {cpus} CPU{'s' * (cpus != 1)}"
        return (Hint(what, f"num_workers={cpus}  # more only where they wait for reads", "workers"),)
    if is_iterable and workers == 0:
        kind = type(loader.dataset).__name__
        what = f"{kind} is read with num_workers=0: each batch is made while the training waits"
        many = max(1, min(4, cpus - 1))
        remark = "  # if the dataset gives each worker a share of its own (get_worker_info, sharding_filter)"
        return (Hint(what, f"num_workers={many}{remark * (many > 1)}", "loader"),)  # a single one gets all
    return ()


def _live_loader(
    loader: Any,
    clock: Clock,
    max_workers: int | None,
    workers_kind: str | None,
    in_order: bool,
    live: bool,
    map_style: bool,
    ray_address: str,
) -> Found:
    from intune_callbacks.pipelines.torch.helped import HelpedLoader, cannot_help, ends_known
    from intune_callbacks.pipelines.torch.loader import MapLoader
    from intune_callbacks.pipelines.torch.reach import dataset_of, fed_by, keeps_states, open_file
    from intune_callbacks.pipelines.torch.window import WindowLoader

    window = (loader.prefetch_factor or 1) * loader.num_workers
    may_begin = workers_kind is not None and map_style and not keeps_states(loader)
    when: Literal["epoch", "user"] = "epoch" if loader.num_workers or may_begin else "user"
    dataset, anew = dataset_of(loader), not loader.persistent_workers
    file = open_file(dataset) if map_style and when == "user" else ""
    fed = fed_by(dataset) if map_style and when == "user" else ""
    hints = (Hint(fed, "", "serial", "load"),) if fed else ()
    remark = SHARED.format(file) if file else ""
    given = partial(plain_values, (dataset, loader.collate_fn))
    watched = partial(WatchedLoader, loader.num_workers, window, clock=clock, when=when, given=given)
    if not live:
        remark = remark if map_style else f"was {loader.num_workers}; the samples' {FOLLOWS_WORKERS}"
        return Found(watched(remark=remark, dataset=dataset, anew=anew), "the DataLoader is only watched", hints)
    if map_style and not keeps_states(loader):
        if loader.num_workers == 0 and workers_kind is None:
            return Found(watched(remark=remark), fed or LEFT_ALONE, hints)
        context = loader.multiprocessing_context
        if workers_kind != "thread" and context is not None and context.get_start_method() not in STARTS:
            return Found(watched(when="user"), OWN_START.format(type(context).__name__))
        options: dict[str, Any] = {"max_workers": max_workers, "kind": workers_kind or "process", "in_order": in_order}
        if workers_kind == "ray":
            from intune_callbacks.pipelines.ray.cluster import Cluster

            options |= {"kind": "process", "cluster": Cluster(ray_address)}
        pipeline = MapLoader(loader, clock=clock, **options)
        return Found(pipeline, "workers and batches in flight are live")
    kind = "the dataset is iterable-style" if not map_style else f"{type(loader).__name__} keeps a state per worker"
    if loader.num_workers == 0:
        return Found(None, f"{kind} and num_workers=0, so nothing runs beside the training loop; set num_workers=1")
    remark = ""
    if not map_style and loader.num_workers and ends_known(loader):
        remark = cannot_help(loader)
        if not remark:
            live_from = f"{HELPED.format(loader.num_workers)}; the batches in flight are live, too"
            return Found(HelpedLoader(loader, clock=clock, max_workers=max_workers), live_from)
        remark = f"; `later` brings nothing here: {remark}"
    stay = f"{kind}, so num_workers stays {loader.num_workers} while it runs"
    way = "" if map_style else "`later` around the function that makes a sample, "
    then = "keeps" if map_style else "changes"
    helped = ""
    if not (map_style or remark or keeps_states(loader) or cannot_help(loader)):
        helped = "; `later` around the function that makes a sample lets helpers make more at once, in the same order"
    return Found(
        # A state per worker is counted in the order of the batches.
        WindowLoader(loader, clock=clock, in_order=in_order or map_style or keeps_states(loader)),
        f"{kind}, so another number of workers would change the samples' order: only the batches in flight are live; "
        f"{way}a map-style Dataset or torchdata.nodes makes the workers live too{remark}",
        (Hint(f"{stay}; it is yours to set, and another one {then} the samples' order{helped}", "", "order", "load"),),
    )
