"""All that reads or replaces a private attribute of Keras; what is missing is reported, never raised."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from traceback import walk_stack
from types import FrameType, FunctionType
from typing import Any

from intune_callbacks.session.samples import Samples
from intune_callbacks.types import Clock

__all__ = ["GIVE_OTHER", "NO_PYDATASET", "Fetches", "TrainData", "batch_rows", "from_fit", "why_not"]

GIVE_OTHER = "give model.fit a tf.data.Dataset or a torch DataLoader to have it tuned"
NO_PYDATASET = "this version of Keras keeps the workers of a PyDataset where InTune does not find them"
NO_DATA = "this version of Keras keeps its data where InTune does not find it, so nothing is measured or tuned"
OWN_LOOP = (
    "no model.fit of Keras has called this callback, and a loop of your own tells it of no data; "
    "let the loop go over live(dataset) to have it tuned (from intune_callbacks import live)"
)
_MISSING = object()


def from_fit(frame: FrameType) -> tuple[Any, Any]:
    """Return what `model.fit` iterates over and its list of callbacks, None for what is not found.

    Keras gives neither to a callback, but both are local variables of the `fit` that called it.
    """
    for one, _ in walk_stack(frame):
        found = one.f_locals.get("epoch_iterator")
        if found is not None and hasattr(found, "data_adapter") and callable(getattr(found, "_get_iterator", None)):
            # On TensorFlow the step is compiled: where its dataset is not to be found, its iterator is left alone, too.
            on_tensorflow = ".tensorflow." in type(found).__module__
            known = not on_tensorflow or hasattr(found, "_distributed_dataset")
            return (found if known else None), one.f_locals.get("callbacks")
    return None, None


def why_not(epoch_iterator: Any, frame: FrameType) -> str:
    """Return why nothing can be measured of what `from_fit` found from the callback's caller; empty where it can."""
    if epoch_iterator is None:
        for one, _ in walk_stack(frame):
            if one.f_code.co_name == "fit" and str(one.f_globals.get("__name__")).startswith("keras."):
                return f"{NO_DATA}; docs/versions.md says which versions it knows"
        return OWN_LOOP
    if "_get_iterator" in vars(epoch_iterator):
        # Two of our operations behind one stage would set the number of the same kernel, and one inside its own lock.
        return "another InTuneCallback of this fit has the data; one is enough"
    return ""


class TrainData:
    """What one `fit` trains on, and the places where Keras takes it from.

    A `fit` makes these objects for itself: validation has others, and after an exception they go with its frame.
    Nothing is replaced in a class of Keras or TensorFlow.

    Args:
        epoch_iterator: the local variable of `fit`; only a weak reference is kept.

    Attributes:
        dataset: the `tf.data.Dataset` that is iterated, None when there is none or it is spread over devices.
        own: True when that dataset is the user's (with the class weights Keras adds), False when Keras made it.
        loader: the user's `torch.utils.data.DataLoader`, None when it is something else.
        is_spread: True when a distribution strategy has the dataset, and nothing of it is seen.
        in_python: True when Keras fetches in Python (torch and JAX), so that a fetch can be timed there; on TensorFlow
            the fetch is part of the compiled step.
        on_torch: True on the torch backend.
        restarts: True when each epoch makes an iterator of its own, False when one serves them all.
        together: steps of one compiled loop, which asks for its batches while it computes; else 1.
        batch_rows: samples of a full batch as Keras knows them, None where it does not or `own` is True.
        adapter: Keras's, of what the user gave.
        pydataset: the user's `keras.utils.PyDataset`, None when it is something else.
        grain: the user's Grain dataset, None when it is something else, or where Keras has it in a `tf.data.Dataset`.
        epoch_batches: batches the training takes in an epoch, None where Keras does not know.
        why: for what is none of these, why it cannot be tuned and the smallest change that would help.
    """

    def __init__(self, epoch_iterator: Any) -> None:
        self._iterator = weakref.ref(epoch_iterator)
        self.adapter = epoch_iterator.data_adapter
        self._undo: list[tuple[weakref.ref[Any], str, Any, Any]] = []
        given = getattr(self.adapter, "_dataset", None)
        in_graph = getattr(epoch_iterator, "_distributed_dataset", None)
        self.in_python = in_graph is None
        self.together = 1 if self.in_python else _whole(getattr(epoch_iterator, "steps_per_execution", 1)) or 1
        self.on_torch = ".torch." in type(epoch_iterator).__module__
        self.restarts = getattr(epoch_iterator, "steps_per_epoch", None) is None
        self.own = _is_dataset(given)
        iterated = given if self.in_python else in_graph
        self.dataset = iterated if _is_dataset(iterated) else None
        self.loader = _loader(self.adapter)
        self.epoch_batches = _epoch_batches(epoch_iterator)
        self.is_spread = not self.in_python and self.dataset is None
        is_pydataset = type(self.adapter).__name__ == "PyDatasetAdapter" and not self.is_spread
        self.pydataset = getattr(self.adapter, "py_dataset", None) if is_pydataset else None
        is_grain = type(self.adapter).__name__ == "GrainDatasetAdapter" and self.in_python
        self.grain = given if is_grain else None
        # Of a `tf.data.Dataset` of numbers (no batches) Keras's raises; `batch_rows` below reads what it knows.
        self.batch_rows = None if self.own else _whole(getattr(self.adapter, "batch_size", None))
        self.why = self._why(type(self.adapter).__name__)

    def _why(self, adapter: str) -> str:
        if self.is_spread:
            return (
                "the distribution strategy has spread the dataset over the devices, where no step is seen and no stage "
                "can be reached; train on one device per process to have it measured and tuned"
            )
        if self.own or self.source is not None:
            return ""
        what = {
            "ArrayDataAdapter": "arrays are sliced in memory by Keras, so there is no pipeline to tune",
            "PyDatasetAdapter": NO_PYDATASET,
            "GeneratorDataAdapter": "a Python generator makes one batch after the other",
            "GrainDatasetAdapter": "on the TensorFlow backend Keras makes a generator of Grain",
        }.get(adapter, f"{adapter} is not a source InTune knows")
        return f"{what}; {GIVE_OTHER}"

    @property
    def source(self) -> Any:
        """The user's, where it is a torch DataLoader, a PyDataset or Grain's; else None."""
        return next((given for given in (self.loader, self.pydataset, self.grain) if given is not None), None)

    def give_dataset(self, dataset: Any) -> None:
        """Let Keras make its next iterators from `dataset`."""
        if not self.in_python:
            self._replace(self._iterator(), "_distributed_dataset", dataset)
        else:
            self.in_adapter("_dataset", dataset)

    def in_adapter(self, name: str, value: Any) -> None:
        """Set an attribute of Keras's adapter till the end of the fit."""
        self._replace(self.adapter, name, value)

    def time(self, fetches: Fetches, watched: Callable[[], int], step: Any) -> None:
        """Send the fetches of every iterator nobody else watches through Python, where they are counted.

        Without that the fetches of TensorFlow are part of its compiled step. They stay so where a compiled loop takes
        several: in Python the same steps take several times as long, and the last few of an epoch are not told to the
        callbacks. They also stay so where the step is compiled with the fetch inside, as in Keras before 3.8 and by a
        `make_train_function` of the user's: given one of ours it would be traced anew in each epoch.

        Args:
            watched: how many iterators have been made so far that are timed in another way.
            step: the function that Keras gives its iterator to, at each step.
        """
        iterator = self._iterator()
        in_graph = self.dataset is None or self.together > 1 or not _is_in_python(step)
        if iterator is None or (not self.in_python and in_graph):
            return
        # Not a bound method: a cycle would keep the object alive after its fit.
        stock, owner = type(iterator)._get_iterator, self._iterator
        end = StopIteration if self.in_python else _end_of_sequence
        always = (lambda: 0) if self.in_python else watched
        self._replace(iterator, "_get_iterator", lambda: _Timed(stock(owner()), fetches, always, end))

    def restore(self) -> None:
        """Give Keras all it had; safe to call twice."""
        while self._undo:
            owner, name, ours, stock = self._undo.pop()
            held = owner()
            if held is not None and vars(held).get(name) is ours:
                if stock is _MISSING:
                    delattr(held, name)
                else:
                    setattr(held, name, stock)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if owner is not None:
            self._undo.append((weakref.ref(owner), name, value, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)


class Fetches:
    """Counts and times the fetches a loop makes in Python."""

    def __init__(self, clock: Clock, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._now, self._before, self._after = clock.wall, before, after
        self.delivered, self.samples, self.wait_s, self._in = 0, 0, 0.0, Samples()

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next item of `iterator`."""
        self._before()
        begin_s = self._now()
        try:
            batch = next(iterator)
        finally:
            self.wait_s += self._now() - begin_s
            self._after()
        self.delivered += 1
        self.samples += self._in.count(batch)
        return batch


class _Timed:
    def __init__(
        self, iterable: Any, fetches: Fetches, watched: Callable[[], int], end: Callable[[], BaseException]
    ) -> None:
        self._iterable, self._fetches, self._watched, self._end = iterable, fetches, watched, end

    def __iter__(self) -> Iterator[Any]:
        before = self._watched()
        iterator = iter(self._iterable)
        return iterator if self._watched() > before else _TimedIterator(iterator, self._fetches, self._end)


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], fetches: Fetches, end: Callable[[], BaseException]) -> None:
        self._iterator, self._fetches, self._end = iterator, fetches, end

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self._fetches.fetch(self._iterator)
        except StopIteration:
            raise self._end() from None


def _end_of_sequence() -> BaseException:
    """What Keras expects of a train step on TensorFlow that finds no batch."""
    error: BaseException = sys.modules["tensorflow"].errors.OutOfRangeError(None, None, "End of sequence")
    return error


def batch_rows(dataset: Any) -> int | None:
    """Return the samples of a full batch of a `tf.data.Dataset` as Python knows it, without a run of it; else None."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return None
    parts = tensorflow.nest.flatten(dataset.element_spec)
    shape = getattr(parts[0], "shape", None) if parts else None
    if shape is not None and shape.rank:
        if shape[0] is not None:
            return int(shape[0])
        return _batched_by(dataset, tensorflow)
    return None


def _batched_by(dataset: Any, tensorflow: Any) -> int | None:
    """The last `batch` before the end: what comes behind it is taken to keep its batches as they are."""
    while dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            value = tensorflow.get_static_value(size)
            return None if value is None else int(value)
        inputs: Any = dataset._inputs() if callable(getattr(dataset, "_inputs", None)) else ()
        dataset = inputs[0] if len(inputs) == 1 else None
    return None


def _is_in_python(step: Any) -> bool:
    return isinstance(step, FunctionType) and step.__module__.startswith("keras.")


def _is_dataset(value: Any) -> bool:
    tensorflow = sys.modules.get("tensorflow")  # a dataset exists only where TensorFlow was imported
    return tensorflow is not None and isinstance(value, tensorflow.data.Dataset)


def _epoch_batches(epoch_iterator: Any) -> int | None:
    batches = getattr(epoch_iterator, "steps_per_epoch", None) or getattr(epoch_iterator, "_num_batches", None)
    together = _whole(getattr(epoch_iterator, "steps_per_execution", 1)) or 1
    # A compiled loop takes all of its batches, also where the epoch ends in between.
    return -(-batches // together) * together if isinstance(batches, int) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _loader(adapter: Any) -> Any:
    torch = sys.modules.get("torch.utils.data")
    loader = getattr(adapter, "_dataloader", None)
    return loader if torch is not None and isinstance(loader, torch.DataLoader) else None
