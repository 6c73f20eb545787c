"""Small messages between the training process and its bridge, each with the descriptors that go with it."""

from __future__ import annotations

import os
import pickle
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

__all__ = ["Channel"]

MESSAGE_BYTES = 1 << 18  # what a socket of Linux's takes at once is less
DESCRIPTORS = 4


class Channel:
    """One end of a socket that keeps messages whole.

    Args:
        end: of a pair of `SOCK_SEQPACKET`.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one message.

        Args:
            descriptors: the other side gets copies of them.

        Raises:
            OSError: the other side is gone, or does not read any more.
        """
        socket.send_fds(self._end, [pickle.dumps(message)], list(descriptors), socket.MSG_DONTWAIT)

    def receive(self, timeout_s: float) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors; None where none comes in time.

        Raises:
            EOFError: the other side is gone.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(1000.0 * timeout_s):
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, MESSAGE_BYTES, DESCRIPTORS)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return pickle.loads(data), descriptors

    def close(self) -> None:
        """Have the other side see the end, also where a process that was forked holds a copy of this one."""
        with suppress(OSError):  # it is gone
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
