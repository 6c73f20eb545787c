"""The evaluation of the InTune paper, re-run.

Each sub-command writes NAME.json, NAME.md and NAME.png to a folder; what the JSON holds is not run again, so that a run
can be stopped, gone on with, and given further seeds. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import numbers
from benchmarks.paper import convergence, cores, drift, figure7, figure8, judge, memory
from benchmarks.paper.runs import Figure, Options, make
from benchmarks.paper.wrapped import CACHE, COST, PEERS

__all__ = ["FIGURES", "main"]

FIGURES: dict[str, Figure] = {
    "figure7": figure7,
    "memory": memory,
    "figure8": figure8,
    "convergence": convergence,
    "cost": COST,
    "drift": drift,
    "cache": CACHE,
    "cores": cores,
    "judge": judge,
    "peers": PEERS,
}
SEEDS = [1, 2, 3]


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for name in ("all", *FIGURES):
        title = "all of them" if name == "all" else FIGURES[name].TITLE
        command = commands.add_parser(name, help=title, description=title)
        command.add_argument("--out", metavar="FOLDER", type=Path, default=Path("artefacts/paper"), help="results")
        command.add_argument("--seed", dest="seeds", type=numbers, default=SEEDS, help="one or more (default 1,2,3)")
        command.add_argument("--jobs", type=int, default=3, help="emulated machines side by side (default 3)")
        command.add_argument("--quick", action="store_true", help="one seed and seconds: shows that it works")
        if name == "judge":
            judge.arguments(command)
    given = vars(parser.parse_args(argv))
    name, folder, quick = given.pop("figure"), given.pop("out"), given["quick"]
    seeds, jobs = given.pop("seeds"), given.pop("jobs")
    options = Options(seeds[:1] if quick else seeds, given.pop("quick"), jobs, given)
    return {one: make(one, FIGURES[one], options, folder) for one in (FIGURES if name == "all" else [name])}


if __name__ == "__main__":
    main()
