"""Vision pipelines on torch, as their authors wrote them; where from: `benchmarks.wild.catalogue_vision`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchdata.nodes
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.wild.data import SEED, pictures
from benchmarks.wild.entry import Numbers
from benchmarks.wild.models_torch import Convolutional, options

CLASSES = 10
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def crop_box(draw: random.Random, height: int, width: int) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the usual random crop: .08 to 1 of the area, sides 3:4 to 4:3."""
    for _ in range(10):
        area = height * width * draw.uniform(0.08, 1.0)
        ratio = draw.uniform(3 / 4, 4 / 3)
        high, wide = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        if 0 < high <= height and 0 < wide <= width:
            top, left = draw.randint(0, height - high), draw.randint(0, width - wide)
            return left, top, left + wide, top + high
    return 0, 0, width, height


def normalized(image: Any) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    return (pixels - MEAN[:, None, None]) / SPREAD[:, None, None]


# -- pytorch/examples: ImageNet folders, 4 workers ---------------------------------------------------------------------


class ImageFolder(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.samples = [(path, i) for i, name in enumerate(classes) for path in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with path.open("rb") as file:
            image = Image.open(file).convert("RGB")
        draw = random.Random(index)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=crop_box(draw, image.height, image.width))
        pixels = normalized(image)
        return (pixels.flip(-1) if draw.random() < 0.5 else pixels), label


def imagenet_data(folder: Path, rows: int) -> None:
    pictures(folder, rows, CLASSES, height=188, width=250)


def imagenet(folder: Path, numbers: Numbers, batch: int) -> Any:
    return DataLoader(ImageFolder(folder), batch_size=batch, shuffle=True, **options(numbers))


def imagenet_model() -> Any:
    return Convolutional(CLASSES)


# -- kuangliu/pytorch-cifar: small pictures in memory, 2 workers, a model that is slower than its data -----------------


class Cifar(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.data, self.targets = data["data"], data["targets"]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        draw, image = random.Random(index), Image.fromarray(self.data[index])
        padded = Image.new("RGB", (40, 40))
        padded.paste(image, (4, 4))
        left, top = draw.randint(0, 8), draw.randint(0, 8)
        image = padded.crop((left, top, left + 32, top + 32))
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else image
        return normalized(image), int(self.targets[index])


def cifar_data(folder: Path, rows: int) -> None:
    draw = np.random.default_rng(SEED)
    data = draw.integers(0, 256, (rows, 32, 32, 3), np.uint8)
    np.savez(folder / "train.npz", data=data, targets=draw.integers(0, CLASSES, rows))


def cifar(folder: Path, numbers: Numbers, batch: int) -> Any:
    data = Cifar(folder / "train.npz")
    return DataLoader(data, batch_size=batch, shuffle=True, **options(numbers))


def cifar_model() -> Any:
    return Convolutional(CLASSES, width=32, stride=1)


# -- ultralytics/yolov5: mosaics, a loader whose workers live for ever -------------------------------------------------


class Mosaics(Dataset[Any]):
    def __init__(self, folder: Path, size: int) -> None:
        self.paths, self.size = sorted(folder.glob("*/*.jpg")), size
        draw = np.random.default_rng(SEED)
        self.labels = [np.hstack([draw.integers(0, CLASSES, (3, 1)), draw.random((3, 4))]) for _ in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def _load(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        scale = self.size / max(image.size)
        return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)

    def __getitem__(self, index: int) -> Any:
        draw, size = random.Random(index), self.size
        middle_x, middle_y = (int(draw.uniform(0.5 * size, 1.5 * size)) for _ in range(2))
        four = [index, *draw.choices(range(len(self)), k=3)]
        draw.shuffle(four)
        canvas = Image.new("RGB", (2 * size, 2 * size), (114, 114, 114))
        for place, number in enumerate(four):
            image = self._load(number)
            canvas.paste(
                image,
                (middle_x - (image.width if place % 2 == 0 else 0), middle_y - (image.height if place < 2 else 0)),
            )
        gain = draw.uniform(0.5, 1.5)
        shift = [draw.uniform(0.4, 0.6) * size - size / gain / 2 + size / 2 for _ in range(2)]
        canvas = canvas.transform(
            (size, size), Image.Transform.AFFINE, (1 / gain, 0, shift[0], 0, 1 / gain, shift[1]),
            Image.Resampling.BILINEAR, fillcolor=(114, 114, 114),
        )  # fmt: skip
        hue = np.array(canvas.convert("HSV"), np.int16)
        hue = np.clip(hue * [1 + draw.uniform(-1, 1) * part for part in (0.015, 0.7, 0.4)], 0, 255).astype(np.uint8)
        pixels = np.array(Image.fromarray(hue, "HSV").convert("RGB"))
        pixels = pixels[:, ::-1] if draw.random() < 0.5 else pixels
        labels = np.concatenate([self.labels[number] for number in four])
        found = torch.zeros(len(labels), 6)
        found[:, 1:] = torch.from_numpy(labels)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), found


def numbered(rows: Sequence[Any]) -> Any:
    images, labels = zip(*rows, strict=True)
    for i, found in enumerate(labels):
        found[:, 0] = i
    return torch.stack(images), torch.cat(labels)


class RepeatSampler:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader[Any]):
    """Its iterator is made once; each epoch takes its batches from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Boxes(Convolutional):
    def forward(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        classes = torch.zeros(len(images), CLASSES)
        classes[labels[:, 0].long(), labels[:, 1].long()] = 1.0
        return torch.nn.functional.binary_cross_entropy_with_logits(self.body(images.float() / 255), classes)


def yolo_data(folder: Path, rows: int) -> None:
    pictures(folder, rows, CLASSES, height=240, width=320)


def yolo(folder: Path, numbers: Numbers, batch: int) -> Any:
    generator = torch.Generator()
    generator.manual_seed(6148914691236517205)
    return InfiniteDataLoader(
        Mosaics(folder, 320), batch_size=batch, shuffle=True, **options(numbers),
        collate_fn=numbered, generator=generator,
    )  # fmt: skip


def yolo_model() -> Any:
    return Boxes(CLASSES)


# -- torchdata.nodes: its own ImageNet benchmark -----------------------------------------------------------------------


class Lister:
    """All paths in order, for ever."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))

    def __iter__(self) -> Iterator[Any]:
        for path in itertools.cycle(self.paths):
            yield {"img_path": str(path)}


def transform(batch: list[Any]) -> Any:
    return default_collate([transform_one(item) for item in batch])


def transform_one(item: Any) -> Any:
    image = Image.open(item["img_path"]).convert("RGB")
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + 224, top + 224)))).permute(2, 0, 1)
    return {**item, "img": pixels}


class Pictures(Convolutional):
    def forward(self, batch: Any) -> torch.Tensor:
        labels = torch.tensor([int(Path(path).parent.name) for path in batch["img_path"]])
        return super().forward((batch["img"].float() / 255, labels))


def nodes_data(folder: Path, rows: int) -> None:
    pictures(folder, rows, CLASSES, height=240, width=320)


def nodes(folder: Path, numbers: Numbers, batch: int) -> Any:
    node: Any = torchdata.nodes.IterableWrapper(Lister(folder))
    node = torchdata.nodes.Batcher(node, batch_size=batch)
    node = torchdata.nodes.ParallelMapper(node, map_fn=transform, num_workers=numbers["num_workers"], method="thread")
    return torchdata.nodes.Loader(torchdata.nodes.Prefetcher(node, prefetch_factor=numbers["prefetch_factor"]))


def nodes_model() -> Any:
    return Pictures(CLASSES)
