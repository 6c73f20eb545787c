"""What a training does around its batches, and samples that show whether a worker is in it."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

MATRIX = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
OF_THE_TRAINING = contextvars.ContextVar("OF_THE_TRAINING", default=1)


def slope(_: int) -> float:
    at = torch.tensor(3.0, requires_grad=True)
    return float(torch.autograd.grad(at * at, at)[0])


def quotient(_: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.float64(1.0) / np.float64(0.0))


def odd(_: int) -> float:
    warnings.warn("a sample is odd", stacklevel=1)
    return 1.0


def imported(_: int) -> int:
    return int(importlib.import_module("imported_slowly").VALUE)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "directory": lambda index: float(Path("beside.txt").read_text()),
    "environment": lambda index: float(os.environ.get("OF_THE_TRAINING", "1")),
    "cpus": lambda index: len(os.sched_getaffinity(0)),
    "context": lambda index: OF_THE_TRAINING.get(),
    "decimal": lambda index: float(decimal.Decimal(1) / decimal.Decimal(3)),
    "warnings": odd,
    "numpy": quotient,
    "autocast": lambda index: (MATRIX @ MATRIX).float(),
    "grad": slope,
    "inference": slope,
    "dtype": lambda index: torch.zeros(2).element_size(),
    "mode": lambda index: torch.ones(2) + index,
}


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    before = os.getcwd()
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def cpus_of_one() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:1]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def another_value() -> Iterator[None]:
    before = OF_THE_TRAINING.set(2)
    try:
        yield
    finally:
        OF_THE_TRAINING.reset(before)


@contextlib.contextmanager
def another_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def another_variable() -> Iterator[None]:
    os.environ["OF_THE_TRAINING"] = "2"
    try:
        yield
    finally:
        del os.environ["OF_THE_TRAINING"]


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return 2 * made if function is torch.ones else made


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "directory": elsewhere,
    "environment": another_variable,
    "cpus": cpus_of_one,
    "context": another_value,
    "decimal": lambda: decimal.localcontext(decimal.Context(prec=3)),
    "warnings": warnings_are_errors,
    "numpy": lambda: np.errstate(all="raise"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "dtype": another_dtype,
    "mode": Doubled,
}
