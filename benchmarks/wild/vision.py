"""Public vision pipelines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wild.data import jpeg, pictures, records
from benchmarks.wild.entry import POWERS, WORKERS, Entry, Fit, Numbers

__all__ = ["ENTRIES", "crop_box"]

CLASSES = 10


def crop_box(draw: random.Random, height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the usual random crop: .08 to 1 of the area, sides 3:4 to 4:3."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = draw.uniform(3 / 4, 4 / 3)
        high, wide = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < high <= height and 0 < wide <= width:
            return draw.randint(0, height - high), draw.randint(0, width - wide), high, wide
    return 0, 0, height, width


# -- jkjung-avt/keras_imagenet: TFRecord files, map_and_batch with 8 workers -------------------------------------------


def imagenet_records(folder: Path, rows: int) -> None:
    shards = 16
    for shard in range(shards):
        numbers = range(shard, rows, shards)
        examples = ({"image/encoded": jpeg(n), "image/class/label": [1 + n % CLASSES]} for n in numbers)
        records(folder / f"train-{shard:05d}-of-{shards:05d}", examples)


def keras_imagenet(folder: Path, numbers: Numbers) -> Any:
    import tensorflow as tf

    batch, size = KERAS_IMAGENET_BATCH, 224

    def parse(record: Any) -> Any:
        features = {
            "image/encoded": tf.io.FixedLenFeature([], tf.string, ""),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64, -1),
        }
        parsed = tf.io.parse_single_example(record, features)
        encoded = parsed["image/encoded"]
        seed = tf.stack([tf.strings.to_hash_bucket_fast(encoded, 1 << 30), 7])
        image = tf.image.convert_image_dtype(tf.image.decode_jpeg(encoded, channels=3), tf.float32)
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.shape(image), tf.zeros([1, 1, 4]), seed, area_range=(0.08, 1.0), use_image_if_no_bounding_boxes=True
        )
        image = tf.image.resize(tf.slice(image, begin, extent), [size, size])
        image = tf.image.stateless_random_flip_left_right(tf.ensure_shape(image, [size, size, 3]), seed)
        return 2.0 * image - 1.0, tf.one_hot(parsed["image/class/label"] - 1, CLASSES)

    files = tf.io.matching_files(str(folder / "train-*"))
    shards = tf.data.Dataset.from_tensor_slices(files)
    shards = shards.shuffle(tf.cast(tf.shape(files)[0], tf.int64)).repeat()
    dataset = shards.interleave(tf.data.TFRecordDataset, cycle_length=4).shuffle(SHUFFLE)
    dataset = dataset.map(parse, num_parallel_calls=numbers["parse"]).batch(batch, drop_remainder=True)
    return dataset.prefetch(numbers["prefetch"])


def keras_imagenet_model() -> Any:
    from benchmarks.wild.models_keras import convolutional

    return convolutional(224, CLASSES, one_hot=True)


KERAS_IMAGENET_BATCH, SHUFFLE = 16, 512


# -- pytorch/examples: ImageNet folders, 4 workers ---------------------------------------------------------------------


def imagenet_folders(folder: Path, rows: int) -> None:
    pictures(folder, rows, CLASSES)


def pytorch_imagenet(folder: Path, numbers: Numbers) -> Any:
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    mean, spread = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    class ImageFolder(Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
            self.samples = [(path, i) for i, name in enumerate(classes) for path in sorted((folder / name).iterdir())]

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> Any:
            path, label = self.samples[index]
            with path.open("rb") as file:
                image = Image.open(file).convert("RGB")
            draw = random.Random(index)
            top, left, height, width = crop_box(draw, image.height, image.width)
            box = (left, top, left + width, top + height)
            image = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
            pixels = pixels.flip(-1) if draw.random() < 0.5 else pixels
            return (pixels - mean[:, None, None]) / spread[:, None, None], label

    return DataLoader(
        ImageFolder(), batch_size=PYTORCH_IMAGENET_BATCH, shuffle=True, num_workers=numbers["num_workers"]
    )


def pytorch_imagenet_model() -> Any:
    from benchmarks.wild.models_torch import Convolutional

    return Convolutional(CLASSES)


PYTORCH_IMAGENET_BATCH = 64

ENTRIES = (
    Entry(
        name="keras-imagenet",
        framework="keras",
        kind="tf.data",
        domain="vision",
        repository="jkjung-avt/keras_imagenet",
        commit="12fd478ef307fc54453537dc2ee45439f56c7b0b",
        path="utils/dataset.py",
        left_out="map_and_batch is written as map, batch; a shuffle buffer of 512 instead of 8,192 records (the data "
        "are smaller); crop and flip are drawn from a hash of the picture, so that runs can be compared",
        batch=KERAS_IMAGENET_BATCH,
        numbers={"parse": 8, "prefetch": 16},
        make=imagenet_records,
        rows=1600,
        tiny=96,
        load=keras_imagenet,
        model=keras_imagenet_model,
        short=Fit(1, 250),
        long=Fit(1, 1500),
        sweep={"parse": POWERS[:5]},
        could_gain=True,
    ),
    Entry(
        name="pytorch-imagenet",
        framework="lightning",
        kind="map-style",
        domain="vision",
        repository="pytorch/examples",
        commit="493da9304e56ff5160f78d01a54992db35df2a98",
        path="imagenet/main.py",
        left_out="a batch of 64 instead of 256, a small network; pin_memory (there is no GPU); crop and flip are drawn "
        "from the index, so that runs can be compared",
        batch=PYTORCH_IMAGENET_BATCH,
        numbers={"num_workers": 4},
        make=imagenet_folders,
        rows=1600,
        tiny=256,
        load=pytorch_imagenet,
        model=pytorch_imagenet_model,
        short=Fit(2),
        long=Fit(12),
        sweep={"num_workers": WORKERS},
        could_gain=True,
    ),
)
