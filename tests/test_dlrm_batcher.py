"""Parts of any size become batches of one size, and each state of that resumes exactly."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nodes = pytest.importorskip("torchdata.nodes")

from dlrm_examples.criteo.stages import Batcher  # noqa: E402
from dlrm_examples.criteo.tsv import Rows  # noqa: E402


class Numbered(nodes.BaseNode):
    """Parts of the sizes given, rows numbered; in front of part n, n malformed rows were left out."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def reset(self, initial_state=None) -> None:
        super().reset(initial_state)
        self.position = initial_state["position"] if initial_state else 0

    def next(self) -> Rows:
        if self.position == len(self.sizes):
            raise StopIteration
        start, size = sum(self.sizes[: self.position]), self.sizes[self.position]
        self.position += 1
        label = np.arange(start, start + size, dtype=np.float32)
        return Rows(label, np.zeros((size, 13), np.float32), np.zeros((size, 26), np.int32), self.position)

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}


@pytest.mark.parametrize("sizes", [[], [0, 0], [5], [1] * 9, [0, 7, 0, 0, 1, 12, 3, 0], [100]])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 1000])
def test_batcher(sizes: list[int], batch_size: int) -> None:
    rows = sum(sizes)
    node = Batcher(Numbered(sizes), batch_size)
    expected = [list(range(i, min(i + batch_size, rows))) for i in range(0, rows, batch_size)]
    states, got = [node.state_dict()], []
    for parts in node:
        got.append([int(n) for part in parts for n in part.labels])
        states.append(node.state_dict())
    assert got == expected
    skipped = sum(range(1, len(sizes) + 1))
    assert node.skipped == skipped
    for taken, state in enumerate(states):
        resumed = Batcher(Numbered(sizes), batch_size)
        resumed.reset(state)
        assert resumed.state_dict() == state
        assert [[int(n) for part in parts for n in part.labels] for parts in resumed] == expected[taken:]
        assert resumed.skipped == skipped
    short = Batcher(Numbered(sizes), batch_size, drop_last=True)
    assert len(list(short)) == rows // batch_size
