"""Criteo rows for the tests: made up by hypothesis, and the real ones where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent

integers = st.one_of(
    st.just(""), st.integers(-99, 99).map(str), st.integers(-(10**15) + 1, 10**16 - 1).map(str), st.just("0007")
)
hashes = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map(lambda n: f"{n:08x}"), st.just("ABCDEF09"))
good_lines = st.tuples(
    st.sampled_from("01"), st.lists(integers, min_size=13, max_size=13), st.lists(hashes, min_size=26, max_size=26)
).map(lambda row: "\t".join((row[0], *row[1], *row[2])).encode())
junk = st.binary(max_size=18).map(lambda text: text.replace(b"\n", b"").replace(b"\t", b""))


@st.composite
def spoilt_lines(draw: st.DrawFn) -> bytes:
    """A line in which one field is replaced by anything, or that has too few or too many columns."""
    fields = draw(good_lines).split(b"\t")
    where = draw(st.integers(0, 39))
    kind = draw(st.sampled_from(["replace", "drop", "add", "nearly"]))
    if kind == "replace":
        fields[where] = draw(junk)
    elif kind == "drop":
        del fields[where]
    elif kind == "add":
        fields.insert(where, b"")
    elif fields[where]:
        # One character turned into any other: the neighbours of digits and letters in ASCII are among them.
        at = draw(st.integers(0, len(fields[where]) - 1))
        other = draw(st.integers(0, 255).filter(lambda c: c not in b"\t\n"))
        fields[where] = fields[where][:at] + bytes([other]) + fields[where][at + 1 :]
    return b"\t".join(fields)


def rows_text(rows: int, seed: int = 0) -> bytes:
    """Return `rows` good lines; the category C1 of row i is i, so that rows can be recognised."""
    random = np.random.default_rng(seed)
    lines = []
    for row in range(rows):
        dense = [str(n) if n >= 0 else "" for n in random.integers(-20, 1000, 13)]
        categories = [f"{row:08x}", *(f"{n:08x}" for n in random.integers(0, 2**32, 25))]
        lines.append("\t".join((str(random.integers(2)), *dense, *categories)) + "\n")
    return "".join(lines).encode()


def real_file(name: str) -> Path:
    """Return a file of real Criteo rows, or skip the test where there is none."""
    folder = Path(os.environ.get("INTUNE_CRITEO_DIR", ROOT.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"no {name}: set INTUNE_CRITEO_DIR to the folder that holds it")
    return folder / name
