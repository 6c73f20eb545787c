"""Benchmarks: each module runs with ``python -m benchmarks.NAME --json FILE``."""

from __future__ import annotations

__all__: list[str] = []
