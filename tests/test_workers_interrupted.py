"""Ctrl+C and other signals come when a worker process has been started; a training it ends, ends by it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import multiprocessing, os, signal, threading
from intune_callbacks.pipelines.workers.processes import ProcessPool

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
os.register_at_fork(after_in_child=interrupt{both})
pool = ProcessPool(abs, multiprocessing.get_context("fork"))
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
pool.close()
"""


@pytest.mark.parametrize(
    ("both", "call", "said"),
    [
        (", after_in_parent=interrupt", "pool.get()", "interrupted"),
        ("", "thread = threading.Thread(target=pool.get); thread.start(); thread.join()", ""),
    ],
)
def test_an_interrupt_in_the_middle_of_a_fork_comes_behind_it(both: str, call: str, said: str) -> None:
    code = INTERRUPTED.format(both=both, call=call)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout.split() == [*said.split(), "True", "set()"]


def test_what_a_handler_raises_in_the_middle_of_a_fork_comes_behind_it() -> None:
    """A training that `sys.exit` in a handler of SIGTERM is to end; a worker has the handlers of its parent."""
    code = """
import multiprocessing, os, signal, sys
from intune_callbacks.pipelines.workers.processes import ProcessPool

def ask(number):
    return signal.getsignal(number) is other

def other(*_):
    pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
signal.signal(signal.SIGUSR1, other)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
pool = ProcessPool(ask, multiprocessing.get_context("fork"))
try:
    pool.get()
except SystemExit as error:
    print(error)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = pool.get()
print(pool.call(child, signal.SIGUSR1, lambda: False)[0], ask(signal.SIGUSR1))
pool.put(child)
pool.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout.split() == ["ended", "True", "True"]


@pytest.mark.parametrize("report", ["dataclasses.dataclass(type('Row', (), {}))", "raise KeyError"])
def test_a_loop_that_ends_by_ctrl_c_is_a_process_that_ended_by_it(tmp_path: Path, report: str) -> None:
    """A shell's loop over seeds goes on behind a process with an exit status of its own, even after Ctrl+C."""
    pytest.importorskip("torch")
    code = f"""
import dataclasses, torch
from intune_callbacks import live
from intune_callbacks.session import fit
def at_the_end(folder):
    {report}
fit.at_the_end = at_the_end
loader = live(torch.utils.data.DataLoader(torch.zeros(400), batch_size=4), run_dir={str(tmp_path)!r})
for number, _ in enumerate(loader):
    if number == 50:
        raise KeyboardInterrupt
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == -signal.SIGINT, run.stderr
