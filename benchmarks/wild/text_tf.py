"""Text and tabular pipelines on tf.data, as their authors wrote them; where from: `benchmarks.wild.catalogue_text`."""

from __future__ import annotations

import os
import re
import string
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.wild.data import SEED, records, sentences
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_keras import calls, compiled

WORDS = 5000


# -- keras-io: text classification from scratch, a folder of reviews ---------------------------------------------------


def reviews_data(folder: Path, rows: int) -> None:
    for number, text in enumerate(sentences(rows, WORDS, 120, 350)):
        path = folder / ("pos", "neg")[number % 2] / f"{number}_7.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace(".", "<br />."))


def reviews(folder: Path, numbers: Numbers, batch: int) -> Any:
    def standardize(text: Any) -> Any:
        plain = tf.strings.regex_replace(tf.strings.lower(text), "<br />", " ")
        return tf.strings.regex_replace(plain, f"[{re.escape(string.punctuation)}]", "")

    vectorize = keras.layers.TextVectorization(
        standardize=standardize,
        max_tokens=20_000,
        output_sequence_length=500,
        vocabulary=[f"w{i}" for i in range(WORDS)],
    )
    dataset = keras.utils.text_dataset_from_directory(
        str(folder), batch_size=batch, validation_split=0.2, subset="training", seed=1337, verbose=False
    )

    def vectorize_text(text: Any, label: Any) -> Any:
        return vectorize(tf.expand_dims(text, -1)), label

    dataset = dataset.map(vectorize_text, num_parallel_calls=calls(numbers["vectorize_text"])).cache()
    return dataset.prefetch(numbers["prefetch"])


def reviews_model() -> Any:
    text = keras.Input([500], dtype="int64")
    hidden = keras.layers.Embedding(WORDS + 2, 16)(text)
    for _ in range(2):
        hidden = keras.layers.Conv1D(32, 7, strides=3, activation="relu")(hidden)
    hidden = keras.layers.Dense(32, "relu")(keras.layers.GlobalMaxPooling1D()(hidden))
    return compiled(text, keras.layers.Dense(1, "sigmoid")(hidden), "binary_crossentropy")


# -- google-research/bert: masked sentences in TFRecord files ----------------------------------------------------------

LENGTH, MASKED, VOCABULARY = 128, 20, 3000


def bert_data(folder: Path, rows: int) -> None:
    shards, random = 16, np.random.default_rng(SEED)

    def example() -> dict[str, Any]:
        return {
            "input_ids": random.integers(0, VOCABULARY, LENGTH).tolist(),
            "input_mask": [1] * LENGTH,
            "segment_ids": [0] * (LENGTH // 2) + [1] * (LENGTH // 2),
            "masked_lm_positions": random.integers(0, LENGTH, MASKED).tolist(),
            "masked_lm_ids": random.integers(0, VOCABULARY, MASKED).tolist(),
            "masked_lm_weights": [1.0] * MASKED,
            "next_sentence_labels": [int(random.integers(2))],
        }

    for shard in range(shards):
        records(folder / f"tf_examples.tfrecord{shard:02d}", (example() for _ in range(rows // shards)))


def bert(folder: Path, numbers: Numbers, batch: int) -> Any:
    names = {
        **{name: tf.io.FixedLenFeature([LENGTH], tf.int64) for name in ("input_ids", "input_mask", "segment_ids")},
        **{name: tf.io.FixedLenFeature([MASKED], tf.int64) for name in ("masked_lm_positions", "masked_lm_ids")},
        "masked_lm_weights": tf.io.FixedLenFeature([MASKED], tf.float32),
        "next_sentence_labels": tf.io.FixedLenFeature([1], tf.int64),
    }

    def decode_record(record: Any) -> Any:
        example = tf.io.parse_single_example(record, names)
        example = {name: tf.cast(value, tf.int32) for name, value in example.items() if value.dtype == tf.int64}
        return example, example["next_sentence_labels"]

    files = sorted(map(str, folder.glob("tf_examples*")))
    dataset = tf.data.Dataset.from_tensor_slices(files).repeat().shuffle(len(files))
    dataset = dataset.interleave(
        tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=calls(numbers["interleave"])
    )
    dataset = dataset.shuffle(100)
    dataset = dataset.map(decode_record, num_parallel_calls=calls(numbers["decode_record"]))
    return dataset.batch(batch, drop_remainder=True)


def bert_model() -> Any:
    inputs = {
        **{
            name: keras.Input([LENGTH], dtype="int32", name=name) for name in ("input_ids", "input_mask", "segment_ids")
        },
        **{name: keras.Input([MASKED], dtype="int32", name=name) for name in ("masked_lm_positions", "masked_lm_ids")},
        "next_sentence_labels": keras.Input([1], dtype="int32", name="next_sentence_labels"),
    }
    words = keras.layers.Embedding(VOCABULARY, 32)(inputs["input_ids"])
    words += keras.layers.Embedding(2, 32)(inputs["segment_ids"])
    hidden = words + keras.layers.MultiHeadAttention(2, 16)(words, words)
    pooled = keras.layers.Dense(64, "relu")(keras.layers.GlobalAveragePooling1D()(hidden))
    return compiled(inputs, keras.layers.Dense(1, "sigmoid")(pooled), "binary_crossentropy")


# -- keras-io: wide, deep and cross networks on Covertype, make_csv_dataset and a cache --------------------------------


def covertype_data(folder: Path, rows: int) -> None:
    random = np.random.default_rng(SEED)
    names = [f"N{i}" for i in range(10)]
    with (folder / "train_data.csv").open("w") as file:
        file.write(",".join([*names, "Wilderness_Area", "Soil_Type", "Cover_Type"]) + "\n")
        for _ in range(rows):
            numbers = ",".join(map(str, random.integers(0, 4000, 10)))
            file.write(
                f"{numbers},area_type_{random.integers(4)},soil_type_{random.integers(40)},{random.integers(7)}\n"
            )


def covertype(folder: Path, numbers: Numbers, batch: int) -> Any:
    def process(features: Any, target: Any) -> Any:
        return dict(features), target

    dataset = tf.data.experimental.make_csv_dataset(
        str(folder / "train_data.csv"), batch, column_defaults=[*[[0]] * 10, ["NA"], ["NA"], [0]],
        label_name="Cover_Type", num_epochs=1, header=True, shuffle=True,
    )  # fmt: skip
    return dataset.map(process, num_parallel_calls=calls(numbers["process"])).cache()


def covertype_model() -> Any:
    inputs = {f"N{i}": keras.Input([], dtype="int32", name=f"N{i}") for i in range(10)}
    numbers = keras.ops.cast(keras.ops.stack(list(inputs.values()), -1), "float32") / 4000.0
    hidden = [numbers]
    for name, size in (("Wilderness_Area", 4), ("Soil_Type", 40)):
        inputs[name] = keras.Input([], dtype="string", name=name)
        hidden.append(keras.layers.Embedding(size, 6)(keras.layers.Hashing(size)(inputs[name])))
    deep = keras.ops.concatenate(hidden, -1)
    for _ in range(2):
        deep = keras.layers.Dense(32, "relu")(deep)
    return compiled(inputs, keras.layers.Dense(7, "softmax")(deep), "sparse_categorical_crossentropy")


# -- keras-io: weather forecasting, windows of a matrix in memory ------------------------------------------------------


def weather_data(folder: Path, rows: int) -> None:
    np.save(folder / "climate.npy", np.random.default_rng(SEED).normal(0, 1, (rows + 792, 7)).astype(np.float32))


def weather(folder: Path, numbers: Numbers, batch: int) -> Any:
    table = np.load(folder / "climate.npy")
    return keras.utils.timeseries_dataset_from_array(
        table[:-792], table[792:, 1:2], sequence_length=120, sampling_rate=6, batch_size=batch
    )


def weather_model() -> Any:
    past = keras.Input([120, 7])
    return compiled(past, keras.layers.Dense(1)(keras.layers.LSTM(32)(past)), "mse")
