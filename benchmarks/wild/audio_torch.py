"""Audio and tar pipelines on torch, as their authors wrote them; where from: `benchmarks.wild.catalogue_vision`."""

from __future__ import annotations

import io
import random
import tarfile
import wave
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from benchmarks.wild.data import jpeg, waves
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_torch import options

RATE, COMMANDS = 16_000, 35


# -- pytorch/tutorials: speech commands, wav files without workers -----------------------------------------------------


class SpeechCommands(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.wav"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        with wave.open(str(path)) as file:
            frames = np.frombuffer(file.readframes(file.getnframes()), np.int16)
            rate = file.getframerate()
        return torch.from_numpy(frames.astype(np.float32) / 32768)[None], rate, path.parent.name, path.stem, 0


def padded(rows: Sequence[Any]) -> Any:
    waveforms = nn.utils.rnn.pad_sequence([row[0].t() for row in rows], batch_first=True)
    return waveforms.permute(0, 2, 1), torch.stack([torch.tensor(int(row[2])) for row in rows])


class M5(nn.Module):
    """Halves the rate, then four small convolutions."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.AvgPool1d(2)]
        for before, after, kernel, stride in ((1, 16, 80, 16), (16, 16, 3, 1), (16, 32, 3, 1), (32, 32, 3, 1)):
            layers += [nn.Conv1d(before, after, kernel, stride), nn.ReLU(), nn.MaxPool1d(3)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, COMMANDS))

    def forward(self, batch: Any) -> torch.Tensor:
        waveforms, labels = batch
        return nn.functional.cross_entropy(self.body(waveforms), labels)


def commands_data(folder: Path, rows: int) -> None:
    waves(folder, rows, COMMANDS, RATE)


def commands(folder: Path, numbers: Numbers, batch: int) -> Any:
    return DataLoader(SpeechCommands(folder), batch_size=batch, shuffle=True, collate_fn=padded, **options(numbers))


def commands_model() -> Any:
    return M5()


# -- mlfoundations/open_clip: tar shards for 4 workers, two shuffle buffers --------------------------------------------

CONTEXT = 77


def shuffled(items: Iterable[Any], size: int, initial: int, draw: random.Random) -> Iterator[Any]:
    """Yield items drawn from a buffer that is filled up to `initial` first, and grows up to `size`."""
    buffer: list[Any] = []
    source = iter(items)
    for item in source:
        buffer.append(item)
        if len(buffer) < size and (another := next(source, None)) is not None:
            buffer.append(another)
        if len(buffer) >= initial:
            yield taken(buffer, draw)
    while buffer:
        yield taken(buffer, draw)


def taken(buffer: list[Any], draw: random.Random) -> Any:
    at = draw.randint(0, len(buffer) - 1)
    buffer[at], buffer[-1] = buffer[-1], buffer[at]
    return buffer.pop()


class Shards(IterableDataset[Any]):
    """Batches of pictures and their captions, from the tar files of this worker.

    Args:
        folder: of the tar files.
        batch: pairs of one batch.
    """

    def __init__(self, folder: Path, batch: int) -> None:
        self.paths, self.batch, self.epoch = sorted(folder.glob("*.tar")), batch, -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        info, draw = get_worker_info(), random.Random(self.epoch)
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        mine = list(shuffled(self.paths, 2000, 500, draw))[number::workers]
        batch: list[Any] = []
        for picture, caption in shuffled(self._pairs(mine), 5000, 1000, random.Random(1000 * self.epoch + number)):
            image = Image.open(io.BytesIO(picture)).convert("RGB")
            image = image.resize((224, 224), Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
            words = [sum(word.encode()) % 1000 for word in caption.split()][:CONTEXT]
            batch.append((pixels, torch.tensor(words + [0] * (CONTEXT - len(words)))))
            if len(batch) == self.batch:
                yield default_collate(batch)
                batch = []

    def _pairs(self, paths: Sequence[Path]) -> Iterator[tuple[bytes, str]]:
        for path in paths:
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|*") as tar:
                picture = b""
                for member in tar:
                    found = tar.extractfile(member)
                    content = b"" if found is None else found.read()
                    if member.name.endswith(".jpg"):
                        picture = content
                    else:
                        yield picture, content.decode()


class Clip(nn.Module):
    """Two small towers and the contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(1000, 32)
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Conv2d(8, 16, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(16, 32),
        )  # fmt: skip

    def forward(self, batch: Any) -> torch.Tensor:
        images, captions = batch
        left, right = (nn.functional.normalize(x) for x in (self.image(images), self.words(captions)))
        return nn.functional.cross_entropy(10 * left @ right.t(), torch.arange(len(left)))


def clip_data(folder: Path, rows: int) -> None:
    shards = 32
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, rows, shards):
                caption = " ".join(f"word{number * 31 % 97 + i}" for i in range(8 + number % 9))
                pair = (("jpg", jpeg(number, height=188, width=250)), ("txt", caption.encode()))
                for kind, content in pair:
                    member = tarfile.TarInfo(f"{number:08d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def clip(folder: Path, numbers: Numbers, batch: int) -> Any:
    return DataLoader(Shards(folder, batch), batch_size=None, **options(numbers))


def clip_model() -> Any:
    return Clip()
