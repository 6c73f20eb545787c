"""The callback as far as it is the same in every framework: its arguments, and that its hooks never raise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from intune_callbacks.config import TunerConfig, resolve_mode
from intune_callbacks.errors import ConfigError
from intune_callbacks.record.files import unwritable

if TYPE_CHECKING:
    from intune_callbacks.session.fit import TunedFit

__all__ = ["BaseCallback", "Settings", "guarded"]

_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Settings:
    """The arguments of a callback, checked.

    Args:
        config: how to tune.
        mode_source: where the mode came from, for the report.
        run_dir: where the history and the report are written; None writes nothing.
        show_card: print the end card.
        warm_start: run folder to start from, or the path of its ``found.yaml``; None starts anew.
        given: names of the arguments that were given, be it with the default's value.
    """

    config: TunerConfig
    mode_source: str
    run_dir: Path | None
    show_card: bool
    warm_start: str | None = None
    given: frozenset[str] = frozenset()

    @classmethod
    def checked(
        cls, mode: str | None, run_dir: object, show_card: object, warm_start: object = None, **tuner: Any
    ) -> Settings:
        """Return the settings, of arguments as they were given; ``INTUNE_MODE`` wins over `mode`.

        Raises:
            ConfigError: with all wrong arguments at once.
        """
        problems: list[str] = []
        resolved, source, config = "tune", "default", None
        try:
            resolved, source = resolve_mode(mode)
        except ConfigError as error:
            problems += error.problems
        try:
            config = TunerConfig(mode=resolved, **tuner)
        except ConfigError as error:
            problems += error.problems
        if run_dir is not None and not isinstance(run_dir, (str, Path)):
            problems.append(f"run_dir={run_dir!r}: expected a folder's path or None, got {type(run_dir).__name__}")
        elif run_dir is not None and resolved != "off" and (why := unwritable(Path(run_dir))) is not None:
            problems.append(f"run_dir={str(run_dir)!r}: {why}; expected a folder that can be written, or None")
        if not isinstance(show_card, bool):
            problems.append(f"show_card={show_card!r}: expected True or False, got {type(show_card).__name__}")
        if warm_start is not None and (not isinstance(warm_start, (str, Path)) or not str(warm_start)):
            problems.append(
                f"warm_start={warm_start!r}: expected the folder of an earlier run (its run_dir), the path of the "
                f"found.yaml in it, or None, got {type(warm_start).__name__}"
            )
        if problems:
            raise ConfigError(problems)
        assert config is not None
        warm = None if warm_start is None else str(warm_start)
        return cls(config, source, None if run_dir is None else Path(str(run_dir)), bool(show_card), warm)


def _notes_given(init: Callable[Concatenate[Any, _Arguments], None]) -> Callable[Concatenate[Any, _Arguments], None]:
    """Make the ``__init__`` of a callback note which arguments it was given, for Python does not tell.

    Args:
        init: it leaves `Settings` in ``self.settings``; its signature stays what `help` shows.
    """
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def noting(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        init(self, *args, **kwargs)
        self.settings = replace(self.settings, given=frozenset(names[1 : 1 + len(args)]) | frozenset(kwargs))

    return noting


class BaseCallback:
    """What `InTuneCallback` takes, in Lightning and in Keras.

    Args:
        mode: ``off`` (no trace), ``observe`` (measure and report), ``advise`` (also say what it would do) or ``tune``;
            None is ``tune``. The environment variable ``INTUNE_MODE`` wins over this argument.
        policy: who decides; one of `intune_callbacks.config.POLICIES`, or the address of an agent service.
        run_dir: folder for ``history.jsonl``, ``report.json`` and what a later run can start from, ``found.yaml`` and
            ``state.json`` (in ``rank{r}`` below it when there are several ranks); None writes no file.
        show_card: print the end card at rank zero.
        warm_start: `run_dir` of an earlier run, or the path of its ``found.yaml``: start from what that found, if
            stages, batch size, CPUs, memory limit, library versions, policy and number of ranks are the same.
            Otherwise, or if there is no such file yet, start anew; a warning and the report say why. The address of an
            agent service asks that; so does None with such a policy. A resumed
            checkpoint of Lightning, and what the same callback found in an earlier fit of Keras, go first.
        decide_every_s: as in `TunerConfig`, and so are all that follow.
        decide_every_batches: fewest batches between two decisions.
        warmup_batches: first batches that are not judged.
        memory_soft_limit: share of the memory limit the pipeline may plan with, 0..1.
        cpus: CPUs the pipeline may use; None reads affinity and cgroup quota at each decision.
        trainer_cpus: CPUs left to the training loop itself.
        max_workers: upper limit of workers per stage.
        workers_kind: what the workers of a map-style DataLoader or a Keras PyDataset are: ``process``, ``thread``, or
            None for what it has. One without workers (``num_workers=0``, ``workers=1``) is left alone unless a kind is
            named: its dataset may need the training process. ``ray``, for such a DataLoader, is processes here first,
            and then workers on the machines of a Ray cluster; extra ``ray``.
        order: ``same`` delivers what the loader would, in that order; ``any`` allows another order of the same samples,
            each once an epoch, where that is faster.
        fine_tune: let the policy ``dqn`` go on learning from this run.
        ray_address: of the head of that cluster, ``host:port``; None is what ``RAY_ADDRESS`` says.

    Attributes:
        settings: the arguments, checked.
        config: how it tunes.
        mode_source: where the mode came from.

    Raises:
        ConfigError: with all wrong arguments at once.
        MissingPackage: for ``workers_kind='ray'``.
    """

    _fit: TunedFit | None

    @_notes_given
    def __init__(
        self,
        mode: str | None = None,
        policy: str = "dqn",
        run_dir: str | None = None,
        show_card: bool = True,
        warm_start: str | None = None,
        decide_every_s: float = 1.0,
        decide_every_batches: int = 10,
        warmup_batches: int = 20,
        memory_soft_limit: float = 0.90,
        cpus: float | None = None,
        trainer_cpus: float = 1.0,
        max_workers: int | None = None,
        workers_kind: str | None = None,
        order: str = "same",
        fine_tune: bool = False,
        ray_address: str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.settings = Settings.checked(**given)
        self.config, self.mode_source = self.settings.config, self.settings.mode_source
        if self.config.cluster_address and self.config.mode == "tune":
            from intune_callbacks.pipelines.ray.given import check_packages

            check_packages()
        self._prepare()

    def _prepare(self) -> None:
        """Set what the callback of one framework holds besides."""


def guarded(hook: Callable[Concatenate[Any, Any, _Arguments], None]) -> Callable[Concatenate[Any, _Arguments], None]:
    """Make a hook a no-op outside a tuned fit, and an error of ours a frozen tuner instead of a stopped training.

    Args:
        hook: a method that is given the fit, and then what the framework gives.
    """

    def call(self: BaseCallback, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        fit = self._fit
        if fit is None:
            return
        try:
            hook(self, fit, *args, **kwargs)
        except Exception as error:
            fit.give_up(hook.__name__, error)

    call.__name__, call.__doc__ = hook.__name__, hook.__doc__
    return call
