"""One training per fault, each in a process of its own, ended by a signal at a moment; prints what became of them.

Usage: fault_ends.py FOLDER_OF_THE_TESTS ADAPTER MOMENT...  Prints one JSON line per signal and moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings

warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])

import fault_runs as matrix  # noqa: E402
import psutil  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SENT_AFTER_S, GONE_WITHIN_S = 0.1, 12.0


def train(name: str, which: signal.Signals, moment: str, report: int) -> None:
    """Train until the signal, which comes while the loop waits for the item of that moment."""
    os.setpgid(0, 0)
    # A job that a shell began in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    adapter, (epoch, item) = matrix.ADAPTERS[name], matrix.MOMENTS[moment]
    matrix.PLAN.update(at=(epoch, item), what="slow")

    def send() -> None:
        os.write(report, (json.dumps([p.pid for p in psutil.Process().children(recursive=True)]) + "\n").encode())
        if which is signal.SIGINT:  # a terminal tells the whole group
            os.killpg(0, which)
        else:
            os.kill(os.getpid(), which)

    source, draw = adapter.make(), random.Random(1)
    pipeline = matrix.find(source, **adapter.options).pipeline
    pipeline.prepare()
    source = getattr(pipeline, "dataset", source)
    delivered: list[list[int]] = []
    ended = ""
    try:
        for current in range(matrix.EPOCHS):
            matrix.EPOCH.value = current
            iterator = pipeline.adopt(iter(source))
            delivered.append([])
            for number in range(matrix.ITEMS):
                if (current, number) == (epoch, item):
                    threading.Timer(SENT_AFTER_S, send).start()
                delivered[-1].append(int(next(iterator)))
                pipeline.resize({s.name: draw.randint(3, min(6, s.high)) for s in pipeline.stages()})
            del iterator
    except KeyboardInterrupt:
        ended = "KeyboardInterrupt"
    finally:
        pipeline.close()
    seen = {"delivered": delivered, "ended": ended, "children": len(matrix.leftovers()[0])}
    os.write(report, (json.dumps(seen) + "\n").encode())


def cell(name: str, which: signal.Signals, moment: str) -> dict[str, object]:
    """Fork a training, wait for its end and for that of all its children."""
    reading, writing = os.pipe()
    begin_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            train(name, which, moment, writing)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = [json.loads(line) for line in iter(lines.readline, "")]
    _, status = os.waitpid(pid, 0)
    ended_s = time.monotonic()
    children = told[0] if told else []
    while (alive := [child for child in children if _lives(child)]) and time.monotonic() < ended_s + GONE_WITHIN_S:
        time.sleep(0.05)
    for child in alive:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    return {
        "signal": which.name,
        "moment": moment,
        "took_s": ended_s - begin_s,
        "status": status,
        "children": len(children),
        "left": len(alive),
        "seen": told[1] if len(told) > 1 else None,
    }


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    for which in SIGNALS:
        for moment in sys.argv[3:]:
            print(json.dumps(cell(sys.argv[2], which, moment)), flush=True)
