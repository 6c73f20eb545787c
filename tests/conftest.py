"""What all tests share: the tiers, how patient hypothesis is, what is compiled ahead, a run to look at.

Tiers: what is quick, in parallel, for everybody; ``timing``, which wants the machine to itself (see `busy_machine`);
``slow``, which runs at every change beside these (`slow.txt`); and the campaign, before a release. Beside them
``core``: what a missing extra may change.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from hypothesis import settings

# No example fails for its time: on a busy machine a single stall is longer than the 200 ms that are the default.
# The same examples at every change, so that what fails is the change; others at each campaign.
settings.register_profile("patient", deadline=None, derandomize="INTUNE_TEST_RANDOM" not in os.environ)
settings.load_profile("patient")
if os.environ.get("INTUNE_TEST_CORE"):
    # The same properties are tested with all examples where everything is installed.
    settings.register_profile("core", settings.get_profile("patient"), max_examples=20)
    settings.load_profile("core")

# A test says itself in which mode it runs.
os.environ.pop("INTUNE_MODE", None)

# Before anybody imports torch: on small arrays and busy cores its threads mostly wait for each other (a test that
# trains a small network took 74 s with two of them, 13 s with one).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Faults, hostile datasets, soaks and sanitizers; whole fits of all kinds and backends; ranks in processes of their own;
# limits of memory that kill; a browser; every recipe, every block of the documentation, every benchmark for a moment.
CAMPAIGN = {
    *("fault_ends", "fault_matrix", "reach_loaders", "reach_matrix", "hostile_datasets", "native_sanitizers", "soak"),
    *("keras_backends", "keras_pydataset", "keras_unchanged", "start_methods"),
    *("helpers", "helpers_packages", "helpers_refused"),
    *("lightning_unchanged", "lightning_memory", "tfdata_memory"),
    *("cuda", "dlrm_hybrid", "dlrm_hybrid_fit", "dlrm_hybrid_jax", "dlrm_hybrid_ranks", "lightning_ddp", "loop_ranks"),
    *("page_browser", "docs", "examples", "recipes_all", "recipes_bad_rows", "dlrm_dcn", "net_hostile"),
    *("benchmarks", "benchmarks_machine", "benchmarks_criteo", "benchmarks_never_slower"),
    *("benchmarks_tfdata", "benchmarks_wild"),
}
CORE = {
    *("core", "missing_packages", "imports", "exports", "cli", "doctor", "check", "words", "history"),
    *("elastic", "elastic_workers", "report", "report_card", "card", "watch", "watch_reading", "page_reading"),
    *("tuner", "tuner_faults", "tuner_pace", "guard", "net", "net_windows", "permit"),
    *("policies", "agent_dqn", "agent_tuned", "weights"),
    *("saved", "run_dir", "monitor_resources"),
}

# Of each name, whether its first case is quick all the same.
SLOW = {
    name: bool(first)
    for name, _, first in (
        line.partition(" ")
        for line in (Path(__file__).parent / "slow.txt").read_text().splitlines()
        if not line.startswith("#")
    )
}

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_lightning*.py", "test_benchmarks.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which the asked tier has nothing: importing all frameworks takes half a minute."""
    asked, name = config.option.markexpr, collection_path.stem.removeprefix("test_")
    if collection_path.suffix != ".py":
        return None
    if (
        ("not campaign" in asked and name in CAMPAIGN)
        or (asked.startswith("core") and name not in CORE)
        or (asked.startswith("timing") and "three_attempts" not in collection_path.read_text())
    ):
        return True
    return None


def pytest_sessionstart() -> None:
    """Compile the tf.data operations ahead: most tests are of fits that have them."""
    if importlib.util.find_spec("tensorflow") and "PYTEST_XDIST_WORKER" not in os.environ:
        subprocess.run([sys.executable, "-m", "intune_callbacks.cli", "build-tf"], capture_output=True, check=False)


def pytest_report_header() -> list[str]:
    return [f"left out, for want of Lightning: {', '.join(collect_ignore_glob)}"] if collect_ignore_glob else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier."""
    first: set[str] = set()
    for item in items:
        function = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if function in SLOW and (not SLOW[function] or function in first):
            item.add_marker(pytest.mark.slow)
        first.add(function)
        name = item.path.stem.removeprefix("test_")
        if name in CAMPAIGN:
            item.add_marker(pytest.mark.campaign)
        if name in CORE:
            item.add_marker(pytest.mark.core)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let the test count its own processes only."""
    processes.begin()


@pytest.fixture
def collected() -> Iterator[None]:
    """Free the graphs that a test has left: each holds threads."""
    yield
    gc.collect()


@pytest.fixture(params=["pytorch_lightning", "lightning.pytorch"])
def namespace(request: pytest.FixtureRequest) -> Any:
    """One class of Lightning's has two names."""
    return importlib.import_module(request.param)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have every number set anew at every look, by the tuner that is returned."""
    from restless import Restless

    monkeypatch.setattr("intune_callbacks.session.fit.Tuner", Restless)
    monkeypatch.setattr(Restless, "resizes", 0)
    monkeypatch.setattr(Restless, "restored", 0)
    return Restless


@pytest.fixture
def native() -> Any:
    """Return our tf.data operations, where they can be compiled."""
    from intune_callbacks.pipelines.tf import native

    try:
        return native.load()
    except Exception as error:
        pytest.skip(f"the operations cannot be compiled here: {error}")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that settled, as `saved_runs` makes it; not to be changed."""
    from saved_runs import run, three_stages

    folder = tmp_path_factory.mktemp("saved")
    run(folder, three_stages())
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """An agent service of these tests may stand for a while: other tests have the CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("intune_callbacks.service.client.LONGEST_S", 30.0)
        yield


@pytest.fixture
def arena() -> Iterator[Any]:
    """Keep results of pure functions in up to 32 MiB."""
    from intune_callbacks.cache.arena import Arena
    from intune_callbacks.cache.pure import use

    made = Arena(room_bytes=64 << 20)
    made.limit(32 << 20)
    use(made)
    yield made
    use(None)
    made.close()
