"""A process that writes the history of a run, of a real tuner on a virtual machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# One decision for each line it is sent, of a real tuner on a virtual machine; "end" writes the report.
WRITER = """
import sys
from pathlib import Path
from fakes import FakeLoop, FakeMachine, FakePipeline, Work
from intune_callbacks.config import TunerConfig
from intune_callbacks.record.findings import build_report
from intune_callbacks.record.history import History
from intune_callbacks.record.report import write_report
from intune_callbacks.session.tuner import Tuner

folder = Path(sys.argv[1])
pipeline = FakePipeline({"read": Work(0.001), "decode": Work(0.1)}, FakeMachine(), depth=2)
loop, machine = FakeLoop(pipeline, model_s=0.02), pipeline.machine
config = TunerConfig(mode=sys.argv[2], policy="model-jump")
tuner = Tuner(pipeline, config, probe=machine, clock=machine.clock(), history=History(folder / "history.jsonl"))
for line in sys.stdin:
    if line == "end\\n":
        tuner.close()
        write_report(folder, build_report(tuner.summary()))
    else:
        before = len(tuner.history.decisions)
        while len(tuner.history.decisions) == before:
            loop.run(tuner, 0.5)
    print("done", flush=True)
"""


class Run:
    """A process that writes a history when it is told to."""

    def __init__(self, folder: Path, mode: str = "tune") -> None:
        self.folder, self.history = folder, folder / "history.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        )

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def decide(self, times: int = 1) -> Run:
        for _ in range(times):
            self.tell("decide")
        return self

    def end(self) -> None:
        self.tell("end")

    def close(self) -> None:
        self.process.communicate(timeout=20)
