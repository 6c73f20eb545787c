"""Vision pipelines on tf.data, as their authors wrote them; where from: `benchmarks.wild.catalogue_vision`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

from benchmarks.wild.data import jpeg, pictures, records
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_keras import calls, convolutional

CLASSES = 10


# -- jkjung-avt/keras_imagenet: TFRecord files, eight parsers ----------------------------------------------------------


def imagenet_data(folder: Path, rows: int) -> None:
    shards = 16
    for shard in range(shards):
        numbers = range(shard, rows, shards)
        examples = ({"image/encoded": jpeg(n), "image/class/label": [1 + n % CLASSES]} for n in numbers)
        records(folder / f"train-{shard:05d}-of-{shards:05d}", examples)


def imagenet(folder: Path, numbers: Numbers, batch: int) -> Any:
    size = 224

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
    dataset = shards.interleave(tf.data.TFRecordDataset, cycle_length=4).shuffle(512)
    dataset = dataset.map(parse, num_parallel_calls=calls(numbers["parse"])).batch(batch)
    return dataset.prefetch(numbers["prefetch"])


def imagenet_model() -> Any:
    return convolutional(224, CLASSES, one_hot=True)


# -- keras-io: image classification from scratch, a folder of JPEG files -----------------------------------------------


def scratch_data(folder: Path, rows: int) -> None:
    pictures(folder, rows, 2, height=188, width=250)


def scratch(folder: Path, numbers: Numbers, batch: int) -> Any:
    dataset = keras.utils.image_dataset_from_directory(
        str(folder), seed=1337, image_size=(180, 180), batch_size=batch, verbose=False
    )

    def augment(images: Any, labels: Any) -> Any:
        """Flip and turn by up to a tenth of a circle, drawn from what the pictures show."""
        seed = tf.cast(tf.reduce_sum(images[:, :4, :4], [1, 2, 3]), tf.int32)
        turn = 0.2 * 3.14159 * (tf.cast(seed % 997, tf.float32) / 997.0 - 0.5)
        mirror = tf.where(seed % 2 == 0, 1.0, -1.0)
        cos, sin, zero = mirror * tf.cos(turn), tf.sin(turn), tf.zeros_like(turn)
        left, top = 90.0 - 90.0 * (cos - sin), 90.0 - 90.0 * (mirror * sin + tf.cos(turn))
        transforms = tf.stack([cos, -sin, left, mirror * sin, tf.cos(turn), top, zero, zero], 1)
        turned = tf.raw_ops.ImageProjectiveTransformV3(
            images=images, transforms=transforms, output_shape=[180, 180], interpolation="BILINEAR",
            fill_mode="REFLECT", fill_value=0.0,
        )  # fmt: skip
        return turned, labels

    dataset = dataset.prefetch(numbers["prefetch"])
    return dataset.map(augment, num_parallel_calls=calls(numbers["augment"])).prefetch(numbers["prefetch#2"])


def scratch_model() -> Any:
    return convolutional(180, 2)
