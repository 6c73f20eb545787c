"""Every pattern of a loader, met at every moment; workers that are kept, none, and loaders given back in mid-epoch."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from reach_patterns import PATTERNS, WINDOW_ONLY  # noqa: E402
from reach_runs import MOMENTS, compared  # noqa: E402

pytestmark = pytest.mark.skipif("INTUNE_TEST_REACH" not in os.environ, reason="tox run -e reach runs it: minutes")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_workers_that_are_kept(name: str, moment: str) -> None:
    compared(PATTERNS[name], "process", MOMENTS[moment], num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", sorted(set(PATTERNS) - WINDOW_ONLY))
def test_no_workers(name: str, moment: str) -> None:
    compared(PATTERNS[name], "thread", MOMENTS[moment], num_workers=0)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("moment", ["before", "late"])
@pytest.mark.parametrize("name", PATTERNS)
def test_given_back_in_mid_epoch(name: str, moment: str, persistent: bool) -> None:
    compared(PATTERNS[name], "process", MOMENTS[moment], left=(1, 9), num_workers=2, persistent_workers=persistent)


@pytest.mark.parametrize("name", PATTERNS)
def test_epochs_that_are_left_early(name: str) -> None:
    compared(PATTERNS[name], "process", MOMENTS["before"], whole=False, num_workers=2)
