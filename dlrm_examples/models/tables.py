"""Rows of the 26 embedding tables of the public Criteo data sets, C1 to C26, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dlrm_examples.criteo.tsv import KAGGLE_TABLE_ROWS, TERABYTE_TABLE_ROWS

__all__ = ["MLPERF_BAGS", "TABLES"]

TABLES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        # Kaggle challenge, all values: mlcommons/inference, dlrm/pytorch/python/main.py.
        "criteo-kaggle": KAGGLE_TABLE_ROWS,
        # 1 TB click logs, ids modulo 10M, 7/8 of the negatives left out: the same file.
        "criteo-1tb-10m": (
            *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10),
            *(2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
        ),
        # 1 TB click logs, ids modulo 40M, MLPerf's first DLRM: the same file.
        "criteo-1tb-40m-v1": (
            *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
            *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
        ),
        # 1 TB click logs, at most 40M, MLPerf's DLRM-DCNv2, 26.1 billion weights at a width of 128:
        # facebookresearch/dlrm, torchrec_dlrm/README.MD.
        "criteo-1tb-40m": tuple(min(rows, 40_000_000) for rows in TERABYTE_TABLE_ROWS),
        # 1 TB click logs, all values: NVIDIA/DeepLearningExamples, generate_feature_spec.py, criteo_t0_synthetic.
        "criteo-1tb-full": TERABYTE_TABLE_ROWS,
    }
)
"""Name -> rows of each table, in the order of the data's own columns."""

MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per table in MLPerf's synthetic multi-hot data for DLRM-DCNv2 (facebookresearch/dlrm, torchrec_dlrm)."""
