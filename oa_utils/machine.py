"""The machine: how much to spend, how much fits at once, what runs side by side, and what whoever
waits is told."""

import functools
import logging
import math
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import joblib
import torch
from joblib.parallel import get_active_backend
from torch import Tensor
from tqdm.auto import tqdm

BUDGETS = ("test", "default", "paper")
SMALL = 10_000_000  # parameters: models below are small
# bytes that one computation may take at once: fixed, so that results do not depend on the day
MEMORY = 1.5e9
WORKER = 2 * MEMORY  # bytes of a worker: one computation, its model, the libraries
CONTROL_GROUP = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
PASS_TOKENS = 2048  # tokens that a CPU runs at once: more would fall out of its caches
Value = TypeVar("Value")


# ---- how much to spend


def budget(name: str | None = None) -> str:
    """How much to spend: the budget that is named, else `OA_BUDGET`, else `default`."""
    value = name or os.environ.get("OA_BUDGET") or "default"
    if value not in BUDGETS:
        raise ValueError(f"budget {value!r} is not one of {', '.join(BUDGETS)}")
    return value


def choose(model: Any, *, test: Value, small: Value, default: Value, paper: Value) -> Value:
    """What to spend on a model: by its budget and, at the default one, by its size (`small`: under
    ten million parameters)."""
    if model.budget == "default" and model.n_parameters < SMALL:
        return small
    return {"test": test, "default": default, "paper": paper}[model.budget]


# ---- how much fits at once


def micro_batch(n: int, bytes_per_item: float, limit_bytes: float = MEMORY) -> int:
    """How many of n items to compute at once so that they take no more than the limit."""
    return max(1, min(n, int(limit_bytes // bytes_per_item)))


def in_spans(n: int, size: int, compute: Callable[[slice], Value]) -> Iterator[Value]:
    """compute(span) of n items, at most `size` at once; where memory is refused, of the two halves
    of that span. So `compute` hands back what it found and adds to nothing (gradients:
    `torch.autograd.grad`)."""
    waiting = [slice(i, min(i + size, n)) for i in range(0, n, size)]
    while waiting:
        span = waiting.pop(0)
        try:
            value = compute(span)
        except (MemoryError, RuntimeError) as error:
            middle = (span.start + span.stop) // 2
            if middle == span.start or not is_out_of_memory(error):
                raise
            waiting[:0] = [slice(span.start, middle), slice(middle, span.stop)]
        else:
            yield value


def accumulate(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to what the parameters have; one without a gradient stays as it is."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def or_none(compute: Callable[[], Value]) -> Value | None:
    """What can be done without where memory is refused."""
    try:
        return compute()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was refused; torch has a class of error for accelerators only."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error) or "DefaultCPUAllocator" in str(error)


def memory() -> float:
    """Bytes that this process and its workers may have: the machine's, or those of its control
    group."""
    limits = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if os.name == "posix" else []
    )
    for path in CONTROL_GROUP:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(limits, default=math.inf)


def rows_in_a_pass(model: Any, length: int) -> int:
    """How many rows of so many tokens to run at once."""
    return max(1, PASS_TOKENS * (1 if model.device.type == "cpu" else 32) // length)


def generator(seed: int) -> torch.Generator:
    """Random draws live on the CPU, so that they are the same on every device."""
    return torch.Generator("cpu").manual_seed(seed)


# ---- what whoever waits is told


def quiet() -> bool:
    return (
        bool(os.environ.get("OA_QUIET"))
        or budget() == "test"
        or "PYTEST_CURRENT_TEST" in os.environ
    )


def progress(iterable: Iterable | None = None, total: int | None = None, desc: str = "") -> tqdm:
    return tqdm(iterable, total=total, desc=desc, leave=False, disable=quiet())


def announce(text: str) -> None:
    """One line for whoever waits: to the log where one is set up, else above the progress bars."""
    log = logging.getLogger("oa_utils")
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif not quiet():
        tqdm.write(text, file=sys.stderr)


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.2g} s"


def estimate(step_seconds: float, steps: int, unit: str = "steps") -> str:
    """What a run will cost, as a sentence to announce before it starts."""
    cost = f"{steps:,} {unit} of {duration(step_seconds)}"
    return f"about {duration(step_seconds * steps)} ({cost})"


# ---- what runs side by side


def jobs(on: str = "cpu") -> int:
    """Processes to use: as joblib is told, else `OA_JOBS`, else one a core (fewer where memory is
    short: what one computes at once never depends on it); at the test budget, and where they would
    share an accelerator, one."""
    _, told = get_active_backend()
    fitting = max(1, int(min(memory() / WORKER, joblib.cpu_count())))
    usual = 1 if budget() == "test" or on != "cpu" else fitting
    asked = os.environ.get("OA_JOBS")
    n_jobs = joblib.effective_n_jobs(told or int(asked or usual))
    if asked and not told and n_jobs > max(1, memory() / WORKER):
        _warn_of_memory(n_jobs, memory())
    return n_jobs


@functools.cache
def _warn_of_memory(n_jobs: int, limit: float) -> None:
    """Once: a control group ends the whole run without a word where it takes more."""
    warnings.warn(
        f"OA_JOBS asks for {n_jobs} processes, which may take {n_jobs * WORKER / 1e9:.1f} GB, but "
        f"there are {limit / 1e9:.1f} GB for all of them; without OA_JOBS there are as many as fit",
        stacklevel=3,
    )


def parallel(function: Callable[[Any], Value], items: Iterable, desc: str = "") -> list[Value]:
    """function(item) of each item, in order, in processes that have the caller's settings and a
    share of its threads; a single process is this one. joblib's `parallel_config` sends them
    elsewhere, for example to Dask."""
    items = list(items)
    backend, _ = get_active_backend()
    n_jobs = jobs()
    n_threads = max(1, min(torch.get_num_threads(), joblib.cpu_count() // n_jobs))
    settings = {name: value for name, value in os.environ.items() if name.startswith("OA_")}
    caller = (socket.gethostname(), os.getpid())
    calls = (
        joblib.delayed(_in_worker)(function, item, caller, settings, n_threads) for item in items
    )
    kind = "generator" if backend.supports_return_generator else "list"
    results = joblib.Parallel(n_jobs=n_jobs, return_as=kind)(calls)
    return list(progress(results, total=len(items), desc=desc))


@functools.cache
def end_with_parent(parent: int) -> None:
    """A worker whose parent was killed would compute on for nobody: it looks once a second."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_worker(
    function: Callable, item: Any, caller: tuple[str, int], settings: dict[str, str], n_threads: int
) -> Any:
    """One call, with the caller's settings and none of an earlier one, and with the item's name on
    what goes wrong."""
    host = socket.gethostname()
    if (host, os.getpid()) != caller:
        for name in os.environ.get("OA_GIVEN", "").split():
            os.environ.pop(name, None)
        os.environ.update(settings | {"OA_QUIET": "1", "OA_GIVEN": " ".join(settings)})
        if (host, os.getppid()) == caller:
            end_with_parent(os.getppid())
    threads_before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        return function(item)
    except Exception as error:
        name = repr(item)[:200]
        raise RuntimeError(f"{name} failed: {type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(threads_before)
