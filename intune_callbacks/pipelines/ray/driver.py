"""The bridge's process as the training process sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from intune_callbacks.pipelines.ray.channel import Channel

__all__ = ["Driver"]

CLOSE_S = 4.0


class Driver:
    """A process that connects to a cluster, and does there what it is told.

    Args:
        address: of the cluster.

    Raises:
        OSError: no process could be started.
    """

    def __init__(self, address: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Channel(ours)
        path = [entry or os.getcwd() for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            f"from intune_callbacks.pipelines.ray.bridge import main; main({theirs.fileno()})"
        )
        with theirs:
            # In a session of its own: Ctrl+C in a terminal is not for it. Not by `multiprocessing`, which would run the
            # user's script in it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._channel.send({"address": address, "path": path, "directory": os.getcwd()})

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, *message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Tell it something; that it is gone is seen elsewhere."""
        with suppress(OSError):
            self._channel.send(message, descriptors)

    def receive(self, timeout_s: float) -> tuple[Any, list[int]] | None:
        """Return what it tells, None where it tells nothing in time.

        Raises:
            EOFError: it is gone.
        """
        found = self._channel.receive(timeout_s)
        if found is None and self._process.poll() is not None:
            raise EOFError  # another process may hold a copy of its end
        return found

    def exit_code(self, timeout_s: float) -> int | None:
        """Return its exit code once it has ended, None where it has not in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Have it end all its workers, and end."""
        self.send("close")
        if self.exit_code(CLOSE_S) is None:
            self._process.kill()
        self._close()

    def kill(self) -> None:
        """End it at once; the cluster ends what it leaves."""
        self._process.kill()
        self._close()

    def _close(self) -> None:
        self.exit_code(CLOSE_S)
        self._channel.close()
