"""The independent judge: DLIO, the engine of MLPerf Storage, with its own loaders, loop and accelerator utilisation.

Stock with every `read_threads` of a sweep, and its loader handed to `live`, from one. Needs ``pip install --no-deps
dlio-benchmark omegaconf==2.3.0 hydra-core antlr4-python3-runtime==4.9.3 h5py pandas mpi4py mpich pydftracer==2.0.6``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper.runs import Options, Run, Task
from benchmarks.paper.summary import grouped, spread

__all__ = ["SHAPES", "TITLE", "Shape", "arguments", "draw", "rows", "tasks"]

TITLE = "The independent judge: accelerator utilisation by DLIO, epoch by epoch, in per cent"
ROOT = Path(__file__).parents[2]
THREADS = (1, 2, 4, 8)
OURS = "InTune from 1"
LONGEST_S = 1200.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload of DLIO, scaled.

    Args:
        format: of the files.
        files: as many.
        samples: of one file.
        record_bytes: mean of one sample.
        stdev_bytes: of the samples.
        batch: samples of a step.
        compute_s: of a step, asleep.
        preprocess_s: of a sample, asleep in the reader.
        epochs: as many.
    """

    format: str
    files: int
    samples: int
    record_bytes: int
    stdev_bytes: int
    batch: int
    compute_s: float
    preprocess_s: float
    epochs: int = 2


SHAPES = {
    # MLPerf Storage: samples of 147 +- 68 MB, batch 7, .323 s; here 1/64 of the bytes.
    "3D-UNet": Shape("npz", 1050, 1, 2_290_000, 1_070_000, 7, 0.100, 0.040),
    # batch 24, JPEG of about 315 kB; here 1/8 of the bytes.
    "RetinaNet": Shape("jpeg", 3600, 1, 40_000, 0, 24, 0.100, 0.012),
    # DLIO's dlrm.yaml: one file, records of 671 MB that are batches, .064 s; here 1/640 of the bytes.
    "DLRM": Shape("indexed_binary", 1, 750, 1_048_576, 0, 1, 0.020, 0.060),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a reader may choose."""
    parser.add_argument("--shape", dest="shapes", choices=SHAPES, nargs="+", help="of these (default all)")
    parser.add_argument("--loader", dest="loaders", choices=["pytorch", "tensorflow"], nargs="+", help="default both")
    for name in ("files", "samples", "batch", "record-bytes", "epochs"):
        parser.add_argument(f"--{name}", type=int, help="in place of the shape's")
    for name in ("compute-s", "preprocess-s"):
        parser.add_argument(f"--{name}", type=float, help="in place of the shape's")


def tasks(options: Options) -> list[Task]:
    """Return a run of stock for each number of threads, and one of ours, for each shape, loader and seed."""
    given = options.given
    changed = {name: given[name] for name in asdict(SHAPES["DLRM"]) if given.get(name) is not None}
    if options.quick:
        changed = {"files": 140, **changed}
    found = []
    for seed in options.seeds:
        for name in given.get("shapes") or (("3D-UNet",) if options.quick else SHAPES):
            shape = replace(SHAPES[name], **changed)
            if shape.epochs < 2:
                raise SystemExit(f"--epochs {shape.epochs}: expected 2 or more, for the second one is compared")
            # Another shape by name, too: its runs stand in the same file.
            told = ", ".join([name, *(f"{part} {value}" for part, value in changed.items())])
            for loader in given.get("loaders") or (("pytorch",) if options.quick else ("pytorch", "tensorflow")):
                for threads in (*((1, 4) if options.quick else THREADS), 0):
                    system = f"stock, {threads}" if threads else OURS
                    key = {"shape": told, "loader": loader, "system": system, "seed": seed}
                    found.append(Task(key, _judged, (shape, loader, threads, seed), alone=True))
    return found


def _judged(shape: Shape, loader: str, threads: int, seed: int) -> Run:
    """Return DLIO's utilisation and throughput of each epoch.

    Args:
        shape: workload.
        loader: ``pytorch`` or ``tensorflow``.
        threads: `read_threads`; 0 is ours from 1.
        seed: of its shuffles.
    """
    made = (shape.format, shape.files, shape.samples, shape.record_bytes, shape.stdev_bytes)
    folder = Path(tempfile.gettempdir()) / "intune-judge" / "-".join(map(str, made))
    data = {
        "dataset.data_folder": folder / "data",
        "dataset.format": shape.format,
        "dataset.num_files_train": shape.files,
        "dataset.num_files_eval": 0,
        "dataset.num_samples_per_file": shape.samples,
        "dataset.record_length": shape.record_bytes,
        "dataset.record_length_stdev": shape.stdev_bytes,
        "dataset.record_length_resize": min(shape.record_bytes, 1 << 18),
        "framework": loader,
        "reader.data_loader": loader,
        "workflow.checkpoint": False,
        "workflow.evaluation": False,
    }
    if not (folder / "made").exists():
        _dlio({**data, "workflow.generate_data": True, "workflow.train": False}, folder / "output")
        (folder / "made").touch()
    with tempfile.TemporaryDirectory() as out:
        run = {
            "workflow.generate_data": False,
            "workflow.train": True,
            "reader.batch_size": shape.batch,
            "reader.read_threads": threads or 1,
            "reader.sample_shuffle": "seed",
            "reader.preprocess_time": shape.preprocess_s,
            "train.seed": seed,
            "train.epochs": shape.epochs,
            "train.computation_time": shape.compute_s,
        }
        if not threads:
            name = "InTuneTorchDataLoader" if loader == "pytorch" else "InTuneTFDataLoader"
            run["reader.data_loader_classname"] = f"benchmarks.paper.judge_loaders.{name}"
            run["reader.data_loader_sampler"] = "index" if loader == "pytorch" else "iterative"
        _dlio({**data, **run}, Path(out))
        metric = json.loads((Path(out) / "summary.json").read_text(encoding="utf-8"))["metric"]
        report = next(Path(out).rglob("report.json"), None)
        told = json.loads(report.read_text(encoding="utf-8")) if report is not None else {}
    return {
        "au": [round(au, 2) for au in metric["train_au_percentage"]],
        "samples_per_s": [round(rate, 2) for rate in metric["train_throughput_samples_per_second"]],
        **{name: told.get(name) for name in ("verdict", "next", "changes", "frozen") if told},
    }


def _dlio(given: dict[str, Any], out: Path) -> None:
    """Run DLIO with these settings; it writes to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    told = [f"++workload.{name}={value}" for name, value in {**given, "output.folder": out}.items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paper.judge_loaders", "workload=default", f"hydra.run.dir={out}", *told],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "JUDGE_REPORT": str(out / "intune")},
        capture_output=True, text=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"DLIO: exit status {done.returncode}: {done.stdout[-500:]}{done.stderr[-2000:]}")


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row for each shape, loader and system; ours with what it is of the best stock one in that epoch."""
    found = []
    for key, group in grouped(runs, "shape", "loader").items():
        systems = grouped(group, "system")
        best = max(fmean(run["au"][1] for run in same) for name, same in systems.items() if name["system"] != OURS)
        for name, same in systems.items():
            row: dict[str, Any] = {**key, **name}
            for epoch in range(len(same[0]["au"])):
                row |= spread(f"epoch {epoch + 1}", [run["au"][epoch] for run in same])
            row |= spread("first / best", [run["au"][0] / best for run in same])
            row |= spread("second / best", [run["au"][1] / best for run in same])
            found.append(row | {"changes": same[-1].get("changes", ""), "seeds": len(same)})
    return found


def draw(runs: Sequence[Run], figure: Any) -> None:
    """Draw utilisation by epoch, a field for each shape and loader."""
    fields = list(grouped(runs, "shape", "loader").items())
    figure.set_size_inches(4.5 * len(fields), 4)
    for axes, (key, group) in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields, strict=True):
        for name, same in grouped(group, "system").items():
            means = [fmean(run["au"][epoch] for run in same) for epoch in range(len(same[0]["au"]))]
            ours = name["system"] == OURS
            axes.plot(range(1, len(means) + 1), means, marker="o", lw=2.5 if ours else 1.2, label=name["system"])
        axes.set(title=f"{key['shape']}, {key['loader']}", xlabel="epoch", ylabel="accelerator utilisation, %")
        axes.set_ylim(0, 105)
        axes.legend(fontsize=7)
