"""Versions: what the adapters rely on is looked for, what is missing costs the tuning and never the training."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from docs_pages import ROOT, text_of  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402
from intune_callbacks.pipelines.torch import private as torch_private  # noqa: E402
from intune_callbacks.pipelines.torch import window as torch_window  # noqa: E402
from intune_callbacks.session.keras_hooks import from_fit  # noqa: E402

EAGER: dict[str, Any] = {"decide_every_s": 0.05, "decide_every_batches": 5, "warmup_batches": 2, "show_card": False}
PIPELINES = ROOT / "intune_callbacks" / "pipelines"
ADAPTERS = [*(PIPELINES / "torch").glob("*.py"), PIPELINES / "delivered.py", PIPELINES / "watched.py"]
GUARDED = {"_data_queue", "_workers_status", "_new_shared"}
"""Without the first, `Watch` counts no batch as ready; without the second, nobody is told which workers deliver; the
third is only set."""
OTHERS = {"_batched", "_ex_iterable", "_formatting", "_prepare_ex_iterable_for_iteration", "_state_dict"}
"""Of `datasets` and webdataset: without them `hook_of` finds none."""
BY_PACKAGE = {"torch": torch_private.TORCH, "torchdata": torch_private.TORCHDATA}


def rows(**given: Any) -> DataLoader[Any]:
    return DataLoader(range(200), batch_size=4, **given)


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the private names that our own classes define or assign to themselves."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def test_every_private_name_is_looked_for() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in ADAPTERS]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and ast.unparse(node.value) != "self"
    }
    known = {name for needed in BY_PACKAGE.values() for names in needed.values() for name in names}
    assert len(used) > 20
    assert used - own_names(trees) - known <= GUARDED | OTHERS


@pytest.mark.parametrize("package", BY_PACKAGE)
def test_all_is_there_in_the_installed_version(package: str) -> None:
    pytest.importorskip(package)
    assert not torch_private.why_not(package)


@pytest.mark.parametrize(("place", "name"), [(p, n) for p, names in torch_private.TORCH.items() for n in names])
def test_each_missing_name_is_found_and_told(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, kind = place.partition(":")
    other = ModuleType(module)  # of this version but for the one name, whether a module or a class has it
    held = importlib.import_module(module)
    vars(other).update({key: value for key, value in vars(held).items() if key != name})
    if kind:
        stock = getattr(held, kind)
        found = {*dir(stock), *torch_private._used_in(stock)} - {name}
        setattr(other, kind, SimpleNamespace(**dict.fromkeys(found)))
    monkeypatch.setitem(sys.modules, module, other)
    why = torch_private.why_not("torch")
    assert f"this version of torch has no {place.replace(':', '.')}.{name}" in why and "intune doctor" in why


def test_a_training_goes_on_where_a_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.accelerator, "set_device_index")
    loader = rows(num_workers=1)
    assert find(loader).pipeline is None
    tuned = live(loader, **EAGER)
    for _ in range(2):
        assert [batch[0].item() for batch in tuned] == [*range(0, 200, 4)]
    tuned.close()
    assert tuned.report["after"]["wait_frac"] is not None
    assert "torch.accelerator.set_device_index" in tuned.report["next"]
    assert "_get_iterator" not in vars(loader)


def test_an_iterator_that_lacks_a_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    monkeypatch.setattr(torch_window, "RUNNING", (*torch_private.RUNNING, "_of_another_version"))
    loader = stateful.StatefulDataLoader(range(200), batch_size=4, num_workers=1)
    tuned = live(loader, **EAGER)
    assert [batch[0].item() for batch in tuned] == [*range(0, 200, 4)]
    tuned.close()
    assert "no iterator of DataLoader was found" in tuned.report["next"]


def test_a_graph_that_lacks_a_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    mapper = nodes.ParallelMapper(nodes.IterableWrapper(range(50)), abs, num_workers=1, method="thread")
    assert find(nodes.Loader(mapper)).pipeline is not None
    monkeypatch.setitem(torch_private.TORCHDATA, "torchdata.nodes.map:_ParallelMapperImpl", ("_of_another_version",))
    tuned = live(nodes.Loader(mapper), **EAGER)
    assert [*tuned] == [*range(50)]
    tuned.close()
    assert "this version of torchdata has no torchdata.nodes.map._ParallelMapperImpl" in tuned.report["next"]


@pytest.mark.parametrize(
    ("module", "names", "is_found"),
    [
        ("keras.src.backend.tensorflow.trainer", ("data_adapter", "_get_iterator", "_distributed_dataset"), True),
        ("keras.src.backend.tensorflow.trainer", ("data_adapter", "_get_iterator"), False),
        ("keras.src.backend.torch.trainer", ("data_adapter", "_get_iterator"), True),
        ("keras.src.backend.torch.trainer", ("data_adapter",), False),
    ],
)
def test_another_keras_keeps_its_iterator(module: str, names: tuple[str, ...], is_found: bool) -> None:
    kind = type("EpochIterator", (), {"__module__": module, **dict.fromkeys(names, lambda self: None)})

    def fit(epoch_iterator: Any) -> Any:
        callbacks = "listed"
        return from_fit(sys._getframe()), callbacks

    (iterator, _), _ = fit(kind())
    assert (iterator is not None) == is_found


# -- what is said of versions ------------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    return dict(tomllib.loads(text_of("pyproject.toml"))["project"])


def lowest() -> Mapping[str, str]:
    """Return package -> lower bound, of all extras."""
    asked = [
        *project()["dependencies"],
        *(line for lines in project()["optional-dependencies"].values() for line in lines),
    ]
    pairs = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in asked)
    return {pair[1]: pair[2] for pair in pairs if pair is not None}


def test_the_page_has_the_bounds_of_the_project() -> None:
    told = dict(re.findall(r"^\| ([\w.-]+) \| >= ([\d.]+) \|", text_of("docs/versions.md"), re.MULTILINE))
    assert told.pop("Python") == project()["requires-python"].removeprefix(">=")
    assert told == lowest()


def test_the_oldest_environment_has_the_oldest_versions() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\d.]+)$", text_of("constraints-oldest.txt"), re.MULTILINE))
    oldest = lowest()
    for name in ("torch", "torchdata", "pytorch-lightning", "numpy", "psutil"):
        assert pinned[name].startswith(f"{oldest[name]}."), name
    assert f"keras=={oldest['keras']}." in text_of("tox.ini")
    assert pinned["lightning"] == pinned["pytorch-lightning"]
    assert pinned["tensorflow-cpu"].startswith(f"{oldest['tensorflow']}.")
