"""Train the paper-literal DQN again, offline, on one CPU core, and write its weights.

`benchmarks/data/literal_dqn.npz` was written by
``python -m benchmarks.literal --seed 0 --updates 20000,18000,16000 --out benchmarks/data/literal_dqn.npz``:
2.56, 2.31 and 2.06 million decisions of single machines for r = 3, 4, 5 in 125, 149 and 324 CPU seconds; the counts
stand in the file as well. A simulator that has changed since gives other weights. On machines it has not seen the
agent earns more of the paper's reward than random actions, and less than staying at the even split: its six factors
do not say which stage is slow, nor what any stage has, and each of the 5^r actions is tried rarely.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import arguments, numbers, write
from benchmarks.policies.literal import LiteralDQN
from benchmarks.policies.literal_train import pretrain

__all__ = ["WEIGHTS", "main"]

WEIGHTS = Path(__file__).parent / "data" / "literal_dqn.npz"
"""The weights the comparison of agents uses."""
SLOTS = (3, 4, 5)
PARTS = (0.25, 0.25, 0.5)
"""Share of the time for each of them: a decision over 3125 actions costs more."""
TRIAL = 150


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the training from the command line."""
    parser = arguments("literal", __doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU minutes for all networks (default 10)")
    parser.add_argument("--updates", type=numbers, help="instead: updates for r = 3, 4, 5, exactly")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="weights, .npz")
    given = parser.parse_args(argv)
    if given.updates is not None and len(given.updates) != len(SLOTS):
        parser.error(f"--updates: expected three numbers, one each for r = 3, 4, 5, got {len(given.updates)}")
    torch.set_num_threads(1)
    networks, rows = {}, []
    for i, r in enumerate(SLOTS):
        if given.quick:
            updates = 20
        elif given.updates is not None:
            updates = given.updates[i]
        else:
            updates = _fitting(r, 60.0 * given.minutes * PARTS[i])
        begin = time.process_time()
        networks[r] = network = pretrain(r, given.seed, updates)
        weights = sum(getattr(network, name).size for name in ("w1", "b1", "w2", "b2", "w3", "b3"))
        counts = {"updates": network.updates, "decisions": network.decisions}
        rows.append({"r": r, "outputs": 5**r, "weights": weights, **counts, "cpu_s": time.process_time() - begin})
        print(rows[-1], flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    LiteralDQN(networks).save(given.out)
    return write("literal", rows, given.seed, given.json)


def _fitting(r: int, seconds: float) -> int:
    """Return how many updates `seconds` of CPU time are enough for."""
    pretrain(r, 0, 1)
    begin = time.process_time()
    pretrain(r, 0, TRIAL)
    return max(1, int(seconds / (time.process_time() - begin) * TRIAL))


if __name__ == "__main__":
    main()
