"""InTuneCallback for Keras 3, on its TensorFlow, torch and JAX backends."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from intune_callbacks.errors import MissingPackage
from intune_callbacks.fit import Settings, notes_given
from intune_callbacks.keras_fit import Fit

__all__ = ["InTuneCallback"]

_Hook = TypeVar("_Hook", bound=Callable[..., None])


def _callback_base() -> type:
    """Return the `Callback` class of Keras 3."""
    try:
        keras = importlib.import_module("keras")
    except ImportError:
        raise MissingPackage("keras", "keras") from None
    if int(str(keras.__version__).split(".")[0]) < 3:
        raise MissingPackage("keras>=3", "keras")
    base: type = keras.callbacks.Callback
    return base


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
    _Callback = _callback_base()


class InTuneCallback(_Callback):
    """Keeps the training fed: re-sizes the running `tf.data` pipeline, without losing, repeating or reordering a batch.

    Examples:
        >>> model.fit(dataset, callbacks=[InTuneCallback()])

    The dataset is found by itself and needs no wrapper; a torch `DataLoader` is tuned, too, on each backend. What is
    given as ``validation_data`` is left alone. A second `fit` with the same callback and the same data goes on with
    what the first one found.

    Added to the logs of each epoch, where `History`, `CSVLogger`, `TensorBoard` and `EarlyStopping` find it:

    |                                     | |
    |-------------------------------------|---|
    | ``intune/throughput_samples_per_s`` | samples given to the training loop per second, in this epoch |
    | ``intune/wait_frac``                | share of the time the loop was blocked waiting for a batch, 0..1 |
    | ``intune/exposed_wait_frac``        | share of the time the GPU was idle for want of data, 0..1 (torch on CUDA) |
    | ``intune/workers/<stage>``          | items this stage computes at once, at the end of the epoch |
    | ``intune/window/<stage>``           | results this stage may hold ahead of the consumer, at the end of the epoch |
    | ``intune/queue_fill/<stage>``       | share of that window that was full, 0..1, at the end of the epoch |
    | ``intune/rss_frac``                 | memory in use, as a share of the container's or machine's limit, 0..1 |
    | ``intune/reward``                   | ln of the batches/s, less near the memory limit and for CPUs held |

    The progress bar shows one field, the share of data wait at first and now, such as ``in: 34%>4%``; with
    ``verbose=2`` it is ``intune/wait_frac``, for there Keras prints numbers only. The first step of a fit compiles the
    model and fills the pipeline, and is not measured. On TensorFlow a batch counts as many samples as a full one.

    Args:
        mode: ``off`` (no trace), ``observe`` (measure and report), ``advise`` (also say what it would do) or ``tune``;
            None is ``tune``. The environment variable ``INTUNE_MODE`` wins over this argument.
        policy: who decides; one of `intune_callbacks.config.POLICIES`.
        run_dir: folder for ``history.jsonl``, ``report.json`` and what a later run can start from, ``found.yaml`` and
            ``state.json`` (in ``rank{r}`` below it when there are several ranks); None writes no file.
        show_card: print the end card at rank zero.
        warm_start: `run_dir` of an earlier run, or the path of its ``found.yaml``: start from what that found, if
            stages, batch size, CPUs, memory limit, library versions, policy and number of ranks are the same.
            Otherwise, or if there is no such file yet, start anew; a warning and the report say why. What this
            callback found in a fit before goes first.
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
        report: what `report.json` holds; filled at the end of a fit. After an exception in the training it is filled
            at the next fit, or when Python ends.

    Raises:
        ConfigError: with all wrong arguments at once.
        MissingPackage: on import, when Keras 3 is not installed.
    """

    # There is no `on_train_batch_end`: with one, Keras waits for the results of each step to hand them over.

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
        self._fit: Fit | None = None
        self._last: Fit | None = None
        self._report: dict[str, Any] = {}

    @property
    def report(self) -> dict[str, Any]:
        return self._report if self._last is None else self._last.report

    def __getstate__(self) -> dict[str, Any]:
        # A fit holds on to iterators and threads; a copy begins without one, as a new callback does.
        return {**vars(self), "_fit": None, "_last": None, "_report": self.report}

    def on_train_begin(self, logs: Any = None) -> None:
        self._close(show_card=False)
        if self.config.mode != "off":
            last, self._last = self._last, Fit(self.settings)
            self._fit = self._last
            self._start(sys._getframe(1), last)

    @_guarded
    def _start(self, frame: Any, last: Fit | None) -> None:
        assert self._fit is not None
        self._fit.start(frame, self, last)

    @_guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert self._fit is not None
        self._fit.epoch_begin(epoch, getattr(self, "params", None) or {})

    @_guarded
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        assert self._fit is not None
        self._fit.batch_begin()

    @_guarded
    def on_test_begin(self, logs: Any = None) -> None:
        assert self._fit is not None
        self._fit.pause()

    @_guarded
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._fit is not None
        self._fit.pause()
        if logs is not None:
            logs.update(self._fit.epoch_logs())

    def on_train_end(self, logs: Any = None) -> None:
        self._close(show_card=True)

    def _close(self, show_card: bool) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close(show_card)
