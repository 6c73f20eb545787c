"""One field of ours in the progress bar of Keras: reads and replaces private attributes of its `ProgbarLogger`."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["Bar", "put_first"]

FIELD = "in"
PREFIX = "intune/"
SHOWN = "intune/wait_frac"


class Bar:
    """The bar of one fit.

    Keras gives a bar its numbers in `on_train_batch_end`, and with a hook of that name of our own it would wait for the
    results of each step. But a bar prints, as it is, what stands in its table of values without a count: so our text is
    put there, between two steps, and the bar shows it the next time it draws itself.

    Args:
        callbacks: the `keras.callbacks.CallbackList` of the fit; without a bar in it nothing is shown.
    """

    def __init__(self, callbacks: Any) -> None:
        logger = getattr(callbacks, "_progbar", None)
        self._logger = None if logger is None else weakref.ref(logger)
        self._hook: Any = None
        if logger is not None and callable(getattr(type(logger), "on_epoch_end", None)):
            self._keep_short(logger)

    def show(self, text: str | None) -> None:
        """Show ``in: text`` from now on; each epoch has a bar of its own, which needs to be told again."""
        bar = self._table()
        if bar is None or text is None:
            return
        values, order = bar
        values[FIELD] = text
        if FIELD not in order:
            order.append(FIELD)  # last: a bar that is drawn right now finds the value

    def close(self) -> None:
        """Take our field and our hook away; safe to call twice."""
        bar, logger = self._table(), None if self._logger is None else self._logger()
        if bar is not None and FIELD in bar[1]:
            bar[1].remove(FIELD)
            bar[0].pop(FIELD, None)
        if logger is not None and self._hook is not None and vars(logger).get("on_epoch_end") is self._hook:
            del logger.on_epoch_end

    def _table(self) -> tuple[dict[str, Any], list[str]] | None:
        """Return values and their order of the bar that is drawn; None without one that can show text."""
        logger = None if self._logger is None else self._logger()
        bar = getattr(logger, "progbar", None)
        values, order = getattr(bar, "_values", None), getattr(bar, "_values_order", None)
        # With verbose=2 it prints numbers only, and with 0 nothing.
        if getattr(bar, "verbose", 0) != 1 or not isinstance(values, dict) or not isinstance(order, list):
            return None
        return values, order

    def _keep_short(self, logger: Any) -> None:
        """Of our keys in the epoch's logs show one number, or none where there is our field: all fill several lines."""
        if "on_epoch_end" in vars(logger):
            return
        stock, held = type(logger).on_epoch_end, weakref.ref(logger)

        def on_epoch_end(epoch: int, logs: dict[str, Any] | None = None) -> None:
            table = self._table()
            shown = "" if table is not None and FIELD in table[1] else SHOWN
            stock(held(), epoch, {k: v for k, v in (logs or {}).items() if k == shown or not k.startswith(PREFIX)})

        logger.on_epoch_end = self._hook = on_epoch_end


def put_first(callbacks: Any, ours: Any) -> None:
    """Let the callbacks of a `CallbackList` that were listed before ours see our keys of the epoch logs too."""
    listed = getattr(callbacks, "callbacks", None)
    places = [i for i, callback in enumerate(listed) if callback is ours] if isinstance(listed, list) else []
    if places and listed is not None:
        # In place and to the front: whoever goes through the list right now still goes on with the one after ours.
        listed.insert(0, listed.pop(places[0]))
