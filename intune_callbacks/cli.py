"""The `intune` command."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from intune_callbacks import __version__
from intune_callbacks.config import POLICIES, choice_problem, number_problem
from intune_callbacks.errors import BadData, BuildFailed, ConfigError, MissingPackage
from intune_callbacks.record.files import unwritable

__all__ = ["main", "path"]

MINUTES, QUICK_DECISIONS = 60.0, 40_000
"""Length of `intune pretrain`, and of it with `--quick`. A choice: several times what the shipped weights took, as the
card says, and seconds, which show that it runs."""
COMMANDS = "intune_callbacks.commands"
"""Group of the entry points of installed packages that add commands: each a function of argparse's subparsers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `intune` command and return its exit code.

    Args:
        arguments: the words after `intune`; those of this process by default.

    Returns:
        0 if all went well, 1 if a file was in the way, there was no job to watch or nobody reads what is printed, 2 for
        a wrong command line, configuration or data file or if the tf.data operations cannot be built, 130 when
        interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # what stdout cannot write, as × in ASCII, is no error
        sys.stdout.reconfigure(errors="replace")
    options = _parse(arguments)
    try:
        code = int(options.command(options))
        print(end="", flush=True)  # sys.stdout is None where it was closed before
        return code
    except (BadData, BuildFailed, ConfigError, MissingPackage) as error:
        print(f"intune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("intune: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `intune ls | head`: see https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def path(word: str) -> Path:
    """Return the path that a word of the command line names: argparse's `type` of every such argument.

    Raises:
        argparse.ArgumentTypeError: it names none: it is empty, as a variable of the shell that is not set, or too long.
    """
    if not word:
        raise argparse.ArgumentTypeError("expected a path, got an empty word")
    try:
        os.lstat(word)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"expected a path, got a word of {len(word)} letters") from None
    return Path(word)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # by itself argparse takes no key=value behind an option
        options.words = [*options.words, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="intune", description="Look at what InTune did; run recipes.")
    parser.add_argument("--version", action="version", version=f"intune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser

    def add_described(name: str, *, help: str, **more: Any) -> argparse.ArgumentParser:
        return add(name, help=help, description=f"{help[0].upper()}{help[1:]}.", **more)

    # By itself argparse says what a command does beside the others only, not where somebody asks for its help.
    commands.add_parser = add_described  # type: ignore[assignment, method-assign]

    def add_own(name: str, command: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help)
        made.set_defaults(command=command)
        return made

    # Recipes and examples build upon this package, so they bring their commands along, not it theirs.
    for entry in entry_points(group=COMMANDS):
        try:
            entry.load()(commands)
        except Exception as error:  # of somebody else's package: the other commands work all the same
            print(f"intune: no commands of {entry.value}: {type(error).__name__}: {error}", file=sys.stderr)

    watch = add_own("watch", _watch, "show what a running job's tuner sees and does")
    watch.add_argument("folder", metavar="DIR", type=path, help="the job's run_dir")
    watch.add_argument("--wait", metavar="S", type=float, default=300.0, help="seconds to wait for its first decision")

    pretrain = add_own("pretrain", _pretrain, "train the agent on simulated machines, on one CPU core")
    pretrain.add_argument("--out", metavar="DIR", type=path, required=True, help="for weights, card and checkpoint")
    pretrain.add_argument("--seed", metavar="N", type=int, default=0, help="all random choices derive from it")
    length = pretrain.add_mutually_exclusive_group()
    length.add_argument("--minutes", metavar="M", type=float, help=f"length by the clock (default {MINUTES:.0f})")
    length.add_argument("--decisions", metavar="D", type=int, help="length in decisions: repeats to the last bit")
    pretrain.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR")
    pretrain.add_argument("--quick", action="store_true", help="seconds, not minutes: shows that it runs, not a result")
    pretrain.add_argument("--eval-static", metavar="N", type=int, help="held-out machines (default 128)")
    pretrain.add_argument("--eval-resize", metavar="N", type=int, help="held-out machines that resize (default 64)")
    pretrain.add_argument("--eval-seed", metavar="N", type=int, help="of the held-out machines (default 5001)")
    pretrain.add_argument("--date", metavar="DATE", help="of the model card (default today)")

    serve = add_own("serve-agent", _serve, "decide for trainings over the network: policy='http://host:port'")
    serve.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="to listen at (default 127.0.0.1)")
    serve.add_argument("--port", metavar="N", type=int, default=8765, help="default 8765; 0 takes a free one")
    shown = "holds what trainings have to show; default the variable INTUNE_AGENT_TOKEN; "
    shown += "none is needed on this machine alone"
    serve.add_argument("--token-file", metavar="FILE", type=path, help=shown)
    serve.add_argument("--cert", metavar="FILE", type=path, help="certificate chain: speak TLS")
    serve.add_argument("--key", metavar="FILE", type=path, help="its key")
    serve.add_argument("--policy", metavar="NAME", default="dqn", help=f"of {', '.join(POLICIES)} (default dqn)")
    serve.add_argument("--dir", metavar="DIR", type=path, help="keep there what trainings found, over a restart, too")

    add_own("doctor", _doctor, "say what this machine and the installed packages allow")

    report = add_own("report", _report, "print a run's end card and write its report.html")
    report.add_argument("directory", metavar="DIR", type=path, help="the run_dir of a run, finished or not")
    report.add_argument("--out", metavar="FILE", type=path, help="where the page goes (default DIR/report.html)")
    report.add_argument("--open", action="store_true", help="open the page in a browser")

    compare = add_own("compare", _compare, "print two runs side by side")
    compare.add_argument("first", metavar="DIR", type=path, help="the run_dir of one run")
    compare.add_argument("second", metavar="DIR", type=path, help="the run_dir of the other")
    compare.add_argument("--html", metavar="FILE", type=path, help="write a page with both courses")
    compare.add_argument("--open", action="store_true", help="open that page (default DIR/compare.html of the second)")

    build_tf = add_own("build-tf", _build_tf, "compile the tf.data operations now, not beside the first fit")
    how = build_tf.add_mutually_exclusive_group()
    how.add_argument("--force", action="store_true", help="compile even if that has been done")
    how.add_argument("--ship", action="store_true", help="compile into the package, from where a wheel takes it along")

    complete = add_own("complete", _complete, "print what makes a shell complete this command")
    complete.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='eval "$(intune complete bash)"')
    return parser


def _watch(options: argparse.Namespace) -> int:
    from intune_callbacks.show.watch import watch

    with _read(options.folder):
        return watch(options.folder, wait_s=options.wait)


def _serve(options: argparse.Namespace) -> int:
    from intune_callbacks.service.server import serve, token_in

    problems = list(choice_problem("--policy", options.policy, POLICIES))
    problems += [] if (options.cert is None) == (options.key is None) else ["--cert and --key: expected both, or none"]
    problems += number_problem("--port", options.port, 0, 65_535)
    if options.dir is not None and (why := unwritable(options.dir)) is not None:
        problems.append(f"--dir {options.dir}: {why}")
    token = token_in(options.token_file, problems)
    if problems:
        raise ConfigError(problems)
    certificate = None if options.cert is None else (options.cert, options.key)
    return serve(options.host, options.port, token, certificate, options.policy, options.dir)


def _doctor(options: argparse.Namespace) -> int:
    from intune_callbacks.doctor import examine, text

    _quiet_tensorflow()
    print(text(examine()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from intune_callbacks.show.page import commands

    with _read(options.directory):
        return commands.report(options.directory, options.out, options.open)


def _compare(options: argparse.Namespace) -> int:
    from intune_callbacks.show.page import commands

    with _read(options.first, options.second):
        return commands.compare(options.first, options.second, options.html, options.open)


@contextmanager
def _read(*folders: Path) -> Iterator[None]:
    """A folder that somebody else closed, as a job in a container does, is a wrong one."""
    try:
        yield
    except PermissionError as error:
        given = " ".join(str(folder) for folder in folders)
        raise ConfigError([f"DIR={given!r}: this process may not read {error.filename}"]) from None


def _pretrain(options: argparse.Namespace) -> int:
    from intune_callbacks.pretrain.training import PretrainConfig, pretrain

    given: dict[str, Any] = {"eval_static": 8, "eval_resize": 4} if options.quick else {}
    length = {"decisions": options.decisions, "minutes": options.minutes}
    if options.decisions is None and options.minutes is None:
        length = {"decisions": QUICK_DECISIONS} if options.quick else {"minutes": MINUTES}
    evaluation = {name: getattr(options, name) for name in ("eval_static", "eval_resize", "eval_seed")}
    given |= {name: value for name, value in evaluation.items() if value is not None}
    config = PretrainConfig(seed=options.seed, **length, **given)
    pretrain(config, options.out, resume=options.resume, date=options.date)
    print(f"weights.npz, card.md and card.json are in {options.out}")
    return 0


def _build_tf(options: argparse.Namespace) -> int:
    from intune_callbacks.pipelines.tf import build as tf_build

    _quiet_tensorflow()
    print(tf_build.ship() if options.ship else tf_build.build(force=options.force))
    return 0


def _quiet_tensorflow() -> None:
    """Leave out what TensorFlow prints at its start, as the recipes do: who asked for our words looks for them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _complete(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise MissingPackage("shtab", "report") from None
    print(shtab.complete(_parser(), options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
