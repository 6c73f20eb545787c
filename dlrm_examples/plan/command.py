"""`intune plan`: reads what is asked, prints the plan, and gives it as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlrm_examples.models.tables import MLPERF_BAGS, TABLES
from dlrm_examples.plan.costs import DTYPES, OPTIMIZERS, Job, Machine, Table
from dlrm_examples.plan.placement import DoesNotFit, Plan, make_plan
from intune_callbacks.config import choice_problem, nearest, number_problem
from intune_callbacks.errors import ConfigError

__all__ = ["as_json", "as_text", "ask", "run"]

UNITS = {"": 1, "B": 1}
for power, letter in enumerate("KMGT", 1):
    UNITS |= {f"{letter}B": 1000**power, f"{letter}iB": 1024**power}
MIB = 1 << 20
MOST_ROWS, MOST_BAG = 1 << 40, 1 << 20


def ask(
    tables: str,
    gpus: int,
    hbm: str,
    host: str = "0",
    *,
    dim: int = 128,
    dtype: str = "fp32",
    optimizer: str = "rowwise-adagrad",
    batch: int = 65_536,
    bags: str | None = None,
    max_rows: int | None = None,
    reserve: float = 0.15,
) -> tuple[Job, Machine]:
    """Return what the command line asks for.

    Args:
        tables: a name of `models.tables`, or a file with numbers of rows, or with a JSON object name -> rows.
        gpus: number of GPUs.
        hbm: memory of each, such as ``40GiB`` or ``80GB``.
        host: host memory that may hold tables, in all.
        dim, dtype, optimizer: as for `Job`.
        batch: samples per step over all GPUs.
        bags: ids per sample and table, comma-separated, or ``mlperf``; 1 by default.
        max_rows: cap of every table's rows.
        reserve: as for `Job`.

    Raises:
        ConfigError: with all problems at once.
    """
    problems: list[str] = []
    rows = _rows(tables, problems)
    sizes = _bags(bags, len(rows), problems)
    hbm_bytes, host_bytes = _size("--hbm", hbm, problems), _size("--host", host, problems)
    problems += number_problem("--gpus", gpus, 1, 65_536)
    problems += number_problem("--dim", dim, 1, 1 << 16)
    problems += number_problem("--batch", batch, 1, 1 << 30)
    problems += number_problem("--reserve", reserve, 0.0, 0.9)
    problems += choice_problem("--dtype", dtype, tuple(DTYPES))
    problems += choice_problem("--optimizer", optimizer, OPTIMIZERS)
    if max_rows is not None:
        problems += number_problem("--max-rows", max_rows, 1, MOST_ROWS)
    if problems:
        raise ConfigError(problems)
    capped = {name: n if max_rows is None else min(n, max_rows) for name, n in rows.items()}
    listed = tuple(Table(name, n, bag) for (name, n), bag in zip(capped.items(), sizes, strict=True))
    return Job(listed, dim, dtype, optimizer, batch, reserve), Machine(gpus, hbm_bytes, host_bytes)


def run(job: Job, machine: Machine, file: Path | None = None) -> int:
    """Print the plan, write it as JSON if a file is given, and return 0.

    Raises:
        DoesNotFit: there is none; the JSON then says by how much.
    """
    try:
        plan = make_plan(job, machine)
    except DoesNotFit as error:
        found = {"needed_bytes": error.needed_bytes, "usable_bytes": error.usable_bytes, "cures": error.cures}
        _write(file, {"fits": False, **found})
        raise
    print(as_text(plan))
    _write(file, as_json(plan))
    return 0


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON: sizes in bytes, rows as [first, end)."""
    tables = [
        {
            **asdict(table),
            "bytes": table.rows * plan.job.row_bytes,
            "placement": plan.of_table(index)[0].kind,
            "shards": [{"gpu": s.gpu, "first_row": s.first_row, "end_row": s.end_row} for s in plan.of_table(index)],
        }
        for index, table in enumerate(plan.job.tables)
    ]
    job = {key: value for key, value in asdict(plan.job).items() if key != "tables"}
    gpus = [
        {"used_bytes": used, "sent_bytes_per_step": asdict(moved)}
        for used, moved in zip(plan.gpu_bytes, plan.traffic, strict=True)
    ]
    return {
        "fits": True,
        "job": job,
        "machine": asdict(plan.machine),
        "usable_bytes_per_gpu": plan.job.usable(plan.machine.hbm_bytes),
        "host_used_bytes": plan.host_bytes,
        "imbalance": plan.imbalance,
        "gpus": gpus,
        "tables": tables,
    }


def as_text(plan: Plan) -> str:
    """Return the plan as it is printed."""
    return "\n".join([*_summary(plan), "", *_tables(plan), "", *_gpus(plan), "", *_traffic(plan)])


def _summary(plan: Plan) -> Iterable[str]:
    job, machine = plan.job, plan.machine
    weights, state = job.rows * job.dim * DTYPES[job.dtype], job.rows * job.state_bytes
    yield (
        f"{len(job.tables)} tables, {_count(job.rows)} rows x {job.dim} = {job.rows * job.dim / 1e9:.2f} billion "
        f"{job.dtype} weights: {_size_text(weights)}, and {_size_text(state)} of {job.optimizer} state"
    )
    usable = job.usable(machine.hbm_bytes)
    host = f"; host {_size_text(machine.host_bytes)}, usable {_size_text(job.usable(machine.host_bytes))}"
    yield (
        f"{machine.gpus} GPUs of {_size_text(machine.hbm_bytes)}, usable {_size_text(usable)} "
        f"({job.reserve_frac:.0%} reserve){host if machine.host_bytes else ''}"
    )


def _tables(plan: Plan) -> Iterable[str]:
    width = max(5, *(len(table.name) for table in plan.job.tables))
    yield f"{'table':<{width}}  {'rows':>13}  {'size':>10}  {'placement':<10}  GPUs"
    order = sorted(range(len(plan.job.tables)), key=lambda t: (-plan.job.tables[t].rows, t))
    for index in order:
        table, shards = plan.job.tables[index], plan.of_table(index)
        where = f"{shards[0].gpu}"
        if shards[0].kind == "row-wise":
            where = f"{where}-{shards[-1].gpu}, {_count(shards[0].rows)} rows each"
        elif shards[0].kind == "host":
            where = f"{where} reads it from host memory"
        size = _size_text(table.rows * plan.job.row_bytes)
        yield f"{table.name:<{width}}  {_count(table.rows):>13}  {size:>10}  {shards[0].kind:<10}  {where}"


def _gpus(plan: Plan) -> Iterable[str]:
    usable = plan.job.usable(plan.machine.hbm_bytes)
    yield f"{'GPU':<4}{'whole tables':>13}{'parts':>7}{'used':>12}{'of usable':>11}"
    for gpu, used in enumerate(plan.gpu_bytes):
        here = [shard for shard in plan.shards if shard.gpu == gpu]
        parts = sum(shard.kind == "row-wise" for shard in here)
        yield f"{gpu:<4}{len(here) - parts:>13}{parts:>7}{_size_text(used):>12}{used / usable:>11.0%}"
    if plan.host_bytes:
        share = plan.host_bytes / plan.job.usable(plan.machine.host_bytes)
        yield f"{'host':<24}{_size_text(plan.host_bytes):>12}{share:>11.0%}"
    yield f"the fullest GPU holds {plan.imbalance:.2f} times the mean"


def _traffic(plan: Plan) -> Iterable[str]:
    moved = plan.traffic
    embeddings, mlps, host = (_mib(max(getattr(one, name) for one in moved)) for name in ("embeddings", "mlps", "host"))
    yield (
        f"per step of {_count(plan.job.batch_size)} samples the busiest GPU sends {embeddings} of ids, vectors and "
        f"their gradients, and {mlps} of the MLPs' gradients; "
        f"all GPUs together {_mib(sum(one.embeddings + one.mlps for one in moved))}"
    )
    if plan.host_bytes:
        yield f"the busiest GPU reads and writes up to {host} in host memory per step"


def _rows(tables: str, problems: list[str]) -> dict[str, int]:
    """Return name -> rows."""
    if tables in TABLES:
        return {f"C{index}": rows for index, rows in enumerate(TABLES[tables], 1)}
    file = Path(tables)
    try:
        if not file.is_file():
            problems.append(f"--tables {tables}: expected {', '.join(TABLES)}, or a file{nearest(tables, TABLES)}")
            return {}
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--tables {tables}: cannot be read as text: {error}")
        return {}
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        given = [int(word) if word.isdecimal() else word for word in re.split(r"[\s,]+", text.strip())]
    if isinstance(given, list):
        given = {f"table {index}": rows for index, rows in enumerate(given, 1)}
    if not isinstance(given, dict) or not given:
        problems.append(f"--tables {tables}: expected one or more numbers of rows, or a JSON object of name -> rows")
        return {}
    for name, rows in given.items():
        if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
            problems.append(f"--tables {tables}: {name}: expected a whole number of rows from 1, got {rows!r}")
    return given


def _bags(bags: str | None, tables: int, problems: list[str]) -> list[int]:
    if bags is None:
        return [1] * tables
    words = [str(bag) for bag in MLPERF_BAGS] if bags == "mlperf" else bags.split(",")
    wrong = [word for word in words if not word.strip().isdecimal() or not 1 <= int(word) <= MOST_BAG]
    if wrong or (tables and len(words) != tables):
        problems.append(
            f"--bags {bags}: expected mlperf (26 tables), or {tables} whole numbers from 1, comma-separated"
        )
        return []
    return [int(word) for word in words]


def _size(name: str, text: str, problems: list[str]) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", text.strip())
    # A plain number is rather meant as GB than as the bytes it would be.
    if match is None or match[2] not in UNITS or (not match[2] and float(match[1])):
        problems.append(f"{name} {text}: expected a size such as 40GiB, 80GB or 1TiB")
        return 0
    return int(float(match[1]) * UNITS[match[2]])


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _size_text(size_bytes: int) -> str:
    power = max(0, min(4, (max(size_bytes, 1).bit_length() - 1) // 10))
    return f"{size_bytes / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _mib(size_bytes: int) -> str:
    return f"{_count(round(size_bytes / MIB))} MiB"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")
