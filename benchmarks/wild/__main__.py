"""Public input pipelines as their authors wrote them, without InTune and with its default arguments, in turn.

Nothing else should run on the machine. Each fit is a fresh process; what the JSON file holds is not run again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import arguments, table
from benchmarks.wild.plans import advice, lengths, pairs, sweep
from benchmarks.wild.registry import ENTRIES, missing
from benchmarks.wild.runs import Store, Workplace
from benchmarks.wild.table import markdown, sources

__all__ = ["main"]

REPEATS = {"short": 5, "long": 3, "sweep": 3, "advice": 3, "lengths": 1}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark from the command line."""
    parser = arguments("wild", __doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted(ENTRIES), metavar="NAME", help="these pipelines only")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--short", action="store_const", const="short", dest="kind", help="20 s, five pairs (default)")
    kinds.add_argument("--long", action="store_const", const="long", dest="kind", help="2 min, three pairs")
    kinds.add_argument("--sweep", action="store_const", const="sweep", dest="kind", help="search the best numbers")
    kinds.add_argument("--advice", action="store_const", const="advice", dest="kind", help="paste what advise says")
    kinds.add_argument("--lengths", action="store_const", const="lengths", dest="kind", help="how long fits are here")
    kinds.add_argument("--list", action="store_const", const="list", dest="kind", help="list the pipelines")
    parser.add_argument("--repeats", type=int, help="pairs of each")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "intune-wild", help="the data")
    parser.add_argument("--md", metavar="FILE", type=Path, help="write the table as Markdown, too")
    given = parser.parse_args(argv)
    kind = given.kind or "short"
    entries = [ENTRIES[name] for name in given.only or ENTRIES]
    if kind == "list":
        rows = sources(entries)
        print(table([{**row, "left out": ""} for row in rows]))
        _write(rows, given.md)
        return rows
    for entry in list(entries):
        if wanted := missing(entry):
            print(f"{entry.name}: left out, pip install {' '.join(wanted)}")
            entries.remove(entry)
    if kind == "long" and not given.only:
        entries = [entry for entry in entries if entry.could_gain]
    work = Workplace(given.data, Store(given.json, given.seed), given.quick)
    repeats = given.repeats or (1 if given.quick else REPEATS[kind])
    if kind == "sweep":
        rows = sweep(work, entries, repeats)
    elif kind == "lengths":
        rows = lengths(work, entries)
    elif kind == "advice":
        rows = advice(work, entries, repeats)
    else:
        rows = pairs(work, entries, kind, repeats)
    print(table(rows))
    _write(rows, given.md)
    return rows


def _write(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    if path is not None:
        path.write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
