"""All pipelines of the benchmark by name."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.wild import catalogue_clicks, catalogue_text, catalogue_vision
from benchmarks.wild.entry import Entry

__all__ = ["ENTRIES", "missing"]

ENTRIES: dict[str, Entry] = {
    entry.name: entry for module in (catalogue_clicks, catalogue_vision, catalogue_text) for entry in module.ENTRIES
}


def missing(entry: Entry) -> list[str]:
    """Return the packages the entry needs and that are not installed."""
    framework = ("keras", "tensorflow") if entry.framework == "keras" else ("torch", "pytorch_lightning")
    return [name for name in (*framework, *entry.needs) if find_spec(name) is None]
