"""What a trained model is judged by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_examples.models.auc import auc

__all__ = ["evaluate"]


def evaluate(labels: npt.ArrayLike, logits: npt.ArrayLike) -> dict[str, float]:
    """Return ``auc``, ``accuracy``, ``loss`` and ``rows``.

    ``accuracy`` is the share of rows on the right side of one half; ``loss`` is the log loss, the mean binary
    cross-entropy in nats, taken from the log-odds, so that sure predictions do not become infinite; ``auc`` is NaN if
    all rows are of one class.

    Args:
        labels: [n], 0 or 1.
        logits: log-odds of a 1, [n].
    """
    truth, given = np.asarray(labels, np.int64), np.asarray(logits, np.float64)
    positives = int(truth.sum())
    return {
        "auc": auc(truth, given) if 0 < positives < len(truth) else float("nan"),
        "accuracy": float(((given > 0) == (truth > 0)).mean()),
        "loss": float((np.logaddexp(0.0, given) - truth * given).mean()),
        "rows": float(len(truth)),
    }
