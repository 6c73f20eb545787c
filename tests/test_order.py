"""`order="any"`: every sample of an epoch exactly once and as it would have been, and none waits for a slower one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info  # noqa: E402

from intune_callbacks import live  # noqa: E402
from intune_callbacks.errors import ConfigError  # noqa: E402
from intune_callbacks.lightning import InTuneCallback  # noqa: E402
from intune_callbacks.measure.cause import causes  # noqa: E402
from intune_callbacks.measure.evidence import Evidence  # noqa: E402
from intune_callbacks.pipelines.find import find  # noqa: E402

FEW = settings(max_examples=15, suppress_health_check=list(HealthCheck))
ROWS, SLOW, SLOW_S = 60, 40, 1.0


class Rows(Dataset):
    """Row i is the number i, and a random one where wanted; some rows take longer, that of `slow` by far."""

    def __init__(self, slow: int = -1, draws: bool = False) -> None:
        self.slow, self.draws = slow, draws

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        time.sleep(SLOW_S if i == self.slow else 0.002 * (i % 7 == 3))
        return torch.tensor([i]), torch.rand(1) if self.draws else torch.zeros(1)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: dict(batch_size=4, shuffle=True),
    "short last batch": lambda: dict(batch_size=7, shuffle=True),
    "unbatched": lambda: dict(batch_size=None, shuffle=True),
    "batch_sampler": lambda: dict(batch_sampler=BatchSampler(range(ROWS), 5, False)),
    "persistent": lambda: dict(batch_size=4, shuffle=True, persistent_workers=True),
    "generator": lambda: dict(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7)),
}


def numbers(batch: Any) -> tuple[int, ...]:
    return tuple(batch[0].reshape(-1).tolist())


def epochs(loader: Any, resizes: list[tuple[int, int, int]], order: str, kind: str, release: int = 0) -> list[Any]:
    """Train three epochs and set workers and window after as many batches as the plan says."""
    torch.manual_seed(3)
    pipeline: Any = find(loader, workers_kind=kind, order=order).pipeline
    pipeline.prepare()
    seen, at = [], 0
    for _ in range(3):
        batches = []
        for batch in loader:
            batches.append(numbers(batch))
            at += 1
            for when, workers, window in resizes:
                if when == at:
                    pipeline.resize({"load": workers, "load.window": window})
            if at == release:
                pipeline.release()
        seen.append(batches)
    pipeline.close()
    assert "_get_iterator" not in vars(loader)
    return [*seen, torch.get_rng_state().tolist()]


RESIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=6)


@FEW
@given(
    name=st.sampled_from(sorted(KINDS)), threads=st.booleans(), resizes=RESIZES, release=st.sampled_from([0, 0, 5, 20])
)
def test_the_batches_of_each_epoch_are_the_stock_ones(
    name: str, threads: bool, resizes: list[tuple[int, int, int]], release: int
) -> None:
    torch.manual_seed(3)
    stock = DataLoader(Rows(), num_workers=2, **KINDS[name]())
    expected = [sorted(numbers(batch) for batch in stock) for _ in range(3)]
    state = torch.get_rng_state().tolist()
    loader = DataLoader(Rows(), num_workers=2, **KINDS[name]())
    *seen, then = epochs(loader, resizes, "any", "thread" if threads else "process", release)
    assert [sorted(epoch) for epoch in seen] == expected
    assert then == state


def position_of_slow(order: str) -> int:
    loader = DataLoader(Rows(slow=SLOW), batch_size=1, num_workers=1)
    pipeline: Any = find(loader, order=order).pipeline
    pipeline.prepare()
    at = 0
    for place, batch in enumerate(loader):
        if place == 0:
            pipeline.resize({"load": 4, "load.window": 12})
        if place < SLOW // 2:
            time.sleep(0.02)  # all workers compute before the slow one is asked for, also on a busy machine
        if numbers(batch) == (SLOW,):
            at = place
    held_s = pipeline.stats().stages["load"].held_s
    pipeline.close()
    assert (held_s > 0.5 * SLOW_S) == (order == "same"), held_s
    return at


def test_a_slow_batch_holds_up_none_but_itself() -> None:
    assert position_of_slow("same") == SLOW
    assert position_of_slow("any") > SLOW


def test_a_batch_has_the_same_random_numbers_wherever_it_comes() -> None:
    def drawn(order: str) -> dict[tuple[int, ...], float]:
        torch.manual_seed(1)
        loader = DataLoader(Rows(draws=True), batch_size=4, num_workers=1)
        pipeline: Any = find(loader, order=order).pipeline
        pipeline.prepare()
        iterator = iter(loader)
        pipeline.resize({"load": 3, "load.window": 6})
        found = {numbers(batch): float(batch[1][0]) for batch in iterator if numbers(batch)[0] > 8}
        pipeline.close()
        return found

    assert drawn("any") == drawn("same")


class Shards(IterableDataset):
    """Each worker counts in steps of their number; the first one is slow."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(info.id, 48, info.num_workers):
            time.sleep(0.02 if info.id == 0 else 0.0)
            yield torch.tensor([i]), torch.zeros(1)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("windows", [[], [(2, 3), (7, 24)], [(1, 1), (5, 9), (20, 2)]])
def test_workers_with_shards_do_not_wait_for_each_other(persistent: bool, windows: list[tuple[int, int]]) -> None:
    loader = DataLoader(Shards(), batch_size=2, num_workers=2, persistent_workers=persistent)
    pipeline: Any = find(loader, order="any").pipeline
    pipeline.prepare()
    for _ in range(3):
        got = []
        for place, batch in enumerate(loader):
            got.append(numbers(batch))
            for when, window in windows:
                if when == place:
                    pipeline.resize({"load.window": window})
        assert sorted(itertools.chain(*got)) == list(range(48))
        slow = [place for place, batch in enumerate(got) if batch[0] % 2 == 0]
        assert (not windows and sum(slow) > 1.3 * 12 * 11) or windows, got
    pipeline.close()
    in_turn = [numbers(batch)[0] % 2 for batch in loader]
    assert in_turn == [0, 1] * 12


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_of_ones_own_gets_every_row_once(workers: int) -> None:
    loader = live(
        DataLoader(Rows(slow=5), batch_size=2, num_workers=workers, shuffle=True),
        order="any",
        show_card=False,
        decide_every_s=0.01,
        decide_every_batches=2,
        warmup_batches=2,
        cpus=8,
        trainer_cpus=0,
    )
    for _ in range(4):
        assert sorted(itertools.chain(*(numbers(batch) for batch in loader))) == list(range(ROWS))
    report = loader.close()
    assert report is not None and report["frozen"] is None
    assert report["settings"]["order"] == {"value": "any", "source": "argument"}


def test_another_word_is_refused_with_the_two_there_are() -> None:
    with pytest.raises(ConfigError, match=r"order='anything': expected one of same, any; did you mean 'any'\?"):
        InTuneCallback(order="anything")


def test_the_verdict_says_what_the_order_costs() -> None:
    from cause_windows import rate, stage, window

    held = rate(0.1, 0.1, items=1.0)
    seen = window((stage("load", 8), held))
    assert all(cause.kind != "held" for cause in causes(seen))
    (found,) = [c for c in causes(window((stage("load", 8), replace(held, held_frac=0.5)))) if c.kind == "held"]
    assert found.sentence.startswith("50 % of the time finished batches of 'load' wait for a slower one before them")
    assert "order='any'" in found.sentence and 1.3 < found.gain < 2.0
    given = causes(window((stage("load", 8), replace(held, held_frac=0.5))), Evidence(order="any"))
    assert all(cause.kind != "held" for cause in given)
    busy = causes(window((stage("load", 8), replace(held, held_frac=0.5)), wait=0.02))
    assert all(cause.kind != "held" for cause in busy)
