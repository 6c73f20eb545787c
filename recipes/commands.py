"""What the `intune` command does with recipes and examples; the entry point `recipes` in pyproject.toml adds it."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import Any

from intune_callbacks.cli import path
from intune_callbacks.config import MODES
from intune_callbacks.words import COLUMNS

from . import names, needs, source, summary

__all__ = ["add"]

DEMO = "dlrm-lightning"
OVERRIDES = "keys of the recipe to change, such as batch_size=256 or intune.mode=advise"


def add(commands: Any) -> None:
    """Add `ls`, `cp`, `run`, `demo`, `convert` and `plan`.

    Args:
        commands: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    ls = commands.add_parser("ls", help="list the recipes, each with the extra it needs")
    ls.set_defaults(command=_ls)

    cp = commands.add_parser("cp", help="copy a recipe's configuration, to edit it")
    cp.add_argument("name", metavar="NAME", help="one of `intune ls`")
    cp.add_argument("file", metavar="FILE", type=path, help="where the copy goes")
    cp.add_argument("--force", action="store_true", help="overwrite FILE")
    cp.set_defaults(command=_cp)

    run = commands.add_parser("run", help="run a recipe, or an edited copy of one")
    run.add_argument("name", metavar="NAME|FILE", help="one of `intune ls`, or a configuration file")
    run.add_argument("words", metavar="key=value", nargs="*", default=[], help=OVERRIDES)
    run.add_argument("--mode", choices=MODES, help="what the tuner does; wins over the recipe")
    run.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    run.set_defaults(command=_run)

    demo = commands.add_parser("demo", help="run a recipe twice, untuned and tuned, and compare")
    demo.add_argument("words", metavar="NAME|key=value", nargs="*", help=f"as for `run`; NAME is {DEMO} by default")
    demo.add_argument("--mode", choices=MODES, help="what the tuner does in the second run")
    demo.set_defaults(command=_demo)

    convert = commands.add_parser("convert", help="write Criteo files in a format that is read with less work")
    convert.add_argument("source", metavar="PATH", type=path, help="a Criteo file, or a directory of them")
    convert.add_argument("directory", metavar="OUT", type=path, help="where the new files go; made if absent")
    convert.add_argument(
        "--format", metavar="NAME", default="packed", help="packed (parsed rows; default), parquet, zstd or gzip"
    )
    convert.add_argument(
        "--dense", metavar="TYPE", default="float32", help="packed: float32 (default) or float16, a sixth smaller"
    )
    convert.set_defaults(command=_convert)
    _add_plan(commands)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="say which GPU would hold which embedding table; needs no GPU")
    plan.add_argument(
        "--tables", metavar="NAME|FILE", required=True, help="criteo-1tb-40m, ..., or a file of row counts"
    )
    plan.add_argument("--gpus", metavar="N", type=int, required=True, help="number of GPUs")
    plan.add_argument("--hbm", metavar="SIZE", required=True, help="memory of each, such as 40GiB")
    plan.add_argument("--host", metavar="SIZE", help="host memory that may hold tables (default none)")
    plan.add_argument("--dim", metavar="D", type=int, help="width of the embeddings (default 128)")
    plan.add_argument("--dtype", metavar="TYPE", help="of the tables: fp32 (default) or fp16")
    plan.add_argument("--optimizer", metavar="NAME", help="rowwise-adagrad (default), adagrad or sgd")
    plan.add_argument("--batch", metavar="B", type=int, help="samples per step over all GPUs (default 65536)")
    plan.add_argument("--bags", metavar="N,N,...", help="ids per sample and table, or mlperf (default 1)")
    plan.add_argument("--max-rows", metavar="N", type=int, help="cap of every table's rows")
    plan.add_argument("--reserve", metavar="FRAC", type=float, help="share of memory left free (default 0.15)")
    plan.add_argument("--json", metavar="FILE", type=path, help="write the plan there as well")
    plan.set_defaults(command=_plan)


def _ls(options: argparse.Namespace) -> int:
    width, wide = (max(len(word(name)) for name in names()) for word in (str, needs))
    indent = (width + 2 + wide + 2) * " "
    for name in names():
        begin = f"{name:<{width}}  {needs(name):<{wide}}  "
        print(textwrap.fill(summary(name), COLUMNS, initial_indent=begin, subsequent_indent=indent))
    print("\n[...] is the extra a recipe needs; in a clone: python -m pip install '.[dlrm]'")
    return 0


def _cp(options: argparse.Namespace) -> int:
    recipe = source(options.name)
    if options.file.exists() and not options.force:
        print(f"intune: {options.file} exists; give --force to overwrite it", file=sys.stderr)
        return 1
    try:
        shutil.copyfile(recipe, options.file)
    except OSError as error:
        print(f"intune: {options.file} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"copied to {options.file}; run it with: intune run {options.file}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from . import config

    resolved = config.load(source(options.name), [*options.words, *_mode(options)])
    if options.dry_run:
        mode, where = resolved.mode
        print(f"# intune.mode in force: {mode} (from {where})")
        print(config.dump(resolved.config), end="")
        return 0
    from . import runner

    runner.run(resolved)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from . import config, demo

    named = bool(options.words) and "=" not in options.words[0]
    name, overrides = (options.words[0], options.words[1:]) if named else (DEMO, options.words)
    demo.run(config.load(source(name), [*demo.DEFAULTS, *overrides, *_mode(options)]))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from dlrm_examples.convert import convert, sources

    try:
        for file in sources(options.source):
            print(convert(file, options.directory, options.format, dense=options.dense), flush=True)
    except OSError as error:
        print(f"intune: {error}", file=sys.stderr)
        return 1
    return 0


def _mode(options: argparse.Namespace) -> list[str]:
    return [] if options.mode is None else [f"intune.mode={options.mode}"]


def _plan(options: argparse.Namespace) -> int:
    from dlrm_examples.plan import command

    given = {key: value for key, value in vars(options).items() if value is not None and key not in ("command", "json")}
    return command.run(*command.ask(**given), options.json)
