"""InTuneCallback for Keras 3, on its TensorFlow, torch and JAX backends."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from intune_callbacks.errors import ConfigError, MissingPackage
from intune_callbacks.session.arguments import BaseCallback, guarded
from intune_callbacks.session.garbage import uncounted
from intune_callbacks.session.keras_fit import Fit

__all__ = ["InTuneCallback"]


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


if TYPE_CHECKING:

    class _Callback:
        def set_model(self, model: Any) -> None: ...

else:
    _Callback = _callback_base()


class InTuneCallback(BaseCallback, _Callback):
    """Keeps the training fed: re-sizes the running `tf.data` pipeline, without losing, repeating or reordering a batch.

    Examples:
        >>> model.fit(dataset, callbacks=[InTuneCallback()])

    The dataset is found by itself and needs no wrapper; a torch `DataLoader` and a `keras.utils.PyDataset` with workers
    are tuned, too, on each backend. What is given as ``validation_data`` is left alone. A second `fit` with the same
    callback and the same data goes on with what the first one found.

    Added to the logs of each epoch, where `History`, `CSVLogger`, `TensorBoard` and `EarlyStopping` find it:

    |                                     | |
    |-------------------------------------|---|
    | ``intune/throughput_samples_per_s`` | samples given to the training loop per second, in this epoch |
    | ``intune/wait_frac``                | share of the time the loop was blocked waiting for a batch, 0..1 |
    | ``intune/exposed_wait_frac``        | share of the time the GPU was idle for want of data, 0..1 (torch on CUDA) |
    | ``intune/workers/<stage>``          | items this stage computes at once, at the end of the epoch |
    | ``intune/delivering/<stage>``       | of workers that own shards, all but those that ended without a batch |
    | ``intune/window/<stage>``           | results this stage may hold ahead of the consumer, at the end of the epoch |
    | ``intune/queue_fill/<stage>``       | share of that window that was full, 0..1, at the end of the epoch |
    | ``intune/rss_frac``                 | memory in use, as a share of the container's or machine's limit, 0..1 |
    | ``intune/reward``                   | ln of the batches/s, less near the memory limit and for CPUs held |

    The progress bar shows one field, the share of data wait at first and now, such as ``in: 34%>4%``; with
    ``verbose=2`` it is ``intune/wait_frac``, for there Keras prints numbers only. The first step of a fit compiles the
    model and fills the pipeline, and is not measured.

    Attributes:
        report: what `report.json` holds; filled at the end of a fit. After an exception in the training it is filled
            at the next fit, or when Python ends.

    Raises:
        MissingPackage: on import, when Keras 3 is not installed.
        ConfigError: by `fit`, where the model is one of Keras 2 (tf_keras).
    """

    # There is no `on_train_batch_end`: with one, Keras waits for the results of each step to hand them over.

    def _prepare(self) -> None:
        self._fit: Fit | None = None
        self._last: Fit | None = None
        self._report: dict[str, Any] = {}

    @property
    def report(self) -> dict[str, Any]:
        return self._report if self._last is None else self._last.report

    def __getstate__(self) -> dict[str, Any]:
        # A fit holds on to iterators and threads; a copy begins without one, as a new callback does.
        return {**vars(self), "_fit": None, "_last": None, "_report": self.report}

    def set_model(self, model: Any) -> None:
        # With `TF_USE_LEGACY_KERAS=1` Keras 2 has the model, and would ask the callback for what Keras 3 does not have.
        if any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__):
            problem = f"model={type(model).__name__}: it is one of tf_keras (Keras 2); expected one of Keras 3"
            raise ConfigError([f"{problem}. Unset TF_USE_LEGACY_KERAS, or write a loop over live(dataset)"])
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._close(show_card=False)
        if self.config.mode != "off":
            last, self._last = self._last, Fit(self.settings)
            self._fit = self._last
            with self._fit.guarded("_start"), uncounted():
                self._fit.start(sys._getframe(1), self, last)

    @guarded
    def on_epoch_begin(self, fit: Fit, epoch: int, logs: Any = None) -> None:
        fit.epoch_begin(epoch, getattr(self, "params", None) or {})

    @guarded
    def on_train_batch_begin(self, fit: Fit, batch: int, logs: Any = None) -> None:
        fit.batch_begin()

    @guarded
    def on_test_begin(self, fit: Fit, logs: Any = None) -> None:
        fit.pause()
        fit.validation.begin()

    @guarded
    def on_test_end(self, fit: Fit, logs: Any = None) -> None:
        fit.validation.end()

    @guarded
    def on_epoch_end(self, fit: Fit, epoch: int, logs: dict[str, Any] | None = None) -> None:
        fit.pause()
        if logs is not None:
            logs.update(fit.epoch_logs())

    def on_train_end(self, logs: Any = None) -> None:
        self._close(show_card=True)

    def _close(self, show_card: bool) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close(show_card)
