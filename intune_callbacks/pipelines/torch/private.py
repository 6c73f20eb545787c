"""The private names of torch and torchdata that the adapters rely on, and the public ones that older versions lack.

They are looked for before a loader is touched: where one is missing, in a version that is too old or too new, the
data wait is measured, nothing is tuned, and the report names what is missing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

__all__ = ["RUNNING", "why_not"]

# Module, or module:class -> what has to be in it. tests/test_versions.py compares them with what the adapters use.
_ITERATOR = (
    *("_base_seed", "_collate_fn", "_dataset", "_index_sampler", "_next_data", "_num_yielded", "_reset"),
    "_sampler_iter",
)
RUNNING = (
    *("_next_data", "_num_workers", "_prefetch_factor", "_rcvd_idx", "_send_idx", "_shutdown", "_task_info"),
    *("_tasks_outstanding", "_try_put_index", "_workers_status"),
)
"""What an iterator with workers has, also one of a class of its own such as that of StatefulDataLoader."""
_LOADER = "torch.utils.data.dataloader"
TORCH: Mapping[str, tuple[str, ...]] = {
    "torch.utils.data": ("IterDataPipe", "MapDataPipe"),
    _LOADER: ("_BaseDataLoaderIter", "_DatasetKind", "_MultiProcessingDataLoaderIter", "_SingleProcessDataLoaderIter"),
    f"{_LOADER}:DataLoader": ("_auto_collation", "_dataset_kind", "_get_iterator", "_index_sampler", "in_order"),
    f"{_LOADER}:_DatasetKind": ("Map", "create_fetcher"),
    f"{_LOADER}:_SingleProcessDataLoaderIter": _ITERATOR,
    f"{_LOADER}:_MultiProcessingDataLoaderIter": (
        *_ITERATOR,
        *RUNNING,
        "_process_data",
        "_shutdown_workers",
        "_worker_pids_set",
    ),
    "torch.utils.data._utils.pin_memory": ("pin_memory",),
    "torch.utils.data._utils.signal_handling": ("_remove_worker_pids", "_set_worker_signal_handlers"),
    "torch.utils.data._utils.worker": ("WorkerInfo", "_worker_info"),
    "torch.accelerator": ("current_accelerator", "current_device_index", "is_available", "set_device_index"),
}
_NODE = ("_it", "snapshot_frequency", "source")
TORCHDATA: Mapping[str, tuple[str, ...]] = {
    "torchdata.nodes": ("BaseNode", "Loader", "Prefetcher"),
    "torchdata.nodes:Loader": ("_it", "root"),
    "torchdata.nodes:Prefetcher": (*_NODE, "prefetch_factor"),
    "torchdata.nodes.loader:LoaderIterator": ("_num_yielded",),
    "torchdata.nodes.map": ("MapOverBatch", "_ParallelMapperImpl"),
    "torchdata.nodes.map:_ParallelMapperImpl": (
        *_NODE,
        *("in_order", "map_fn", "max_concurrent", "method", "multiprocessing_context", "num_workers"),
    ),
}


def why_not(package: Literal["torch", "torchdata"]) -> str:
    """Return why nothing is tuned of this torch's loaders, or of this torchdata's graphs; empty where all is there."""
    needed = TORCH if package == "torch" else TORCHDATA
    missing = [
        f"{place.replace(':', '.')}.{name}" for place, names in needed.items() for name in _missing(place, names)
    ]
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"this version of {package} has no {missing[0]}{more}, so its data wait is measured and nothing is tuned; "
        "`intune doctor` names the versions that are supported"
    )


def _missing(place: str, names: tuple[str, ...]) -> Iterator[str]:
    module, _, kind = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        yield from names
        return
    if kind:
        found = getattr(found, kind, None)
    there = {*dir(found), *_used_in(found)}
    yield from (name for name in names if name not in there)


def _used_in(kind: Any) -> Iterator[str]:
    """Yield the names that the methods of a class use: an iterator with workers cannot be made to look at it."""
    for base in kind.__mro__ if isinstance(kind, type) else ():
        for value in vars(base).values():
            code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
            yield from code.co_names if code is not None else ()
