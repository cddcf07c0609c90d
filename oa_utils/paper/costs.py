"""What the cells of a notebook cost, so that the next run can tell how long it will take.

Costs lie in the store beside the lists of used results and are published with them. They are
seconds of the machine that ran the notebook; `speed` carries them over to another one.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from oa_utils import machine, store
from oa_utils.paper import publishing

SHAPE = (512, 576, 4096)  # of the matrix product whose seconds are a machine's speed


def speed(repeats: int = 9) -> float:
    """Seconds that this machine takes for a fixed piece of arithmetic."""
    rows, width, columns = SHAPE
    left = torch.ones(rows, width)
    right = torch.ones(width, columns)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def cost_file(folder: Path, model_name: str, stem: str, budget: str) -> Path:
    return folder / store.slug(model_name) / publishing.USED / f"{stem}.{budget}.costs"


def known(model_name: str, stem: str, budget: str, speed_here: float) -> dict[str, float]:
    """Seconds that each cell, by the hash of its code, will take on this machine: as it was run
    here, else as it was published; empty where it never was."""
    for folder in (store.folder("default"), store.published()):
        try:
            record = store.read_json(cost_file(folder, model_name, stem, budget))
            scale = speed_here / record["speed"]
            return {cell: scale * seconds for cell, seconds in record["cells"].items()}
        except (store.BadFile, KeyError, TypeError, AttributeError):
            continue
    return {}


class Clock:
    """Times the cells of one notebook and tells how much is left of it."""

    def __init__(self, model_name: str, stem: str, budget: str, cells: Sequence[str]):
        self.speed = speed()
        self.cells = [store.sha256(code.encode())[:12] for code in cells]
        self.expected = known(model_name, stem, budget, self.speed)
        self.path = cost_file(store.folder("default"), model_name, stem, budget)
        self.taken: list[float] = []  # seconds of the cells that ran
        self.began = time.monotonic()

    def cell_done(self) -> None:
        now = time.monotonic()
        self.taken.append(now - self.began)
        self.began = now

    def left(self) -> float | None:
        """Seconds until the notebook is done, None where nobody ran it yet."""
        if not self.expected:
            return None
        waiting = [self.expected.get(cell, 0.0) for cell in self.cells[len(self.taken) :]]
        running = waiting[0] if waiting else 0.0
        elapsed = time.monotonic() - self.began
        return sum(waiting[1:]) + max(0.0, running - elapsed)

    def save(self, fresh: bool = False) -> None:
        """Keeps what the cells cost: in a run that could load nothing, what they took; else one
        whose results were loaded costs what computing them did before."""
        pairs = zip(self.cells, self.taken, strict=True)
        before = {} if fresh else self.expected
        seconds = {cell: max(taken, before.get(cell, 0.0)) for cell, taken in pairs}
        content = {"speed": self.speed, "cells": {k: round(v, 1) for k, v in seconds.items()}}
        store.write_bytes(self.path, store.canonical(content) + b"\n")


@contextmanager
def told(clock: Clock, name: str) -> Iterator[tqdm]:
    """A bar over a notebook's cells that says how much time is left, once a second."""
    words = "{desc}: {n_fmt}/{total_fmt} cells [{elapsed}{postfix}]"
    bar = tqdm(total=len(clock.cells), desc=name, bar_format=words, leave=False, disable=None)
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1):
            left = clock.left()
            if left is not None:
                bar.set_postfix_str(f"about {machine.duration(left)} left", refresh=False)
            bar.refresh()

    thread = threading.Thread(target=tick, daemon=True)
    if not bar.disable:
        thread.start()
    try:
        yield bar
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        bar.close()
