"""Area under the ROC curve, exact, by ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["auc"]


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the share of (positive, negative) pairs that the scores order rightly; ties count half.

    The Mann-Whitney form: (rank sum of the positives - P (P + 1) / 2) / (P N), with mean ranks for ties
    (Hanley, McNeil: The meaning and use of the area under a ROC curve, Radiology 143, 1982).

    Args:
        labels: [n], 0 or 1.
        scores: [n], larger means more likely 1; no NaN.

    Raises:
        ValueError: for arrays of other shapes, labels other than 0 and 1, a single class, or NaN scores.
    """
    truth, score = np.asarray(labels), np.asarray(scores)
    problems = []
    if truth.ndim != 1 or truth.shape != score.shape:
        problems.append(f"labels {truth.shape} and scores {score.shape}: expected two vectors of one length")
    if not np.isin(truth, (0, 1)).all():
        problems.append("labels: expected only 0 and 1")
    elif truth.min(initial=1) == truth.max(initial=0) or truth.size == 0:
        problems.append(f"{truth.size} labels of one class: expected both 0 and 1")
    if np.isnan(score).any():
        problems.append("scores: expected no NaN")
    if problems:
        raise ValueError("; ".join(problems))
    _, group, count = np.unique(score, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(count)
    mean_rank = last_rank - (count - 1) / 2.0
    positive = truth.astype(bool)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    rank_sum = float(mean_rank[group[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)
