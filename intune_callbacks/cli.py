"""The `intune` command: list, copy and run the recipes."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import recipes
from intune_callbacks import __version__
from intune_callbacks.errors import ConfigError, MissingPackage

__all__ = ["main"]

OVERRIDES = "keys of the recipe to change, such as batch_size=256 or intune.mode=advise"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `intune` command and return its exit code.

    Args:
        arguments: the words after `intune`; those of this process by default.

    Returns:
        0 if all went well, 1 if a file was in the way, 2 for a wrong command line or configuration,
        130 when interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ConfigError, MissingPackage) as error:
        print(f"intune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("intune: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="intune", description="Run recipes whose input tunes itself.")
    parser.add_argument("--version", action="version", version=f"intune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="list the recipes")
    ls.set_defaults(command=_ls)

    cp = commands.add_parser("cp", help="copy a recipe's configuration, to edit it")
    cp.add_argument("name", metavar="NAME", help="one of `intune ls`")
    cp.add_argument("file", metavar="FILE", type=Path, help="where the copy goes")
    cp.add_argument("--force", action="store_true", help="overwrite FILE")
    cp.set_defaults(command=_cp)

    run = commands.add_parser("run", help="run a recipe, or an edited copy of one")
    run.add_argument("name", metavar="NAME|FILE", help="one of `intune ls`, or a configuration file")
    run.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES)
    run.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    run.set_defaults(command=_run)

    demo = commands.add_parser("demo", help="run dlrm-lightning twice, untuned and tuned, and compare")
    demo.add_argument("overrides", metavar="key=value", nargs="*", help=OVERRIDES)
    demo.set_defaults(command=_demo)
    return parser


def _ls(options: argparse.Namespace) -> int:
    width = max(len(name) for name in recipes.names())
    for name in recipes.names():
        print(f"{name:<{width}}  {recipes.summary(name)}")
    return 0


def _cp(options: argparse.Namespace) -> int:
    source = recipes.source(options.name)
    if options.file.exists() and not options.force:
        print(f"intune: {options.file} exists; give --force to overwrite it", file=sys.stderr)
        return 1
    shutil.copyfile(source, options.file)
    print(f"copied to {options.file}; run it with: intune run {options.file}")
    return 0


def _run(options: argparse.Namespace) -> int:
    from recipes import config

    resolved = config.load(recipes.source(options.name), options.overrides)
    if options.dry_run:
        mode, source = resolved.mode
        print(f"# intune.mode in force: {mode} (from {source})")
        print(config.dump(resolved.config), end="")
        return 0
    from recipes import runner

    runner.run(resolved)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from recipes import config, demo

    demo.run(config.load(recipes.source("dlrm-lightning"), [*demo.DEFAULTS, *options.overrides]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
