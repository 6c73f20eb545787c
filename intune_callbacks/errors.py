"""The error tree, the line of pip that brings what is missing, and the one way to warn.

InTuneError
├── BadData           a data file cannot be read; the message names it
├── BuildFailed       the tf.data operations could not be compiled or loaded; carries the compiler's words
├── ConfigError       several problems of a configuration, reported together
├── MissingPackage    an optional package is needed; carries the exact install line
├── PipelineError     an adapter broke its contract (raised by `check_pipeline`)
└── WorkerDied        a worker process ended without delivering its item
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

__all__ = [
    "BadData",
    "BuildFailed",
    "ConfigError",
    "InTuneError",
    "MissingPackage",
    "PipelineError",
    "WorkerDied",
    "exit_words",
    "first_line",
    "frozen_by",
    "install_line",
    "lower_bounds",
    "pass_on",
    "requirements",
    "stay_interrupted",
    "warn",
]

NAME = "intune-callbacks"
REQUIREMENT = re.compile(r"([\w.-]+)[^;<>=~! ]*\s*([^;]*)")
EXTRA = re.compile(r"\bextra\s*==\s*['\"]([\w-]+)")
SUSPECT = "Often that is the kernel's out-of-memory killer."
LOWEST = re.compile(r">=\s*([\w.]+)")


class InTuneError(Exception):
    """Base of every error raised by this package."""


class BadData(InTuneError, ValueError):
    """A data file, or a row of one, cannot be read; the message names it and says what is wrong."""


class BuildFailed(InTuneError, RuntimeError):
    """The tf.data operations could not be compiled or loaded; the message says why and what to do."""


class ConfigError(InTuneError, ValueError):
    """All problems of one configuration at once.

    Args:
        problems: one sentence each: what was given, what was expected, what to do.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{head} in the configuration:\n" + "\n".join(f"  - {p}" for p in self.problems))


class MissingPackage(InTuneError, ImportError):
    """An optional package is not installed.

    Args:
        package: the name of the package as pip knows it.
        extra: the extra of intune-callbacks that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; run: {install_line(extra)}")


class PipelineError(InTuneError, AssertionError):
    """An adapter broke the pipeline contract; the message says which part and how."""


class WorkerDied(InTuneError, RuntimeError):
    """A worker process ended without delivering its item; the message is PyTorch's, with its pid and how it ended."""


def exit_words(name: str, pid: int, code: int | None) -> str:
    """Return how a worker process ended, in PyTorch's words: people match these.

    Args:
        name: of its kind.
        code: its exit code, as `multiprocessing` tells it: of a signal the number, negative.
    """
    if code is not None and code < 0:
        by = f"is killed by signal: {signal.strsignal(-code)}."
        return f"{name} (pid {pid}) {by} {SUSPECT if code == -signal.SIGKILL else ''}"
    return f"{name} (pid {pid}) exited unexpectedly with exit code {code}."


def pass_on(error: BaseException) -> None:
    """Raise an error again that a signal handler of the user's raised in the middle of our code: it was not for us.

    Args:
        error: as it was caught. That torch's handler raises comes again with the next batch.
    """
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    users = {
        getattr(handler, "__code__", None) or getattr(getattr(handler, "__call__", None), "__code__", None)  # noqa: B004
        for handler in handlers
        if callable(handler) and not str(getattr(handler, "__module__", "")).startswith("torch.")
    } - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in users:
            raise error
        trace = trace.tb_next


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def frozen_by(error: BaseException, where: str = "") -> str:
    """Return in words why nothing is tuned any more, and warn of it; what is not our own error is raised again.

    Args:
        error: of ours, as it was caught.
        where: it came up.
    """
    pass_on(error)
    why = f"{type(error).__name__}{where and f' in {where}'}: {error}"
    warn(f"InTune froze, training goes on with the last allocation: {why}")
    return why


def warn(message: str) -> None:
    """Warn during a training: where warnings are errors, the promise not to raise into it is the stronger one."""
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def requirements(extra: str | None = None) -> dict[str, str]:
    """Return what an extra asks for, or without one the package itself: name -> bounds, such as ``>=6.0``.

    Nothing where this package runs without having been installed.
    """
    return {name: bounds for name, bounds, of in _asked() if of == extra}


def install_line(extra: str) -> str:
    """Return the line of pip that installs what an extra brings.

    It names the packages, for `intune-callbacks` itself is not on PyPI; where they are not known, the extra of a clone.
    """
    packages = [f"{name}{bounds}" for name, bounds in requirements(extra).items()] or [f".[{extra}]"]
    return f"python -m pip install {shlex.join(packages)}"


def lower_bounds() -> dict[str, str]:
    """Return the oldest version of every package that is asked for, those of all extras as well."""
    return {name: lowest[1] for name, bounds, _ in _asked() if (lowest := LOWEST.search(bounds)) is not None}


def _asked() -> Iterator[tuple[str, str, str | None]]:
    """Yield the name, the bounds and the extra of all that the metadata of this package ask for."""
    # Here: with all it imports it would be a tenth of what importing this package takes.
    from importlib.metadata import PackageNotFoundError, requires

    with contextlib.suppress(PackageNotFoundError):
        for line in requires(NAME) or ():
            of, asked = EXTRA.search(line), REQUIREMENT.match(line)
            if asked is not None:
                yield asked[1], asked[2].strip(), of[1] if of else None


def stay_interrupted() -> None:
    """Have Python end by SIGINT, as after any Ctrl+C that nobody caught, so that a shell's loop around it ends, too.

    Python forgets it where a string of code is run at its end, as for a dataclass of a module imported for a report.
    """
    # At a prompt the line that was interrupted need not be the last one.
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
