"""Without torch and Lightning, as in tox's core environment, some test files cannot even be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_lightning*.py", "test_benchmarks.py"]


def pytest_report_header() -> list[str]:
    return [f"left out, for want of Lightning: {', '.join(collect_ignore_glob)}"] if collect_ignore_glob else []
