"""Recommender pipelines on tf.data, as their authors wrote them; where from: `benchmarks.wild.catalogue_clicks`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.wild.data import SEED, clicks
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_keras import calls, click_model, compiled

DENSE, CATEGORIES, WORDS = 13, 26, 10_000
MOVIES, SEQUENCE = 3000, 4


# -- tensorflow/models: ranking on pre-processed Criteo rows -----------------------------------------------------------


def ranking_data(folder: Path, rows: int) -> None:
    shards, lines = 16, clicks(rows, DENSE, CATEGORIES, WORDS)
    for shard in range(shards):
        with (folder / f"part-{shard:05d}.tsv").open("w") as file:
            file.writelines("\t".join(next(lines)) + "\n" for _ in range(rows // shards))


def ranking(folder: Path, numbers: Numbers, batch: int) -> Any:
    defaults = [[0.0]] * (1 + DENSE) + [[0]] * CATEGORIES
    files = tf.data.Dataset.list_files(str(folder / "part-*"), shuffle=False)
    shards = 8  # num_shards_per_host

    @tf.function  # type: ignore[untyped-decorator]
    def parse(lines: Any) -> Any:
        fields = tf.io.decode_csv(lines, defaults, field_delim="\t", na_value="-1")
        columns = {str(i): column for i, column in enumerate(fields[1 + DENSE :])}
        features = {"dense_features": tf.stack(fields[1 : 1 + DENSE], axis=1), "sparse_features": columns}
        return features, tf.reshape(fields[0], [batch, 1])

    def read_shard(index: Any) -> Any:
        lines = tf.data.TextLineDataset(files.shard(shards, index)).repeat().batch(batch, drop_remainder=True)
        return lines.map(parse, num_parallel_calls=calls(numbers["parse"]))

    dataset = tf.data.Dataset.range(shards)
    dataset = dataset.interleave(read_shard, cycle_length=10, num_parallel_calls=calls(numbers["interleave"]))
    return dataset.prefetch(numbers["prefetch"])


def ranking_model() -> Any:
    numbers = keras.Input([DENSE], name="dense_features")
    columns = {str(i): keras.Input([], dtype="int32", name=str(i)) for i in range(CATEGORIES)}
    ids = [keras.ops.mod(column, 1000) for column in columns.values()]
    return click_model({"dense_features": numbers, "sparse_features": columns}, numbers, ids, 1000)


# -- lambdaji/tf_repos: DeepFM on libsvm rows, ten parsers and a prefetch of 500,000 -----------------------------------


def deepfm_data(folder: Path, rows: int) -> None:
    files, lines = 4, clicks(rows, DENSE, CATEGORIES, WORDS)
    for number in range(files):
        with (folder / f"tr{number}.libsvm").open("w") as file:
            for _ in range(rows // files):
                label, *fields = next(lines)
                dense = [f"{i + 1}:{value}" for i, value in enumerate(fields[:DENSE])]
                ids = [f"{DENSE + 1 + i * 300 + int(word) % 300}:1" for i, word in enumerate(fields[DENSE:])]
                file.write(" ".join([label, *dense, *ids]) + "\n")


def deepfm(folder: Path, numbers: Numbers, batch: int) -> Any:
    fields = DENSE + CATEGORIES

    def decode_libsvm(line: Any) -> Any:
        columns = tf.strings.split(line, " ")
        pairs = tf.strings.split(columns[1:], ":").to_tensor()
        ids, values = tf.split(tf.ensure_shape(pairs, [fields, 2]), 2, axis=1)
        features = {"feat_ids": tf.strings.to_number(ids, tf.int32), "feat_vals": tf.strings.to_number(values)}
        return features, tf.strings.to_number(columns[0])

    lines = tf.data.TextLineDataset(sorted(map(str, folder.glob("tr*"))))
    dataset = lines.map(decode_libsvm, num_parallel_calls=calls(numbers["decode_libsvm"])).prefetch(numbers["prefetch"])
    return dataset.repeat(10).batch(batch)


def deepfm_model() -> Any:
    fields = DENSE + CATEGORIES
    ids = keras.Input([fields, 1], dtype="int32", name="feat_ids")
    values = keras.Input([fields, 1], name="feat_vals")
    embedded = keras.layers.Embedding(8000, 16)(keras.ops.squeeze(ids, -1)) * values
    hidden = keras.layers.Flatten()(embedded)
    for units in (256, 128, 64):
        hidden = keras.layers.Dense(units, "relu")(hidden)
    click = keras.layers.Dense(1, "sigmoid")(hidden)
    return compiled({"feat_ids": ids, "feat_vals": values}, click, "binary_crossentropy")


# -- DeepRec: Wide & Deep on one CSV file, 28 parsers ------------------------------------------------------------------


def deeprec_data(folder: Path, rows: int) -> None:
    with (folder / "train.csv").open("w") as file:
        for label, *fields in clicks(rows, DENSE, CATEGORIES, WORDS):
            words = [f"{int(word) * 2654435761 % (1 << 32):08x}" for word in fields[DENSE:]]
            file.write(",".join([label, *fields[:DENSE], *words]) + "\n")


def deeprec(folder: Path, numbers: Numbers, batch: int) -> Any:
    defaults = [[0], *[[0.0]] * DENSE, *[[" "]] * CATEGORIES]

    def parse_csv(lines: Any) -> Any:
        label, *columns = tf.io.decode_csv(lines, defaults)
        dense = {f"I{i + 1}": column for i, column in enumerate(columns[:DENSE])}
        return {**dense, **{f"C{i + 1}": column for i, column in enumerate(columns[DENSE:])}}, label

    dataset = tf.data.TextLineDataset(str(folder / "train.csv")).shuffle(20_000, seed=2021).repeat().batch(batch)
    return dataset.map(parse_csv, num_parallel_calls=calls(numbers["parse_csv"])).prefetch(numbers["prefetch"])


def deeprec_model() -> Any:
    dense = {f"I{i + 1}": keras.Input([], name=f"I{i + 1}") for i in range(DENSE)}
    words = {f"C{i + 1}": keras.Input([], dtype="string", name=f"C{i + 1}") for i in range(CATEGORIES)}
    ids = [keras.layers.Hashing(1000)(word) for word in words.values()]
    return click_model({**dense, **words}, keras.ops.stack(list(dense.values()), -1), ids, 1000)


# -- keras-io: behaviour sequence transformer on MovieLens, make_csv_dataset -------------------------------------------


def movielens_data(folder: Path, rows: int) -> None:
    random = np.random.default_rng(SEED)
    with (folder / "train_data.csv").open("w") as file:
        for _ in range(rows):
            movies = ",".join(f"movie_{i}" for i in random.integers(0, MOVIES, SEQUENCE))
            ratings = ",".join(f"{i}.0" for i in random.integers(1, 6, SEQUENCE))
            user, group, work = (int(random.integers(high)) for high in (6000, 7, 20))
            file.write(f"user_{user}|{movies}|{ratings}|{'MF'[user % 2]}|group_{group}|occupation_{work}\n")


def movielens(folder: Path, numbers: Numbers, batch: int) -> Any:
    columns = ["user_id", "sequence_movie_ids", "sequence_ratings", "sex", "age_group", "occupation"]

    def process(features: Any) -> Any:
        features = dict(features)
        movies = tf.strings.split(features["sequence_movie_ids"], ",").to_tensor(shape=[None, SEQUENCE])
        ratings = tf.strings.split(features["sequence_ratings"], ",").to_tensor(shape=[None, SEQUENCE])
        ratings = tf.strings.to_number(ratings)
        features["target_movie_id"], features["sequence_movie_ids"] = movies[:, -1], movies[:, :-1]
        features["sequence_ratings"] = ratings[:, :-1]
        return features, ratings[:, -1]

    dataset = tf.data.experimental.make_csv_dataset(
        str(folder / "train_data.csv"), batch, column_names=columns, header=False, field_delim="|", shuffle=True
    )
    return dataset.map(process, num_parallel_calls=calls(numbers["process"]))


def movielens_model() -> Any:
    names = {"user_id": 6000, "sex": 2, "age_group": 7, "occupation": 21}
    inputs = {name: keras.Input([], dtype="string", name=name) for name in (*names, "target_movie_id")}
    inputs["sequence_movie_ids"] = keras.Input([SEQUENCE - 1], dtype="string", name="sequence_movie_ids")
    inputs["sequence_ratings"] = keras.Input([SEQUENCE - 1], name="sequence_ratings")
    movie_ids, movies = keras.layers.Hashing(MOVIES), keras.layers.Embedding(MOVIES, 48)
    seen = movies(movie_ids(inputs["sequence_movie_ids"])) * keras.ops.expand_dims(inputs["sequence_ratings"], -1)
    target = keras.ops.expand_dims(movies(movie_ids(inputs["target_movie_id"])), 1)
    steps = keras.ops.concatenate([seen, target], 1)
    hidden = [keras.layers.Flatten()(steps + keras.layers.MultiHeadAttention(3, 16)(steps, steps))]
    for name, size in names.items():
        hidden.append(keras.layers.Embedding(size, 8)(keras.layers.Hashing(size)(inputs[name])))
    deep = keras.ops.concatenate(hidden, -1)
    for units in (256, 128):
        deep = keras.layers.Dense(units, "relu")(deep)
    return compiled(inputs, keras.layers.Dense(1)(deep), "mse")
