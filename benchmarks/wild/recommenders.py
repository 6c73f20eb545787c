"""Public recommender pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.wild.data import clicks
from benchmarks.wild.entry import AUTOTUNE, POWERS, Entry, Fit, Numbers

__all__ = ["ENTRIES"]

DENSE, CATEGORIES, WORDS = 13, 26, 10_000


# -- tensorflow/models: ranking on Criteo, pre-processed TSV -----------------------------------------------------------


def ranking_data(folder: Path, rows: int) -> None:
    shards, lines = 16, clicks(rows, DENSE, CATEGORIES, WORDS)
    for shard in range(shards):
        with (folder / f"part-{shard:05d}.tsv").open("w") as file:
            for _ in range(rows // shards):
                file.write("\t".join(next(lines)) + "\n")


def ranking(folder: Path, numbers: Numbers) -> Any:
    import tensorflow as tf

    batch = RANKING_BATCH
    defaults = [[0.0]] * (1 + DENSE) + [[0]] * CATEGORIES
    files = tf.data.Dataset.list_files(str(folder / "part-*"), shuffle=False)
    shards = 8  # num_shards_per_host

    @tf.function  # type: ignore[untyped-decorator]
    def parse(lines: Any) -> Any:
        fields = tf.io.decode_csv(lines, defaults, field_delim="\t", na_value="-1")
        columns = {str(i): column for i, column in enumerate(fields[1 + DENSE :])}
        features = {"dense_features": tf.stack(fields[1 : 1 + DENSE], axis=1), "sparse_features": columns}
        return features, tf.reshape(fields[0], [batch, 1])

    def shard(index: Any) -> Any:
        lines = tf.data.TextLineDataset(files.shard(shards, index)).repeat().batch(batch, drop_remainder=True)
        return lines.map(parse, num_parallel_calls=numbers["parse"])

    dataset = tf.data.Dataset.range(shards).interleave(shard, cycle_length=10, num_parallel_calls=numbers["interleave"])
    return dataset.prefetch(numbers["prefetch"])


def ranking_model() -> Any:
    from benchmarks.wild.models_keras import criteo

    return criteo(DENSE, CATEGORIES, 1000)


RANKING_BATCH = 1024

ENTRIES = (
    Entry(
        name="tfmodels-ranking",
        framework="keras",
        kind="tf.data",
        domain="recommender",
        repository="tensorflow/models",
        commit="00b830c7ca641413f37e5147cf059c89f79b0e8e",
        path="official/recommendation/ranking/data/data_pipeline.py",
        left_out="a batch of 1,024 instead of 16,384, 26 small tables; no distribution context",
        batch=RANKING_BATCH,
        numbers={"interleave": AUTOTUNE, "parse": AUTOTUNE, "prefetch": AUTOTUNE},
        make=ranking_data,
        rows=400_000,
        tiny=16 * RANKING_BATCH,
        load=ranking,
        model=ranking_model,
        short=Fit(1, 900),
        long=Fit(1, 6000),
        sweep={"interleave": POWERS[:4], "parse": POWERS[:4]},
        read_ms=30,
        could_gain=True,
    ),
)
