"""Public text pipelines."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wild.data import SEED
from benchmarks.wild.entry import Entry, Fit, Numbers

__all__ = ["ENTRIES"]

# -- Adibvafa/CodonTransformer: one JSON.gz, each of 5 workers reads all of it and keeps its part ----------------------

CODONS, SPECIAL, ORGANISMS, LONGEST = 64, 26, 164, 256


def codon_data(folder: Path, rows: int) -> None:
    random = np.random.default_rng(SEED)
    words = [
        f"{'ACDEFGHIKLMNPQRSTVWY'[i % 20]}_{'ACGT'[i // 16]}{'ACGT'[i // 4 % 4]}{'ACGT'[i % 4]}" for i in range(64)
    ]
    with gzip.open(folder / "train.json.gz", "wt", compresslevel=6) as file:
        for _ in range(rows):
            codons = random.integers(0, CODONS, random.integers(80, LONGEST))
            row = {"codons": " ".join(words[i] for i in codons), "organism": int(random.integers(ORGANISMS))}
            file.write(json.dumps(row) + "\n")


def codon_transformer(folder: Path, numbers: Numbers) -> Any:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Lines(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            lines = map(json.loads, gzip.open(folder / "train.json.gz", "rt"))
            return lines if info is None else itertools.islice(lines, info.id, None, info.num_workers)

    def masked(rows: list[Any]) -> Any:
        ids = [[SPECIAL + hash_of(word) for word in row["codons"].split()[:LONGEST]] for row in rows]
        longest = max(map(len, ids))
        inputs = torch.tensor([line + [0] * (longest - len(line)) for line in ids])
        targets = inputs.clone()
        selected = torch.bernoulli(torch.where(inputs < 5, 0.0, 0.15)).bool()
        replaced = torch.bernoulli(torch.full(inputs.shape, 0.8)).bool() & selected
        inputs[replaced] = 4
        drawn = torch.bernoulli(torch.full(inputs.shape, 0.1)).bool() & selected & ~replaced
        inputs[drawn] = torch.randint(SPECIAL, SPECIAL + CODONS, inputs.shape)[drawn]
        return {"input_ids": inputs, "labels": torch.where(selected, targets, -100)}

    def hash_of(word: str) -> int:
        return ("ACGT".index(word[2]) * 4 + "ACGT".index(word[3])) * 4 + "ACGT".index(word[4])

    workers = numbers["num_workers"]
    return DataLoader(Lines(), collate_fn=masked, batch_size=6, num_workers=workers, persistent_workers=workers > 0)


def codon_model() -> Any:
    from benchmarks.wild.models_torch import Tokens

    return Tokens(SPECIAL + CODONS, width=32)


ENTRIES = (
    Entry(
        name="codon-transformer",
        framework="lightning",
        kind="iterable",
        domain="text",
        repository="Adibvafa/CodonTransformer",
        commit="1043fc3cf21e1f73a778e8d8b0a00b8d06303275",
        path="pretrain.py",
        left_out="the Hugging Face tokenizer is a table of codons; genes of at most 256 codons; the file is compressed, "
        "which the code allows for; one process instead of 16 GPUs",
        batch=6,
        numbers={"num_workers": 5},
        make=codon_data,
        rows=6000,
        tiny=240,
        load=codon_transformer,
        model=codon_model,
        short=Fit(2),
        long=Fit(12),
    ),
)
