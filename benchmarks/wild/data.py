"""Data of the wild pipelines, all from one seed: click logs, pictures, records."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SEED", "clicks", "jpeg", "pictures", "records", "sentences", "waves"]

SEED = 20261122


def clicks(rows: int, dense: int = 13, categories: int = 26, words: int = 10_000) -> Iterator[list[str]]:
    """Yield Criteo-shaped rows as their preprocessed form has them: label, log(x + 1) of the integers, bucket ids.

    Args:
        rows: how many.
        dense: columns of numbers.
        categories: columns of ids.
        words: ids are below it, popular ones smaller.
    """
    for start in range(0, rows, 4096):
        count, random = min(4096, rows - start), np.random.default_rng([SEED, start])
        numbers = np.maximum(random.normal(1.5, 1.5, (count, dense)), 0)
        ids = (words ** random.random((count, categories)) - 1).astype(np.int64)
        labels = (random.random(count) < 0.2 + 0.1 * (numbers[:, 0] > 1.5)).astype(np.int64)
        for label, row, columns in zip(labels, numbers, ids, strict=True):
            yield [str(label), *(f"{value:.4f}" for value in row), *map(str, columns)]


def jpeg(number: int, height: int = 375, width: int = 500, quality: int = 90) -> bytes:
    """Return a picture as a JPEG: smooth colours with the grain of a photograph, so that decoding costs what it does.

    Args:
        number: another one for each.
        height, width: in pixels.
        quality: of the JPEG.
    """
    from PIL import Image

    random = np.random.default_rng([SEED, number])
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), np.uint8))
    small = coarse.resize((width, height), Image.Resampling.BICUBIC)
    grain = random.normal(0, 6, (height, width, 1))
    pixels = np.clip(np.asarray(small, np.float32) + grain, 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=quality)
    return out.getvalue()


def pictures(folder: Path, rows: int, classes: int, **shape: int) -> None:
    """Write ``folder/class/number.jpg``.

    Args:
        folder: where.
        rows: how many.
        classes: how many folders.
        shape: of `jpeg`.
    """
    for number in range(rows):
        path = folder / f"{number % classes:03d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number, **shape))


def records(path: Path, examples: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of ``tf.train.Example``.

    Args:
        path: of the file.
        examples: per record, its features: bytes, lists of integers or lists of floats.
    """
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for features in examples:
            feature = {name: _feature(tf.train, value) for name, value in features.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def _feature(train: Any, value: Any) -> Any:
    if isinstance(value, bytes):
        return train.Feature(bytes_list=train.BytesList(value=[value]))
    if value and isinstance(value[0], float):
        return train.Feature(float_list=train.FloatList(value=value))
    return train.Feature(int64_list=train.Int64List(value=value))


def sentences(rows: int, words: int, low: int, high: int) -> Iterator[str]:
    """Yield texts of words ``w0``, ``w1``, ..., the popular ones more often.

    Args:
        rows: how many texts.
        words: different ones.
        low, high: fewest and most words of a text.
    """
    random = np.random.default_rng([SEED, words])
    for _ in range(rows):
        ids = (words ** random.random(random.integers(low, high)) - 1).astype(int)
        yield " ".join(f"w{i}" for i in ids) + "."


def waves(folder: Path, rows: int, classes: int, rate: int) -> None:
    """Write ``folder/class/number.wav``: a second of tones in noise, 16 bits.

    Args:
        folder: where.
        rows: how many.
        classes: how many folders.
        rate: samples of a second.
    """
    at_s = np.arange(rate) / rate
    for number in range(rows):
        random, kind = np.random.default_rng([SEED, 2, number]), number % classes
        tone = np.sin(2 * np.pi * (100 + 20 * kind) * at_s) + random.normal(0, 0.3, rate)
        path = folder / f"{kind:02d}" / f"{number:06d}.wav"
        path.parent.mkdir(exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, rate, rate, "NONE", ""))
            file.writeframes((tone * 8000).astype("<i2").tobytes())
