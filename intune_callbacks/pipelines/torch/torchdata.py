"""torchdata.nodes graphs: each ParallelMapper gets live workers and a live window, each Prefetcher a live depth.

The implementation behind a node is replaced at its next `reset()`; node states keep their stock format, so a state
taken from a live graph loads into a stock one and back. Nothing is rebuilt in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes import Loader, Prefetcher
from torchdata.nodes.map import _ParallelMapperImpl

from intune_callbacks.pipelines.base import MAX_THREADS, LiveLoader, clamp
from intune_callbacks.pipelines.given import hints_of_change
from intune_callbacks.pipelines.torch.torchdata_nodes import NodeStage, end_ours, function_name, walk
from intune_callbacks.types import Allocation, Clock, Hint, PipelineStats, Stage

__all__ = ["NodeGraph"]


class NodeGraph(LiveLoader):
    """All live stages of the graph inside a `torchdata.nodes.Loader`.

    Args:
        max_workers: upper limit of each stage.
        live: False only times the map functions of thread mappers; nothing is changed.
    """

    def __init__(self, loader: Loader[Any], *, clock: Clock, max_workers: int | None = None, live: bool = True) -> None:
        self._loader, self._clock, self._live = loader, clock, live
        self._delivered = self._seen = 0
        taken: dict[str, int] = {}
        self._stages: list[NodeStage] = []
        for node in walk(loader.root):
            # `ParallelMapper` is only the face of `_ParallelMapperImpl`, whose numbers are the ones that count.
            mapper = isinstance(node, _ParallelMapperImpl) and node.num_workers > 0
            if not mapper and not isinstance(node, Prefetcher):
                continue
            name = function_name(node.map_fn) if isinstance(node, _ParallelMapperImpl) else "prefetch"
            taken[name] = taken.get(name, 0) + 1
            if taken[name] > 1:
                name = f"{name}#{taken[name]}"
            self._stages.append(NodeStage(node, name, clock, max_workers or MAX_THREADS))

    def prepare(self) -> None:
        """Make the graph live from its next `iter()` on: from batch 0 when called before the first."""
        for stage in self._stages:
            if self._live:
                stage.install()
            else:
                stage.watch()

    def adopt(self, iterator: Any) -> Any:
        """Return the running iterator as it is: the graph inside is live already, or will be at the next epoch."""
        self.prepare()
        return iterator

    @property
    def why_not(self) -> str:
        """Why what was last wanted is not in force, empty where it is."""
        return "; ".join(dict.fromkeys(stage.why_not for stage in self._stages if stage.why_not))

    @property
    def late_hints(self) -> tuple[Hint, ...]:
        """What has shown of the map functions."""
        return tuple(hint for one in self._stages for hint in hints_of_change(one.why_not, one.name, one.workers))

    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for node in self._stages for stage in node.stages())

    def stats(self) -> PipelineStats:
        # The loader's own count restarts with each epoch, and a resumed one starts in the middle.
        iterator = self._loader._it
        yielded = iterator._num_yielded if iterator is not None else 0
        self._delivered += yielded - self._seen if yielded >= self._seen else yielded
        self._seen = yielded
        readings = {node.name: node.stats() for node in self._stages if node.mapper}
        return PipelineStats(self._clock.wall(), self._delivered, readings)

    def resize(self, allocation: Mapping[str, int]) -> Allocation:
        wanted = clamp(allocation, self.stages()) if self._live else {}
        applied: Allocation = {}
        for node in self._stages:
            workers = wanted.get(node.name, node.workers) if node.mapper else 1
            window = wanted.get(node.window_name, node.window)
            if (workers, window) != (node.workers, node.window):
                node.why_not = ""
                node.resize(workers, window)
            if node.mapper:
                applied[node.name] = node.workers
            applied[node.window_name] = node.window
        return applied

    def trim(self) -> None:
        """End the children that are only kept for later."""
        for node in self._stages:
            engine = node.running()
            if engine is not None and engine.pool is not None:
                engine.pool.trim()

    def release(self) -> None:
        """Give the nodes their own implementation back from their next `reset()` on."""
        for node in self._stages:
            node.uninstall()

    def close(self) -> None:
        end_ours(self._loader.root)
        self.release()
