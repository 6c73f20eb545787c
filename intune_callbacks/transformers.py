"""InTuneCallback for the Trainer of Hugging Face transformers, and for what is built on it."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from intune_callbacks.errors import MissingPackage, warn
from intune_callbacks.session.arguments import BaseCallback, guarded
from intune_callbacks.session.transformers_fit import Fit

try:
    import transformers.trainer as _trainer
    from transformers.trainer_callback import CallbackHandler, ExportableState, ProgressCallback, TrainerCallback
except ImportError:
    raise MissingPackage("transformers", "transformers") from None

__all__ = ["InTuneCallback"]

if TYPE_CHECKING:

    class _Callback: ...

else:

    class _Callback(TrainerCallback, ExportableState): ...


class InTuneCallback(BaseCallback, _Callback):
    """Keeps the Trainer fed: re-sizes the running train loader, without losing, repeating or reordering a sample.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[InTuneCallback()])

    At each decision TensorBoard, Weights & Biases and the like get the figures the callback for Lightning logs, such as
    ``train/intune/wait_frac``. The progress bar shows the share of data wait at first and now, such as ``in=34%>4%``.

    With ``restore_callback_states_from_checkpoint=True`` a resumed training goes on with what was tuned. The Trainer
    then makes a callback of its own; its `report` is that of the one in ``trainer.callback_handler.callbacks``.

    Attributes:
        report: what `report.json` holds; filled at the end of a training.

    Raises:
        MissingPackage: on import, when transformers is not installed.
    """

    def _prepare(self) -> None:
        self.report: dict[str, Any] = {}
        self.intune: dict[str, Any] = {}
        self._fit: Fit | None = None
        self._loggers: list[Any] = []
        self._bar: Any = None
        self._now: tuple[Any, Any, Any] = (None, None, None)
        self._skip: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A training holds on to processes and threads; a copy begins without one, as a new callback does.
        begun: dict[str, Any] = {"_fit": None, "_loggers": [], "_bar": None, "_now": (None, None, None), "_skip": None}
        return vars(self) | begun

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: the arguments, and the tuner's state."""
        held = self._fit.state_dict() if self._fit is not None else self.intune
        return {"args": self._arguments(), "attributes": {"intune": held}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **more: Any) -> None:
        self._close(show_card=False)  # a training that failed, or was begun anew with smaller batches
        if self.config.mode == "off" or train_dataloader is None:
            return
        self._now = args, state, control
        try:
            self._find_loggers()
            self._fit = Fit(self.settings, train_dataloader, self.intune, self._show, args)
            self._fit.batches = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
            self._watch_skipping(train_dataloader)
            # `on_train_end` is not called after an error.
            weakref.finalize(train_dataloader, self._fit.close, False)
        except Exception as error:
            warn(f"InTune does nothing in this training: {type(error).__name__}: {error}")

    @guarded
    def on_epoch_begin(self, fit: Fit, /, args: Any, state: Any, control: Any, **more: Any) -> None:
        fit.pause()

    @guarded
    def on_step_begin(self, fit: Fit, /, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._give_skipping_back()

    @guarded
    def on_step_end(self, fit: Fit, /, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._now = args, state, control
        fit.step_over()
        if control.should_evaluate or control.should_save:
            fit.pause()

    @guarded
    def on_prediction_step(self, fit: Fit, /, args: Any, state: Any, control: Any, **more: Any) -> None:
        fit.pause()

    @guarded
    def on_epoch_end(self, fit: Fit, /, args: Any, state: Any, control: Any, **more: Any) -> None:
        fit.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._close(show_card=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments that were given, as a checkpoint can hold them."""
        settings = self.settings
        folder = None if settings.run_dir is None else str(settings.run_dir)
        own = {"run_dir": folder, "show_card": settings.show_card, "warm_start": settings.warm_start}
        given = {name: own[name] if name in own else getattr(self.config, name) for name in settings.given}
        if self.mode_source != "argument":
            given.pop("mode", None)
        return given

    def _find_loggers(self) -> None:
        """Look for what writes figures, and for the bar, among the Trainer's callbacks."""
        frame: Any = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        callbacks = [] if frame is None else getattr(frame.f_locals["self"], "callbacks", [])
        self._loggers = [one for one in callbacks if type(one).__module__.startswith("transformers.integrations")]
        self._bar = next((one for one in callbacks if isinstance(one, ProgressCallback)), None)

    def _show(self, figures: dict[str, float], wait: str) -> None:
        args, state, control = self._now
        for logger in self._loggers:
            logger.on_log(args, state, control, logs=dict(figures))
        bar = getattr(self._bar, "training_bar", None)
        if bar is not None:
            bar.set_postfix_str(f"in={wait}", refresh=False)

    def _watch_skipping(self, train_dataloader: Any) -> None:
        """A resumed epoch runs on a loader that the Trainer makes behind `on_epoch_begin`, and tells nobody of."""
        module: Any = _trainer
        stock = getattr(module, "skip_first_batches", None)
        if stock is None or self._fit is None:
            return
        # Weak, both: where the first batch raises, nobody takes this back before the loader is gone.
        held, watching = weakref.ref(train_dataloader), weakref.ref(self._fit)

        def skip_first_batches(loader: Any, *args: Any, **kwargs: Any) -> Any:
            skipped, fit = stock(loader, *args, **kwargs), watching()
            if fit is not None and loader is held():
                with fit.guarded("the loader of the resumed epoch"):
                    fit.instead(skipped)
            return skipped

        self._skip = module, skip_first_batches, stock
        module.skip_first_batches = skip_first_batches
        weakref.finalize(train_dataloader, _give_back, *self._skip)

    def _give_skipping_back(self) -> None:
        if self._skip is not None:
            _give_back(*self._skip)
            self._skip = None

    def _close(self, show_card: bool) -> None:
        self._give_skipping_back()
        fit, self._fit = self._fit, None
        if fit is not None:
            self.intune = fit.state_dict()
            fit.close(show_card)
            self.report = fit.report


def _give_back(module: Any, ours: Any, stock: Any) -> None:
    if module.skip_first_batches is ours:
        module.skip_first_batches = stock
