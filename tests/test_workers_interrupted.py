"""Ctrl+C while a worker process is being started: it is the training's, and comes when that has ended."""

from __future__ import annotations

import subprocess
import sys

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
