"""Runs that are computed once: named by what they depend on, stored whole or not at all, resumed when killed."""

import argparse
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import joblib
import pandas as pd
import safetensors.torch as st
import torch
from joblib.parallel import get_active_backend
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm

from oa_utils.files import (
    BadFile,
    budget,
    fresh_since,
    plain,
    published,
    read_json,
    sha256,
    slug,
    store,
    threads,
    unplain,
    write_bytes,
    write_json,
)

try:
    import psutil
except ImportError:
    psutil = None

PASS_TOKENS = 2048
PARTS = ("search_", "circuit_gaps")  # single circuits: the tables of `fronts` and `null_circuits` hold them
Numbers, Tensors = dict[str, Any], dict[str, Tensor]


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def rng_state(generator: torch.Generator) -> Tensor:
    """What a snapshot must hold so that `generator.set_state` goes on with the same draws."""
    return generator.get_state()


def _to_bytes(tensors: Tensors | None, head: dict[str, str] | None = None) -> bytes:
    own = {k: torch.as_tensor(v).detach().to("cpu", copy=True).contiguous() for k, v in (tensors or {}).items()}
    return st.save(own, head)


class Snapshots:
    """Where a long computation leaves its state, so that it goes on from there when it was killed."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity, self.earlier = path, identity, 0.0
        self.began = self.saved = time.monotonic()

    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.began

    def due(self, every_seconds: float = 20) -> bool:
        return time.monotonic() - self.saved >= every_seconds

    def save(self, numbers: Numbers, tensors: Tensors | None = None) -> None:
        """Numbers travel in the tensors' header: one file, replaced at once, never half old and half new."""
        head = {"state": json.dumps(plain({"numbers": numbers, "seconds": self.seconds()}), allow_nan=False)}
        head["sha256"] = sha256([self.identity, head["state"], sha256(_to_bytes(tensors))])
        write_bytes(self.path, _to_bytes(tensors, head))
        self.saved = time.monotonic()

    def load(self) -> tuple[Numbers, Tensors] | None:
        """The state to go on from, or None for a start."""
        if not self.path.exists() or self.path.stat().st_mtime < fresh_since():
            return None
        try:
            data = self.path.read_bytes()
            tensors = st.load(data)
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            if head["sha256"] != sha256([self.identity, head["state"], sha256(_to_bytes(tensors))]):
                raise BadFile("changed after it was written, or of another run")
        except (SafetensorError, ValueError, KeyError) as error:
            warnings.warn(f"snapshot {self.path} is not usable ({error}): starting anew", stacklevel=3)
            return None
        state = unplain(json.loads(head["state"]))
        self.earlier = state["seconds"]
        return state["numbers"], tensors


@dataclass(frozen=True)
class Result:
    numbers: Numbers
    tensors: Tensors
    settings: Numbers
    seconds: float
    path: Path

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(_rows(self.numbers))


def _rows(numbers: Numbers) -> list[Numbers]:
    """The table in a result: its `rows`, or one row of its scalars."""
    return numbers.get("rows", [{k: v for k, v in numbers.items() if not isinstance(v, list | dict)}])


def _load(path: Path, identity: str) -> Result | None:
    """The stored result; None where there is none that counts, BadFile where it is not what it should be."""
    if not path.exists() or path.stat().st_mtime < fresh_since():
        return None
    record, beside = read_json(path), path.with_suffix(".safetensors")
    if record.get("identity") != identity:
        raise BadFile(f"{path} belongs to another run (experiment, settings, model, task or version differ)")
    data = beside.read_bytes() if record["tensors"] and beside.exists() else b""
    if record["tensors"] and record["tensors"] != sha256(data):
        raise BadFile(f"{beside} is {'not the one its JSON names' if data else 'missing'}")
    if record["budget"] == "test" != budget():
        return None
    return Result(record["numbers"], st.load(data) if data else {}, record["settings"], record["seconds"], path)


def run(
    experiment: str, settings: Any, compute: Callable, *, model=None, task=None, version: int = 1, key: str = ""
) -> Result:
    """The result of these settings on this model and task: loaded if it is there and sound, computed otherwise."""
    on, name = (None, "none") if model is None else (model.fingerprint, model.name)
    prints = {"model_fingerprint": on, "task_fingerprint": None if task is None else task.fingerprint}
    inputs = {"experiment": experiment, "settings": asdict(settings), **prints, "version": version}
    identity = sha256({**inputs, "kind": type(settings).__name__})
    own = {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}
    key = key or "_".join(f"{k}={v}" for k, v in own.items() if isinstance(v, str | int | float)) or "default"
    path = store() / slug(name) / slug(experiment) / f"{slug(key)}-{identity[:12]}.json"
    try:
        if stored := _load(path, identity):
            return stored
    except BadFile as error:
        warnings.warn(f"{error}: computing it again", stacklevel=2)
    snapshots = Snapshots(path.with_suffix(".snapshot"), identity)
    output = compute(snapshots)
    numbers, tensors = output if isinstance(output, tuple) else (output, None)
    about = {"key": key, "seed": getattr(settings, "seed", None), "model": name, "seconds": snapshots.seconds()}
    if data := _to_bytes(tensors) if tensors else None:
        write_bytes(path.with_suffix(".safetensors"), data)
    tail = {"identity": identity, "tensors": data and sha256(data), "numbers": numbers}
    write_json(path, {**inputs, **about, **tail})
    snapshots.path.unlink(missing_ok=True)
    return _load(path, identity)


def quiet() -> bool:
    return bool(os.environ.get("OA_QUIET")) or budget() == "test" or "PYTEST_CURRENT_TEST" in os.environ


def progress(iterable: Iterable | None = None, total: int | None = None, desc: str = "") -> tqdm:
    return tqdm(iterable, total=total, desc=desc, leave=False, disable=quiet())


def announce(text: str) -> None:
    """One line for whoever waits: to the log where one is set up, else above the progress bars."""
    log = logging.getLogger("oa_utils")
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif not quiet():
        tqdm.write(text, file=sys.stderr)


def _in_worker(fn: Callable, item: Any, parent: int, environment: dict[str, str], n_threads: int) -> Any:
    """With the caller's settings, a share of the cores, and the item's name on what goes wrong."""
    if os.getpid() != parent:
        os.environ.update(environment)
    before = threads()
    torch.set_num_threads(n_threads)
    try:
        return fn(item)
    except Exception as error:
        raise RuntimeError(f"{repr(item)[:200]} failed: {type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(before)


def parallel(fn: Callable, items: Iterable, desc: str = "") -> list:
    """fn of each item, in order: on `OA_JOBS` processes (else one a core; for tests none), or where joblib is told to."""
    items = list(items)
    backend, jobs = get_active_backend()
    jobs = joblib.effective_n_jobs(jobs or int(os.environ.get("OA_JOBS") or (1 if budget() == "test" else joblib.cpu_count())))
    n_threads = max(1, min(threads(), joblib.cpu_count() // jobs))
    env = {"OA_STORE": str(store().resolve()), "OA_BUDGET": budget(), "OA_QUIET": "1", "FRESH": str(fresh_since())}
    calls = (joblib.delayed(_in_worker)(fn, item, os.getpid(), env, n_threads) for item in items)
    kind = "generator" if backend.supports_return_generator else "list"
    return list(progress(joblib.Parallel(n_jobs=jobs, return_as=kind)(calls), total=len(items), desc=desc))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.2g} s"


def estimate(step_seconds: float, steps: int, memory_bytes: float | None = None) -> str:
    """What a run will cost, as a sentence to announce before it starts."""
    memory = "" if memory_bytes is None else f", {memory_bytes / 1e9:.1f} GB"
    return f"about {_duration(step_seconds * steps)} ({steps:,} steps of {_duration(step_seconds)}){memory}"


def _free_bytes() -> float:
    if psutil:
        return psutil.virtual_memory().available
    found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text() if sys.platform == "linux" else "")
    return int(found[1]) * 1024 if found else 4e9


def micro_batch(n: int, bytes_per_item: float, limit_bytes: float | None = None) -> int:
    """How many of n items to compute at once so that they fit into half of the free memory."""
    limit = _free_bytes() / 2 if limit_bytes is None else limit_bytes
    return max(1, min(n, int(limit // bytes_per_item)))


def in_a_pass(model: Any, length: int) -> int:
    """How many rows of so many tokens to run at once: on a CPU more would fall out of its caches."""
    return max(1, PASS_TOKENS * (1 if model.device.type == "cpu" else 32) // length)


def results(model_name: str, experiment: str) -> pd.DataFrame:
    """Published results (of the newest version) as one table, settings beside numbers, without running anything."""
    folder = published() / slug(model_name) / slug(experiment)
    records = {path.name: read_json(path) for path in sorted(folder.glob("*.json"))}
    if not records:
        there = sorted({str(path.parent.relative_to(published())) for path in published().glob("*/*/*.json")})
        raise FileNotFoundError(f"no published results in {folder}; there are: {', '.join(there) or 'none yet'}")
    newest = max(record["version"] for record in records.values())
    new = {name: record for name, record in records.items() if record["version"] == newest}
    table = [(name, record["settings"], row) for name, record in new.items() for row in _rows(record["numbers"])]
    taken = {column for _, _, row in table for column in row}
    own = [{f"settings.{k}" if k in taken else k: v for k, v in settings.items()} for _, settings, _ in table]
    return pd.DataFrame([{"file": name, **extra, **row} for (name, _, row), extra in zip(table, own, strict=True)])


def publish(model: str | None = None) -> list[Path]:
    """Copies finished tables to `data/results`, never those of a test; tensors and parts of other tables stay in the store."""
    copied = []
    for path in sorted(store().glob(f"{slug(model) if model else '*'}/*/*.json")):
        try:
            record = read_json(path)
        except BadFile as error:
            warnings.warn(f"{error}: not published", stacklevel=2)
            continue
        if record["budget"] != "test" and any(_rows(record["numbers"])) and not path.parent.name.startswith(PARTS):
            copied.append(published() / path.relative_to(store()))
            write_bytes(copied[-1], path.read_bytes())
    return copied


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oa_utils.runs", description=publish.__doc__)
    parser.add_argument("command", choices=["publish"])
    parser.add_argument("--model", help="only this model's results")
    copied = publish(parser.parse_args(arguments).model)
    print(*copied, f"{len(copied)} files published", sep="\n")


if __name__ == "__main__":
    main()
