"""Code that puts something of its own in the place of `torch.utils.data.DataLoader`: loaders are known all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

CODE = """
import torch.utils.data as data
real = data.DataLoader
data.DataLoader = {}
from intune_callbacks.pipelines.find import find
print(find(real([1, 2], num_workers=1)).why)
"""


@pytest.mark.parametrize("instead", ["lambda *given, **named: real(*given, **named)", "type('Mine', (real,), {})"])
def test_a_loader_is_known_whatever_stands_in_the_place_of_its_class(instead: str) -> None:
    # In a process of its own: it matters that the class is replaced before it is looked for.
    done = subprocess.run([sys.executable, "-c", CODE.format(instead)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "workers and batches in flight are live", done.stderr
