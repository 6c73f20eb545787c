"""Public input pipelines as their authors wrote them: ``python -m benchmarks.wild``."""

from __future__ import annotations

__all__: list[str] = []
