"""A computation that counts, and the model, task and settings of its runs, for tests of what is
stored."""

from dataclasses import dataclass
from types import SimpleNamespace

from oa_utils import store

MODEL = SimpleNamespace(name="org/tiny model", fingerprint="m0", budget="default")
TESTED = SimpleNamespace(name="org/tiny model", fingerprint="m0", budget="test")
TASK = SimpleNamespace(fingerprint="t0", name="ioi")


@dataclass(frozen=True)
class Settings:
    lam: float = 1e-3
    steps: int = 5
    seed: int = 0


class Counter:
    """A computation that knows how often it was called."""

    def __init__(self, numbers=None, tensors=None):
        self.calls = 0
        self.numbers = numbers or {"gap": 0.5}
        self.tensors = tensors

    def __call__(self, snapshots):
        self.calls += 1
        return (self.numbers, self.tensors) if self.tensors else self.numbers


def run(compute, settings=None, **options):
    options = {"model": MODEL, "task": TASK} | options
    return store.run("ex", settings or Settings(), compute, **options)


def among_real_ones(tested):
    """A test result put where results of the default budget are."""
    path = store.folder("default") / "/".join(tested.parts[-3:])
    store.write_bytes(path, tested.read_bytes())
    return path
