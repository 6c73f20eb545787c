"""What a stage works on, and with."""

from __future__ import annotations

import time

import numpy as np


class Boom(Exception):
    pass


def work(x: int):
    if x == -1:
        raise Boom
    if x % 23 == 3:
        time.sleep(0.0005)
    # Small results, results carried out of band, and nested ones.
    return {"x": np.full(2000, x), "y": [x]} if x % 3 == 0 else x


def plain(result) -> int:
    return int(result["x"][7]) if isinstance(result, dict) else result


def counted(limit: int, taken: list):
    for i in range(limit):
        taken.append(i)
        yield i
