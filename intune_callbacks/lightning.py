"""InTuneCallback for Lightning: one class under both of its names, ``pytorch_lightning`` and ``lightning.pytorch``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from intune_callbacks.errors import MissingPackage
from intune_callbacks.fit import Settings, notes_given
from intune_callbacks.lightning_fit import Fit

__all__ = ["InTuneCallback"]

_NAMES = ("pytorch_lightning", "lightning.pytorch")
_NOT_USED = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _callback_bases() -> tuple[type, ...]:
    """Return the `Callback` class of every installed Lightning; both are small once torch is loaded."""
    bases: dict[type, None] = {}
    for name in _NAMES:
        try:
            bases[importlib.import_module(f"{name}.callbacks").Callback] = None
        except ImportError:
            continue
    if not bases:
        raise MissingPackage("pytorch-lightning", "lightning")
    return tuple(bases)


def _guarded(hook: _Hook) -> _Hook:
    """Make a hook a no-op outside a tuned fit, and an error of ours a frozen tuner instead of a stopped training."""

    @functools.wraps(hook)
    def call(self: InTuneCallback, *args: Any, **kwargs: Any) -> None:
        if self._fit is None:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self._fit.give_up(hook.__name__, error)

    return call  # type: ignore[return-value]


if TYPE_CHECKING:

    class _Callback: ...

else:
    _Callback = type("_Callback", _callback_bases(), {})


class InTuneCallback(_Callback):
    """Keeps the trainer fed: re-sizes the running train loaders, without losing, repeating or reordering a sample.

    Examples:
        >>> trainer = Trainer(callbacks=[InTuneCallback()])

    Logged to every logger of the Trainer, at each decision (not at each step):

    |                                     | |
    |-------------------------------------|---|
    | ``intune/throughput_samples_per_s`` | samples given to the training loop per second, since the last decision |
    | ``intune/wait_frac``                | share of the time the loop was blocked waiting for a batch, 0..1 |
    | ``intune/exposed_wait_frac``        | share of the time the GPU was idle for want of data, 0..1 (only on CUDA) |
    | ``intune/workers/<stage>``          | items this stage computes at once |
    | ``intune/window/<stage>``           | results this stage may hold ahead of the consumer |
    | ``intune/queue_fill/<stage>``       | share of that window that was full, 0..1 |
    | ``intune/rss_frac``                 | memory in use, as a share of the container's or machine's limit, 0..1 |
    | ``intune/reward``                   | ln of the batches/s, less near the memory limit and for CPUs held |

    The progress bar shows one field, the share of data wait at first and now, such as ``in=34%>4%``.
    Each rank of a distributed run tunes its own loaders with its share of the node's CPUs; nothing is exchanged.

    Args:
        mode: ``off`` (no trace), ``observe`` (measure and report), ``advise`` (also say what it would do) or ``tune``;
            None is ``tune``. The environment variable ``INTUNE_MODE`` wins over this argument.
        policy: who decides; one of `intune_callbacks.config.POLICIES`.
        run_dir: folder for ``history.jsonl``, ``report.json`` and what a later run can start from, ``found.yaml`` and
            ``state.json`` (in ``rank{r}`` below it when there are several ranks); None writes no file.
        show_card: print the end card at rank zero.
        warm_start: `run_dir` of an earlier run, or the path of its ``found.yaml``: start from what that found, if
            stages, batch size, CPUs, memory limit, library versions, policy and number of ranks are the same.
            Otherwise, or if there is no such file yet, start anew; a warning and the report say why. What a resumed
            checkpoint holds goes first.
        decide_every_s: as in `TunerConfig`, and so are all that follow.
        decide_every_batches: fewest batches between two decisions.
        warmup_batches: first batches that are not judged.
        memory_soft_limit: share of the memory limit the pipeline may plan with, 0..1.
        cpus: CPUs the pipeline may use; None reads affinity and cgroup quota at each decision.
        trainer_cpus: CPUs left to the training loop itself.
        max_workers: upper limit of workers per stage.
        workers_kind: what the workers of a map-style DataLoader are: ``process``, ``thread``, or None for what the
            loader has. A loader with ``num_workers=0`` is left alone unless a kind is named: its dataset may need the
            training process.
        fine_tune: let the policy ``dqn`` go on learning from this run.

    Attributes:
        report: what `report.json` holds; filled at the end of a fit.

    Raises:
        ConfigError: with all wrong arguments at once.
        MissingPackage: on import, when neither Lightning is installed.
    """

    @notes_given
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
        fine_tune: bool = False,
    ) -> None:
        super().__init__()
        self.settings = Settings.checked(
            mode,
            run_dir,
            show_card,
            warm_start,
            policy=policy,
            decide_every_s=decide_every_s,
            decide_every_batches=decide_every_batches,
            warmup_batches=warmup_batches,
            memory_soft_limit=memory_soft_limit,
            cpus=cpus,
            trainer_cpus=trainer_cpus,
            max_workers=max_workers,
            workers_kind=workers_kind,
            fine_tune=fine_tune,
        )
        self.config, self.mode_source = self.settings.config, self.settings.mode_source
        self.report: dict[str, Any] = {}
        self._fit: Fit | None = None
        self._saved: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """The same whatever the arguments, so that a checkpoint can be resumed with other ones."""
        return "intune_callbacks.InTuneCallback"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()
        if stage == "fit" and self.config.mode != "off":
            self._fit = Fit(trainer, self.settings)
            self._attach()
            if any(callback is self for callback in getattr(trainer, "callbacks", ())):
                self._leave_out_empty_hooks()

    @_guarded
    def _attach(self) -> None:
        assert self._fit is not None
        self._fit.attach()

    def _leave_out_empty_hooks(self) -> None:
        """For the time of the fit, have Lightning not call what does nothing: it takes 2 us for each hook and step."""
        for name in _NOT_USED:
            if name not in vars(self) and getattr(type(self), name, None) is getattr(_Callback, name, None):
                setattr(self, name, None)

    @_guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        self._fit.start(self._restored)
        self._restored = {}

    @_guarded
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        self._fit.epoch_begin()

    @_guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._fit is not None
        self._fit.batch(batch)

    @_guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        self._fit.pause()

    @_guarded
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        self._fit.pause()

    @_guarded
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert self._fit is not None
        self._fit.pause()

    @_guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self._fit is not None
        self._fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning does not call `teardown` after an exception.
        self._close(show_card=isinstance(exception, KeyboardInterrupt))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(show_card=True)

    def state_dict(self) -> dict[str, Any]:
        if self._fit is not None:
            try:
                self._saved = self._fit.state_dict()
            except Exception as error:
                self._fit.give_up("state_dict", error)
        return self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)

    def _close(self, show_card: bool = False) -> None:
        fit = self._fit
        if fit is not None:
            for name in _NOT_USED:
                if vars(self).get(name, self) is None:
                    delattr(self, name)
            self.state_dict()
            self.report = fit.close(show_card)
            self._fit = None
