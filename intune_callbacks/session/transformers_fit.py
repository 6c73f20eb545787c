"""One training of a Hugging Face Trainer: its loader is timed where it makes its iterators, whoever asks for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from intune_callbacks.pipelines.base import Combined
from intune_callbacks.pipelines.find import Found
from intune_callbacks.pipelines.torch.reach import unwrapped
from intune_callbacks.record.report import Report
from intune_callbacks.session import loop_fit
from intune_callbacks.session.arguments import Settings
from intune_callbacks.session.fit import TunedFit
from intune_callbacks.session.loaders import look_for
from intune_callbacks.session.loop_fetches import Fetches
from intune_callbacks.session.metrics import metrics
from intune_callbacks.types import Observation

__all__ = ["Fit"]

_MISSING = object()
_FIELDS = re.compile(r"\b(?=(?:num_workers|prefetch_factor|persistent_workers)\b)")
"""Where an argument of DataLoader begins that `TrainingArguments` has, too, with another name."""


class Fit(loop_fit.Fit):
    """From `on_train_begin` to `on_train_end`; never built when the mode is ``off``.

    The Trainer holds its loader in a variable of its own, so nothing can be put in its place. But whatever Accelerate
    has wrapped around the DataLoader asks that for its iterators, by `_get_iterator`.

    Args:
        restored: the tuner's state from a checkpoint, empty without one.
        show: called with what was measured at each decision, under the names of the metrics, and the text of the bar.
        arguments: the Trainer's, from which it makes its loader.
    """

    _why_restored = TunedFit._why_restored

    def __init__(
        self,
        settings: Settings,
        loader: Any,
        restored: Mapping[str, Any],
        show: Callable[[dict[str, float], str], None],
        arguments: Any,
    ) -> None:
        # Not the loader itself: where it ends without `on_train_end`, so does this.
        base: Any = unwrapped(loader)
        super().__init__(settings, (base,), restored)
        # With another number, a `get_train_dataloader` of the user's makes it in words of its own.
        is_own = getattr(arguments, "dataloader_num_workers", None) == getattr(base, "num_workers", _MISSING)
        self._arguments = type(arguments).__name__ if is_own else None
        self._show = show
        self._is_step_over = False
        self._undo: list[Callable[[], None]] = []
        self.watch(loader, self._found[0])

    def instead(self, loader: Any) -> None:
        """The resumed epoch runs on a loader of its own, which skips what was trained on before."""
        self.watch(loader, look_for(loader, self.config, True, self.give_up))

    def watch(self, loader: Any, found: Found) -> None:
        """Take note of each iterator of a loader from its start."""
        base: Any = unwrapped(loader)
        if not hasattr(base, "_get_iterator"):
            return
        given, pipeline = vars(base).get("_get_iterator", _MISSING), found.pipeline

        def get_iterator() -> Any:
            self._begin(found)
            inner = type(base)._get_iterator(base) if given is _MISSING else given()
            return self.timed(inner if pipeline is None else pipeline.adopt(inner), 0, None)

        def undo() -> None:
            if vars(base).get("_get_iterator") is get_iterator:
                if given is _MISSING:
                    del base._get_iterator
                else:
                    base._get_iterator = given
            held = getattr(base, "_iterator", None)
            if isinstance(held, Fetches):  # kept for the next epoch, with `persistent_workers`
                base._iterator = held.inner

        base._get_iterator = get_iterator
        self._undo.append(undo)

    def step_over(self) -> None:
        """The model has made a step, of one batch or of several that were fetched together before it."""
        self._is_step_over = True

    def publish(self, seen: Observation) -> None:
        self._show(metrics(seen), self.waited or "")

    def in_words(self, report: Report) -> Report:
        """Advice has to be written where the Trainer's user writes it: he never sees a DataLoader."""
        name = self._arguments
        if name is None:
            return report

        def told(text: str) -> str:
            return _FIELDS.sub("dataloader_", text).replace("DataLoader(", f"{name}(")

        advice = report.advice
        return replace(
            report,
            cause=told(report.cause),
            next=told(report.next),
            causes=tuple(replace(one, sentence=told(one.sentence), line=told(one.line)) for one in report.causes),
            advice=advice and {**advice, "lines": [told(line) for line in advice["lines"]]},
            hints=tuple(replace(hint, what=told(hint.what), line=told(hint.line)) for hint in report.hints),
        )

    def close(self, show_card: bool) -> None:
        while self._undo:
            with self.guarded("the end of the training"):
                self._undo.pop()()
        super().close(show_card)

    def _begin(self, found: Found) -> None:
        """An epoch begins, on this loader: go on there with what was tuned on the last one."""
        self._epoch_begin()
        if found is self._found[0] or self.tuner is None:
            return
        self._found[0] = found
        self._pipeline = Combined({} if found.pipeline is None else {"0": found.pipeline})
        self.tuner.rebind(self._pipeline)

    def _step_over(self) -> None:
        # Batches of one step are fetched in a row: a look in between would see nothing but waiting.
        if self._is_step_over:
            self._is_step_over = False
            super()._step_over()
