"""The samples of a batch are counted where its tensors do not begin with the batch, too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.session.samples import Samples, batch_size_of  # noqa: E402

THREE = torch.zeros(3, 2)
IMAGES = [torch.full((3, 4 + index % 5, 6), float(index)) for index in range(19)]


def test_samples_are_counted_wherever_the_tensor_is() -> None:
    for batch in (THREE, THREE.numpy(), [THREE], {"x": {"y": (THREE, 1)}}, [torch.tensor(1.0), THREE], ["a", THREE]):
        for batch_size in (None, 3, 4, 100):
            assert Samples(batch_size).count(batch) == 3
    assert Samples().count({"text": "abc"}) == 1
    assert Samples().count(None) == 1


def test_later_batches_are_counted_where_the_first_was() -> None:
    samples = Samples(None)
    assert [samples.count(batch) for batch in ([THREE, 1], [THREE[:2], 1], ["ab", THREE], {"x": THREE}, THREE[:1])] == [
        *(3, 2, 3, 3, 1)
    ]
    for nothing in ("abc", {"text": "abc", "more": "abcd"}, object()):
        samples = Samples(None)
        assert [samples.count(nothing) for _ in range(3)] == [1, 1, 1]


def detected(size: int) -> dict[str, Any]:
    return {"image": torch.zeros(3, 5, 5), "height": size, "file_name": "a.jpg"}


@pytest.mark.parametrize(
    "make",
    [
        lambda size: (tuple(IMAGES[:size]), tuple({"labels": torch.zeros(index % 4)} for index in range(size))),
        lambda size: [detected(index) for index in range(size)],
        lambda size: {"inputs": IMAGES[:size], "data_samples": [object()] * size},
        lambda size: {"text": ["a"] * size, "id": "b"},
        lambda size: ["a"] * size,
        lambda size: [torch.zeros(2, 7), torch.zeros(size, 3)],
    ],
    ids=["torchvision", "detectron2", "mmdet", "texts", "a list of texts", "the second tensor"],
)
def test_of_a_batch_that_is_no_tensor(make: Any) -> None:
    samples = Samples(8)
    assert [samples.count(make(size)) for size in (8, 8, 5, 1)] == [8, 8, 5, 1]


def test_a_list_of_dicts_is_one_of_samples_where_no_loader_says_how_many_they_are() -> None:
    """Each image has three channels: four of them were counted as three samples."""
    samples = Samples()
    assert [samples.count([detected(index) for index in range(size)]) for size in (4, 4, 1)] == [4, 4, 1]
    for batch in ([{"x": THREE}, {"y": THREE}], [{"x": THREE}] * 2, [{"x": THREE}, {"y": THREE}, {"z": THREE}]):
        assert Samples().count(batch) == 3


def test_of_what_has_no_length_it_is_what_the_loader_says() -> None:
    assert Samples(8).count(object()) == 8


class Graphs:
    """A batch of PyTorch Geometric's: no tensor and no list, and it knows how many graphs it holds."""

    def __init__(self, graphs: Any) -> None:
        self.batch_size = graphs


def test_of_a_batch_that_says_it_that_counts() -> None:
    assert [Samples(size).count(Graphs(5)) for size in (None, 8)] == [5, 5]
    assert [Samples(8).count(Graphs(size)) for size in (None, -1, "5")] == [8, 8, 8]
    assert Samples(8).count([Graphs(5)] * 8) == 8


class Cached:
    """PyTorch Geometric's CachedLoader: says nothing of its batches."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


class Shapeless:
    """A ragged batch, such as torch's nested tensors, that raises when it is asked for its shape."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("no sizes")


def test_a_batch_that_raises_when_it_is_looked_at_is_what_the_loader_says() -> None:
    assert Samples(8).count([Shapeless(), THREE]) == 8
    assert Samples().count(Shapeless()) == 1


def test_a_batch_of_another_kind_is_counted_as_it_is() -> None:
    samples = Samples(8)
    assert [samples.count(batch) for batch in ([["a"] * 8, None], None, THREE, {"x": THREE})] == [8, 8, 3, 3]


def test_what_a_loader_says() -> None:
    batches = BatchSampler(SequentialSampler(IMAGES), 5, drop_last=False)
    assert batch_size_of(DataLoader(IMAGES, batch_size=4)) == 4
    assert batch_size_of(DataLoader(IMAGES, batch_sampler=batches)) == 5
    assert batch_size_of(DataLoader(IMAGES, batch_sampler=[[0, 1], [2]])) is None
    assert batch_size_of(DataLoader(IMAGES, batch_size=None)) is None
    assert batch_size_of([1]) is None
    assert batch_size_of(Cached(DataLoader(IMAGES, batch_size=4))) == 4
    assert batch_size_of(Cached(DataLoader(IMAGES, batch_sampler=batches))) == 5


def test_a_report_counts_images_and_not_their_channels() -> None:
    loader = live(DataLoader(IMAGES, batch_size=8, collate_fn=tuple), show_card=False)
    assert [len(batch) for batch in loader] == [8, 8, 3]
    assert loader.close()["whole"]["samples"] == len(IMAGES)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_report_of_lightning_counts_images_and_not_their_channels() -> None:
    runs = pytest.importorskip("lightning_runs")
    from intune_callbacks.lightning import InTuneCallback

    namespace, callback = runs.NAMESPACES["lightning.pytorch"], InTuneCallback(show_card=False)
    model = runs.make_model(namespace, training_step=lambda self, batch, index: self.layer.weight.sum() * len(batch))
    runs.make_trainer(namespace, callback, max_epochs=1).fit(model, DataLoader(IMAGES, batch_size=8, collate_fn=tuple))
    assert callback.report["whole"]["samples"] == len(IMAGES)
