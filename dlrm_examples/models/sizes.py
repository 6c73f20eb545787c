"""The sizes of a DLRM, whatever framework it is written in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrm_examples.criteo.tsv import DENSE, KAGGLE_TABLE_ROWS
from intune_callbacks.config import choice_problem
from intune_callbacks.errors import ConfigError

__all__ = ["INTERACTIONS", "DLRMConfig"]

INTERACTIONS = ("dot", "dcn")


@dataclass(frozen=True, slots=True)
class DLRMConfig:
    """The sizes of a DLRM; the defaults are Meta's Kaggle setting (bench/dlrm_s_criteo_kaggle.sh, 2.2 GB of tables).

    Args:
        table_rows: rows of each embedding table.
        embedding_dim: width of every table, and of the bottom MLP's output.
        dense_features: width of the dense input.
        bottom: layer widths of the bottom MLP after its input; the last is `embedding_dim`.
        top: layer widths of the top MLP after the interaction; the last is 1.
        interact_itself: whether a feature's dot product with itself is part of the interaction.
        sparse_gradients: give the tables sparse gradients (needs an optimiser that takes them: SGD, Adagrad).
        interaction: ``dot``, or ``dcn``: the low-rank cross layers of DLRM-DCNv2.
        dcn_layers: cross layers of ``dcn``.
        dcn_low_rank: rank of each cross layer.
        bag_sizes: ids each id becomes, one number per table; see `multihot`. None leaves one id per table.

    Raises:
        ConfigError: with all problems at once.
    """

    table_rows: tuple[int, ...] = KAGGLE_TABLE_ROWS
    embedding_dim: int = 16
    dense_features: int = DENSE
    bottom: tuple[int, ...] = (512, 256, 64, 16)
    top: tuple[int, ...] = (512, 256, 1)
    interact_itself: bool = False
    sparse_gradients: bool = True
    interaction: str = "dot"
    dcn_layers: int = 3
    dcn_low_rank: int = 512
    bag_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> Iterable[str]:
        yield from choice_problem("interaction", self.interaction, INTERACTIONS)
        for name in ("embedding_dim", "dense_features", "dcn_layers", "dcn_low_rank"):
            if not _is_size(getattr(self, name)):
                yield f"{name}={getattr(self, name)!r}: expected a whole number from 1"
        for name in ("table_rows", "bottom", "top"):
            sizes = getattr(self, name)
            if not isinstance(sizes, tuple) or not sizes or not all(map(_is_size, sizes)):
                yield f"{name}={sizes!r}: expected a tuple of one or more whole numbers from 1"
            elif name == "bottom" and sizes[-1] != self.embedding_dim:
                yield f"bottom={sizes!r}: the last width must be embedding_dim={self.embedding_dim}"
            elif name == "top" and sizes[-1] != 1:
                yield f"top={sizes!r}: the last width must be 1"
        bags, tables = self.bag_sizes, self.table_rows
        if bags is not None and not (isinstance(bags, tuple) and len(bags) == len(tables) and all(map(_is_size, bags))):
            yield f"bag_sizes={bags!r}: expected a tuple of {len(tables)} whole numbers from 1, one per table, or None"

    @property
    def interaction_width(self) -> int:
        """Width of the top MLP's input.

        ``dot``: the dense vector and one number per pair of features; ``dcn``: all features side by side.
        """
        features = 1 + len(self.table_rows)
        if self.interaction == "dcn":
            return features * self.embedding_dim
        pairs = features * (features - 1) // 2 + (features if self.interact_itself else 0)
        return self.embedding_dim + pairs


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
