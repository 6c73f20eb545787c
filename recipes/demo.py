"""The demo: the same training, untuned and tuned, from the same poor start; what changed, and what did not."""

from __future__ import annotations

from typing import Any

from intune_callbacks.record.report import Report, Side, write_report
from intune_callbacks.show.card import show
from intune_callbacks.show.page.commands import at_the_end
from intune_callbacks.words import amount, percent

from . import runner
from .config import Resolved
from .results import result_table

__all__ = ["DEFAULTS", "compare", "run"]

# Storage that takes 100 ms to answer, as an object store may, and one reader that asks for one small block at a time.
DEFAULTS = ("rows=150000", "read_latency_ms=100", "pipeline.block_bytes=32768")

NOT_THE_SAME = (
    "NOT identical; on a GPU sums may be taken in another order each time: trainer.accelerator=cpu compares to the bit"
)


def run(resolved: Resolved) -> dict[str, Any]:
    """Train twice, print the end card, write `report.json` and `history.jsonl`, and return the report."""
    config = resolved.config
    print(f"1 of 2  as it is: every stage has 1 worker, each block takes {config.read_latency_ms:g} ms longer to read")
    untuned = runner.train(config, "off", "demo")
    print(f"        {_figures(untuned.steady)}")
    mode, source = resolved.mode
    print(f"2 of 2  the same rows, model and start, mode={mode}")
    tuned = runner.train(config, mode, source)
    print(f"        {_figures(tuned.steady)}\n")
    report = compare(untuned, tuned) | {"settings": resolved.settings}
    told = Report.from_json(report)
    write_report(config.run_dir, told)
    at_the_end(config.run_dir)
    show(told, config.run_dir)
    print(f"\n{result_table(tuned)}")
    same = "bit-identical" if report["loss_identical"] else NOT_THE_SAME
    print(f"\n{report['speedup']:.2f} times the throughput; the losses of all {len(tuned.losses)} steps are {same}")
    return report


def compare(untuned: runner.Outcome, tuned: runner.Outcome) -> dict[str, Any]:
    """Return the tuned run's report with ``before`` from the untuned run and ``after`` from the tuned one.

    Both are measured by one clock that is not the tuner's, over the second half of the steps. What the tuner itself
    measured before and after its changes is kept under ``tuner``.
    """
    report = dict(tuned.report)
    speed = [run.steady.throughput_samples_per_s or 0.0 for run in (untuned, tuned)]
    figures = ("throughput_samples_per_s", "throughput_batches_per_s", "wait_frac", "model_s", "verdict", "headroom")
    for key, measured in (("before", untuned.steady), ("after", tuned.steady)):
        report[key] = {**tuned.report[key], **{figure: getattr(measured, figure) for figure in figures}}
    # The tuner knows no window of an allocation it reached at the very end; its stages are up to date.
    report["after"]["allocation"] = {stage["name"]: stage["current"] for stage in report["stages"]}
    if tuned.report["before"]["verdict"] == "too short":
        report["why"] = f"untuned, the trainer waited {percent(untuned.steady.wait_frac)} of the time for data"
    return {
        **report,
        "verdict": report["after"]["verdict"],
        "speedup": speed[1] / speed[0],
        "loss_identical": untuned.losses == tuned.losses,
        "auc_untuned": untuned.report["auc"],
        "tuner": {key: tuned.report[key] for key in ("before", "after")},
    }


def _figures(steady: Side) -> str:
    wait, speed = steady.wait_frac, steady.throughput_samples_per_s
    return f"{amount(speed)} samples/s, waited for data {percent(wait)} of the time"
