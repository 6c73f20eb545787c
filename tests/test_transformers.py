"""The Trainer of Hugging Face trains the same with the callback, faster, and its loggers see why."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="tox run -e reach installs it")
transformers = pytest.importorskip("transformers", reason="tox run -e reach installs it")

from busy_machine import three_attempts  # noqa: E402
from restless import Restless  # noqa: E402
from transformers_runs import ROWS, Model, Slow, Stream  # noqa: E402

from intune_callbacks.measure.evidence import Cause  # noqa: E402
from intune_callbacks.record.report import Report  # noqa: E402
from intune_callbacks.transformers import InTuneCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and accelerate warn of much that is not ours

EAGER: dict[str, Any] = {"decide_every_s": 0.15, "decide_every_batches": 5, "warmup_batches": 4, "cpus": 8.0}


class Losses(transformers.TrainerCallback):
    """Notes every loss and gradient norm the Trainer logs, of training and of evaluation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        kept = ("loss", "grad_norm", "eval_loss")
        self.seen.append((state.global_step, {key: value for key, value in logs.items() if key in kept}))


def trainer(folder: Path, callbacks: list[Any], data: Any = None, **arguments: Any) -> Any:
    transformers.set_seed(5)
    given = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        use_cpu=True,
        seed=5,
    )
    options = transformers.TrainingArguments(**given | arguments)
    return transformers.Trainer(
        Model(), options, train_dataset=data or Slow(), eval_dataset=Slow(16), callbacks=callbacks
    )


def trained(folder: Path, ours: list[Any], resume: str | None = None, **arguments: Any) -> tuple[Any, Any]:
    losses = Losses()
    made = trainer(folder, [losses, *ours], **arguments)
    made.train(resume_from_checkpoint=resume)
    return losses.seen, [value.tolist() for value in made.model.state_dict().values()]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "one worker": ({}, {}, True),
    "no workers": ({"dataloader_num_workers": 0}, {}, False),
    "no workers, consent": ({"dataloader_num_workers": 0}, {"workers_kind": "process"}, True),
    "accumulation": ({"gradient_accumulation_steps": 3}, {}, True),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 20}, {}, True),
    "group by length": ({"train_sampling_strategy": "group_by_length"}, {}, True),
    "persistent workers": ({"dataloader_persistent_workers": True}, {}, True),
    "fewer steps than an epoch": ({"data": Slow(960), "max_steps": 180}, {}, True),
    "iterable": ({"data": Stream(), "max_steps": 120, "dataloader_num_workers": 2}, {}, True),
    "observe": ({}, {"mode": "observe"}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_the_same(name: str, tmp_path: Path, restless: type[Restless]) -> None:
    arguments, ours, changes = CASES[name]
    callback = InTuneCallback(show_card=False, **EAGER | ours)
    assert trained(tmp_path, [callback], **arguments) == trained(tmp_path, [], **arguments)
    report = callback.report
    assert report["frozen"] is None
    assert report["steps"] > 50
    assert (restless.resizes > 1) == changes


@three_attempts
def test_it_becomes_faster(tmp_path: Path) -> None:
    callback = InTuneCallback(show_card=False, **EAGER)
    seconds = []
    for ours in ([], [callback]):
        made = trainer(tmp_path, ours, data=Slow(960), num_train_epochs=1)
        begin_s = time.monotonic()
        made.train()
        seconds.append(time.monotonic() - begin_s)
    assert seconds[1] < 0.7 * seconds[0]


def test_advice_is_written_as_the_trainer_takes_it(tmp_path: Path) -> None:
    line = "DataLoader(num_workers=2, prefetch_factor=4, persistent_workers=True)  # was 1 and 2 and False"
    startup = Cause("startup", "load", "starting anew: persistent_workers=True keeps them", line, 1.2)
    advice = {"allocation": {"load": 2}, "gain": 1.2, "lines": [line], "words": []}
    report = Report(causes=(startup,), advice=advice, next=f"paste what is below\n{line}")
    seen: list[Any] = []

    class Words(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append(callback._fit.in_words(report))  # type: ignore[union-attr]

    class Mine(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
        pass

    callback = InTuneCallback(show_card=False)
    made = trainer(tmp_path, [callback, Words()], max_steps=1)
    made.args.__class__ = Mine  # as SFTConfig is one
    made.train()
    wanted = (
        "Mine(dataloader_num_workers=2, dataloader_prefetch_factor=4, dataloader_persistent_workers=True)"
        "  # was 1 and 2 and False"
    )
    (told,) = seen
    assert told.advice["lines"] == [wanted]
    assert told.causes[0].line == wanted
    assert told.next == f"paste what is below\n{wanted}"
    assert told.causes[0].sentence == "starting anew: dataloader_persistent_workers=True keeps them"


def test_a_loader_of_the_users_own_keeps_its_words(tmp_path: Path) -> None:
    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, 4, num_workers=1))

    class Words(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.append(callback._fit.in_words(report))  # type: ignore[union-attr]

    seen: list[Any] = []
    callback, report = InTuneCallback(show_card=False), Report(next="DataLoader(num_workers=2)  # was 1")
    options = trainer(tmp_path, [], dataloader_num_workers=3, max_steps=1).args
    Own(Model(), options, train_dataset=Slow(), callbacks=[callback, Words()]).train()
    assert seen == [report]


def test_off_leaves_no_trace(tmp_path: Path) -> None:
    callback = InTuneCallback(mode="off")
    made = trainer(tmp_path, [callback], max_steps=8)
    made.train()
    assert callback.report == {}
    assert "_get_iterator" not in vars(made.callback_handler.train_dataloader.base_dataloader)


def test_a_callback_can_be_copied_in_mid_training(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copies(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 20:
                copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    callback = InTuneCallback(show_card=False, **EAGER)
    trainer(tmp_path, [callback, Copies()]).train()
    assert [one.config for one in copies] == [callback.config] * 2
    assert callback.report["frozen"] is None


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    callback = InTuneCallback(show_card=False, **EAGER)
    skip = transformers.trainer.skip_first_batches
    made = trainer(tmp_path, [callback], dataloader_persistent_workers=True)
    made.train()
    base = made.callback_handler.train_dataloader.base_dataloader
    assert "_get_iterator" not in vars(base)
    assert multiprocessing.active_children() == []
    base._iterator._shutdown_workers()  # as users do
    assert transformers.trainer.skip_first_batches is skip


@pytest.mark.parametrize("restored", [False, True])
def test_a_training_resumed_in_mid_epoch_is_the_same_and_is_tuned(
    restored: bool, tmp_path: Path, restless: type[Restless]
) -> None:
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 30}
    arguments |= {"restore_callback_states_from_checkpoint": restored}
    whole, weights = trained(tmp_path / "stock", [], **arguments)
    callback = InTuneCallback(show_card=False, **EAGER)
    assert trained(tmp_path / "tuned", [callback], **arguments) == (whole, weights)
    state = json.loads((tmp_path / "tuned" / "checkpoint-30" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["InTuneCallback"]["args"]["cpus"] == 8.0
    second, losses = InTuneCallback(show_card=False, **EAGER), Losses()
    made = trainer(tmp_path / "tuned", [losses, second], **arguments)
    made.train(resume_from_checkpoint=str(tmp_path / "tuned" / "checkpoint-120"))
    assert losses.seen == [entry for entry in whole if entry[0] > 120]
    used = next(one for one in made.callback_handler.callbacks if isinstance(one, InTuneCallback))
    assert used.report["samples"] >= 4 * 38
    assert restless.restored == restored


def test_an_error_in_the_training_is_the_users_and_the_next_one_works(tmp_path: Path) -> None:
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 20:
                raise KeyError("mine")

    callback = InTuneCallback(show_card=False, **EAGER)
    made = trainer(tmp_path, [callback, Breaks()])
    with pytest.raises(KeyError, match="mine"):
        made.train()
    base = made.callback_handler.train_dataloader.base_dataloader
    made.callback_handler.callbacks = [one for one in made.callback_handler.callbacks if not isinstance(one, Breaks)]
    made.train()
    assert callback.report["frozen"] is None
    assert callback.report["samples"] == 2 * ROWS
    assert "_get_iterator" not in vars(base)


def test_after_an_error_nothing_outlives_the_trainer(tmp_path: Path) -> None:
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 60:
                raise KeyError("mine")

    callback = InTuneCallback(show_card=False, **EAGER)

    def train() -> None:
        try:
            trainer(tmp_path, [callback, Breaks()]).train()
        except KeyError:
            return

    train()
    until_s = time.monotonic() + 10.0
    while multiprocessing.active_children() and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.1)
    assert not multiprocessing.active_children()


def test_an_error_in_the_first_batch_leaves_nothing(tmp_path: Path) -> None:
    class Bad(Slow):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(index)

    def train() -> Any:
        made = trainer(tmp_path, [InTuneCallback(show_card=False, **EAGER)], Bad())
        with pytest.raises(KeyError):
            made.train()
        return weakref.ref(made.callback_handler.train_dataloader)

    skip = transformers.trainer.skip_first_batches
    loader = train()
    gc.collect()
    assert loader() is None
    assert transformers.trainer.skip_first_batches is skip


def test_figures_reach_the_loggers_and_not_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[dict[str, float]] = []

    class Board(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            logged.append(logs)

    Board.__module__ = "transformers.integrations.integration_utils"
    trained(tmp_path, [InTuneCallback(show_card=False, **EAGER), Board()], disable_tqdm=False)
    figures = [logs for logs in logged if "intune/wait_frac" in logs]
    assert figures
    assert all(key.startswith("intune/") for key in figures[0])
    out = capsys.readouterr()
    assert "intune/" not in out.out + out.err
    assert "in=" in out.err


def test_a_private_name_that_is_missing_costs_nothing_but_itself(tmp_path: Path, monkeypatch: Any) -> None:
    import intune_callbacks.transformers as ours

    class Nobody: ...

    monkeypatch.setattr(ours, "CallbackHandler", Nobody)
    callback = InTuneCallback(show_card=False, **EAGER)
    assert trained(tmp_path, [callback]) == trained(tmp_path, [])
    assert callback.report["steps"] > 0
