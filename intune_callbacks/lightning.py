"""InTuneCallback for Lightning: one class under both of its names, ``pytorch_lightning`` and ``lightning.pytorch``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from intune_callbacks.errors import MissingPackage
from intune_callbacks.session.arguments import BaseCallback, guarded
from intune_callbacks.session.lightning_fit import Fit

__all__ = ["InTuneCallback"]

_NAMES = ("pytorch_lightning", "lightning.pytorch")
_SHARED = "lightning_utilities.core.rank_zero"
_NOT_USED = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


@contextmanager
def _first_is_heard() -> Iterator[None]:
    """Have the Lightning that the user has imported keep its logger and its format of warnings.

    Both write them to the same place when they are imported: the levels that were set for the first one's logger would
    not be in force any more.
    """
    shared = sys.modules.get(_SHARED)
    is_there = any(name in sys.modules for name in _NAMES)
    log, form = getattr(shared, "log", None), warnings.formatwarning
    yield
    if is_there and log is not None:
        shared.log, warnings.formatwarning = log, form  # type: ignore[union-attr]


def _callback_bases() -> tuple[type, ...]:
    """Return the `Callback` class of every installed Lightning; both are small once torch is loaded."""
    bases: dict[type, None] = {}
    with _first_is_heard():
        for name in _NAMES:
            try:
                bases[importlib.import_module(f"{name}.callbacks").Callback] = None
            except ImportError:
                continue
    if not bases:
        raise MissingPackage("pytorch-lightning", "lightning")
    return tuple(bases)


if TYPE_CHECKING:

    class _Callback: ...

else:
    _Callback = type("_Callback", _callback_bases(), {})


class InTuneCallback(BaseCallback, _Callback):
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
    | ``intune/delivering/<stage>``       | of workers that own shards, all but those that ended without a batch |
    | ``intune/window/<stage>``           | results this stage may hold ahead of the consumer |
    | ``intune/queue_fill/<stage>``       | share of that window that was full, 0..1 |
    | ``intune/rss_frac``                 | memory in use, as a share of the container's or machine's limit, 0..1 |
    | ``intune/reward``                   | ln of the batches/s, less near the memory limit and for CPUs held |

    The progress bar shows one field, the share of data wait at first and now, such as ``in=34%>4%``.
    Each rank of a distributed run tunes its own loaders with its share of the node's CPUs; nothing is exchanged.

    Attributes:
        report: what `report.json` holds; filled at the end of a fit.

    Raises:
        MissingPackage: on import, when neither Lightning is installed.
    """

    def _prepare(self) -> None:
        self.report: dict[str, Any] = {}
        self._fit: Fit | None = None
        self._saved: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A fit holds on to processes and threads; a copy, as of the module and its trainer for an average of weights,
        # begins without one. Hooks that are left out for this fit are not for the copy's.
        return {name: value for name, value in vars(self).items() if name not in _NOT_USED} | {"_fit": None}

    @property
    def state_key(self) -> str:
        """The same whatever the arguments, so that a checkpoint can be resumed with other ones."""
        return "intune_callbacks.InTuneCallback"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()
        if stage == "fit" and self.config.mode != "off":
            self._fit = Fit(trainer, self.settings)
            with self._fit.guarded("_attach"):
                self._fit.attach()
            if any(callback is self for callback in getattr(trainer, "callbacks", ())):
                self._leave_out_empty_hooks()

    def _leave_out_empty_hooks(self) -> None:
        """For the time of the fit, have Lightning not call what does nothing: it takes 2 us for each hook and step."""
        for name in _NOT_USED:
            if name not in vars(self) and getattr(type(self), name, None) is getattr(_Callback, name, None):
                setattr(self, name, None)

    @guarded
    def on_train_start(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.start(self._restored)
        self._restored = {}

    @guarded
    def on_train_epoch_start(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.epoch_begin()

    @guarded
    def on_train_batch_end(
        self, fit: Fit, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        fit.batch(batch)

    @guarded
    def on_validation_start(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.pause()
        if not trainer.sanity_checking:  # that is before the run
            fit.validation.begin()

    @guarded
    def on_validation_end(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.validation.end()

    @guarded
    def on_train_epoch_end(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.pause()

    @guarded
    def on_save_checkpoint(self, fit: Fit, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fit.pause()

    @guarded
    def on_train_end(self, fit: Fit, trainer: Any, pl_module: Any) -> None:
        fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning does not call `teardown` after an exception.
        self._close(show_card=isinstance(exception, KeyboardInterrupt))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(show_card=True)

    def state_dict(self) -> dict[str, Any]:
        if self._fit is not None:
            with self._fit.guarded("state_dict"):
                self._saved = self._fit.state_dict()
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
