"""Runs that are computed once: named by what they depend on, stored whole or not at all, resumed
when killed.

A run is a frozen settings object, a model, perhaps a task, and `inputs`: whatever else its numbers
depend on. Its result is one JSON file, sealed by a hash, and one safetensors file where tensors
matter. The store is `.oa` in the repository (or `OA_STORE`, or the user's cache where the package
was installed without its repository). What is published is in `data/results` (put there by
`paper/publishing.py`), from which `results` reads it.
"""

import functools
import hashlib
import inspect
import json
import math
import os
import re
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from oa_utils import machine

FORMAT = "oa-run-2"
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PACKAGES = ("torch", "transformers", "transformer_lens", "numpy")
DEEPEST = 50  # levels of nesting that a file of ours never has
SNAPSHOT_SECONDS = 20
STALE_SECONDS = {".*.tmp": 3600, "*.snapshot": 60 * 24 * 3600}  # left by whom nobody goes on for

Numbers = dict[str, Any]
Tensors = dict[str, Tensor]


class BadFile(ValueError):
    """A file that must not be used; the message names it and says why."""


# ---- where things are


def repository() -> Path | None:
    """The checkout that this package is part of, or None where it was installed by itself."""
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / "pyproject.toml").exists() else None


def data_folder() -> Path:
    """What comes with the project: `data` in the repository, or the copy in the installed
    package."""
    root = repository()
    return root / "data" if root else Path(__file__).resolve().parent / "data"


def cache_folder() -> Path:
    """Where downloads are kept: `$OA_CACHE`, else the user's cache folder."""
    usual = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    default = Path(usual) if usual else Path.home() / ".cache"
    return Path(os.environ.get("OA_CACHE") or default / "optimal-ablation")


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Goes when the process ends: test runs leave nothing behind."""
    return tempfile.TemporaryDirectory(prefix="oa-test-")


def folder(budget: str | None = None) -> Path:
    """Where results are kept: `OA_STORE`, else the project's own store; those of the test budget in
    `test` below `OA_STORE`, else in a temporary folder."""
    is_test = machine.budget(budget) == "test"
    if given := os.environ.get("OA_STORE"):
        return Path(given) / "test" if is_test else Path(given)
    if is_test:
        return Path(scratch().name)
    root = repository()
    return root / ".oa" if root else cache_folder() / "store"


def published() -> Path:
    return data_folder() / "results"


def slug(text: str) -> str:
    """A text as part of a file's name."""
    words = re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII)
    return words.strip("-.")[:80].rstrip("-.") or "none"


# ---- JSON


def plain(value: Any) -> Any:
    """JSON form of numbers and arrays; non-finite floats become strings, since strict JSON has
    none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str) and value.lstrip("\\") in NON_FINITE:
        return "\\" + value
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def unplain(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        return {key: unplain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if isinstance(value, str):
        return NON_FINITE[value] if value in NON_FINITE else _without_mark(value)
    return value


def _without_mark(text: str) -> str:
    return text[1:] if text.startswith("\\") and text.lstrip("\\") in NON_FINITE else text


def canonical(content: Any) -> bytes:
    text = json.dumps(plain(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def sha256(content: Any) -> str:
    """Hash of bytes, or of the canonical JSON of anything else."""
    data = content if isinstance(content, bytes) else canonical(content)
    return hashlib.sha256(data).hexdigest()


def fingerprint(*parts: Any) -> str:
    """A short hash of tensors and of anything that JSON can say: what a run depends on, in its
    name."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            value = part.detach().cpu().contiguous()
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(canonical(part))
        digest.update(b"|")
    return digest.hexdigest()[:16]


def write_bytes(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Removes what was left behind long ago: by writers that were killed, by runs that nobody
    started again."""
    for pattern, seconds in STALE_SECONDS.items():
        for left in folder.glob(pattern):
            try:
                if time.time() - left.stat().st_mtime > seconds:
                    left.unlink()
            except OSError:  # another process was faster
                continue


def read_bytes(path: Path) -> bytes:
    """The content of an ordinary file; a folder, a pipe or a file that cannot be read is a
    BadFile."""
    if not path.is_file():
        raise BadFile(f"{path} is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error})") from error


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers can depend on."""
    packages = {name: metadata.version(name) for name in PACKAGES}
    return {"python": sys.version.split()[0], **packages}


def write_record(path: Path, record: Numbers, budget: str | None = None) -> None:
    """One line a field, with the circumstances it was made under, sealed by a hash of everything in
    it.

    The number of threads is a circumstance, not part of a name: sums in another order move the last
    digits. Measured once on tiny (IOI, 48 prompts), two threads for one: gaps of components moved
    by at most 7e-6 nats, 0.5 % of a standard error; UGS of 12 steps kept the same edges under both
    OA and CF, and their gaps moved by at most 6e-7.
    """
    circumstances = {
        "format": FORMAT,
        "budget": machine.budget(budget),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    sealed = plain({**circumstances, **record})
    sealed["sha256"] = sha256(sealed)
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in sealed.items()
    ]
    write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_json(path: Path) -> Any:
    """What a strict JSON file says; anything else, or one nested too deeply, is a BadFile."""
    data = read_bytes(path)
    if _depth(data) > DEEPEST:
        raise BadFile(f"{path} is foreign: no file of this project is nested so deeply")
    try:
        return json.loads(data, parse_constant=int)  # int("NaN") fails, as strict JSON must
    except ValueError as error:
        raise BadFile(f"{path} is not whole, valid JSON ({error})") from error


def read_record(path: Path) -> Numbers:
    """A record as `write_record` wrote it; anything else is a BadFile."""
    record = read_json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise BadFile(f"{path} is foreign: it is not in this project's format {FORMAT!r}")
    if record.pop("sha256", None) != sha256(record):
        raise BadFile(f"{path} was changed after it was written: its hash does not match")
    return unplain(record)


def _depth(data: bytes) -> int:
    """How deeply brackets open at most; those inside strings count too, which does no harm here."""
    depth = deepest = 0
    for byte in re.findall(rb"[\[\]{}]", data):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


# ---- settings


def with_settings(function: Callable) -> Callable:
    """Lets a function whose last parameter is `settings: SomeSettings` take the fields of that
    class as keywords.

    `oa.ugs(masked, task, lam=1e-3)` calls `ugs(masked, task, UGSSettings(lam=1e-3))`; the signature
    shows every field.
    """
    signature = inspect.signature(function)
    kind = typing.get_type_hints(function)["settings"]
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    options = list(inspect.signature(kind).parameters.values())
    shown = signature.replace(parameters=sorted([*own, *options], key=lambda p: p.kind))

    def bound(*args, **kwargs) -> dict[str, Any]:
        given = shown.bind(*args, **kwargs).arguments
        settings = kind(**{p.name: given.pop(p.name) for p in options if p.name in given})
        return {**given, "settings": settings}

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(**bound(*args, **kwargs))

    call.__signature__ = shown
    call.check = bound
    return call


def check_call(function: Callable, *args: Any, **kwargs: Any) -> None:
    """Raises what a call with these arguments would raise about them, without running it."""
    if hasattr(function, "check"):
        function.check(*args, **kwargs)
    else:
        inspect.signature(function).bind(*args, **kwargs)


def frozen(value: Any) -> Any:
    """Lists as tuples, so that settings that came from a notebook or from JSON can be compared and
    hashed."""
    if isinstance(value, list | tuple | range):
        return tuple(frozen(item) for item in value)
    return value


def at_least(least: float, **values: float) -> None:
    """Refuses settings below what makes sense."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least:g}, got {value}")


# ---- tensors


def _to_bytes(tensors: Tensors, head: dict[str, str] | None = None) -> bytes:
    whole = {
        name: torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
        for name, value in tensors.items()
    }
    return safetensors.torch.save(whole, head)


def write_sealed(path: Path, head: Numbers, tensors: Tensors) -> None:
    """One safetensors file with numbers in its header, sealed by a hash of both."""
    text = json.dumps(plain(head), allow_nan=False)
    seal = sha256([text, sha256(_to_bytes(tensors))])
    write_bytes(path, _to_bytes(tensors, {"head": text, "sha256": seal}))


def read_sealed(path: Path) -> tuple[Numbers, Tensors]:
    """What `write_sealed` wrote; anything else is a BadFile."""
    data = read_bytes(path)
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        text = header["head"]
        seal = header["sha256"]
        head = unplain(json.loads(text))
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not a file that oa_utils wrote ({error})") from error
    if seal != sha256([text, sha256(_to_bytes(tensors))]):
        raise BadFile(f"{path} was changed after it was written: its hash does not match")
    return head, tensors


# ---- snapshots


def _apart(state: Any, tensors: Tensors) -> Any:
    """A nested state with its tensors taken out, each left as a reference to where it is in
    `tensors`."""
    if isinstance(state, Tensor):
        name = str(len(tensors))
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        return {"dict": [[key, _apart(value, tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        return [_apart(value, tensors) for value in state]
    return state


def _together(state: Any, tensors: Tensors) -> Any:
    """The inverse of `_apart`; tuples come back as lists."""
    if isinstance(state, list):
        return [_together(value, tensors) for value in state]
    if isinstance(state, dict) and "tensor" in state:
        return tensors[state["tensor"]]
    if isinstance(state, dict):
        return {key: _together(value, tensors) for key, value in state["dict"]}
    return state


class Snapshots:
    """Where a long computation leaves its state, so that it goes on from there when it was
    killed."""

    def __init__(self, path: Path, identity: str):
        self.path = path
        self.identity = identity
        self.seconds_before = 0.0
        self.save_seconds = 0.0  # that the last one took
        self.began = self.saved = time.monotonic()

    def seconds(self) -> float:
        """Time spent on the run, in this process and in those before it."""
        return self.seconds_before + time.monotonic() - self.began

    def due(self) -> bool:
        """Not so often that large states would take more than a twentieth of the time."""
        return time.monotonic() - self.saved >= max(SNAPSHOT_SECONDS, 20 * self.save_seconds)

    def save(self, state: Any) -> None:
        """Keeps nested lists and dictionaries of numbers, strings and tensors, such as an
        optimiser's state dict.

        One file, replaced at once, never half old and half new. A disk that is full stops nothing.
        """
        tensors: Tensors = {}
        head = {
            "identity": self.identity,
            "state": _apart(state, tensors),
            "seconds": self.seconds(),
        }
        began = time.monotonic()
        try:
            write_sealed(self.path, head, tensors)
        except OSError as error:
            warnings.warn(f"no snapshot could be written ({error}): going on", stacklevel=2)
        self.saved = time.monotonic()
        self.save_seconds = self.saved - began

    def save_when_due(self, state: Callable[[], Any]) -> None:
        if self.due():
            self.save(state())

    def load(self) -> Any:
        """The state to go on from, or None for a start."""
        if not self.path.exists():
            return None
        try:
            head, tensors = read_sealed(self.path)
            if head["identity"] != self.identity:
                raise BadFile(f"{self.path} is of another run")
            state = _together(head["state"], tensors)
            self.seconds_before = head["seconds"]
        except (BadFile, KeyError, TypeError, ValueError) as error:
            warnings.warn(f"a snapshot is not usable ({error}): starting anew", stacklevel=3)
            return None
        return state


# ---- runs


@dataclass(frozen=True)
class Result:
    numbers: Numbers
    tensors: Tensors
    seconds: float
    path: Path

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(table_rows(self.numbers))


def table_rows(numbers: Numbers) -> list[Numbers]:
    """The table in a result: its `rows`, or one row of its scalars."""
    if "rows" in numbers:
        return numbers["rows"]
    return [{key: value for key, value in numbers.items() if not isinstance(value, list | dict)}]


def run(
    experiment: str,
    settings: Any,
    compute: Callable[[Snapshots], Numbers | tuple[Numbers, Tensors]],
    *,
    model: Any,
    task: Any = None,
    inputs: Numbers | None = None,
    version: int = 1,
    key: str = "",
) -> Result:
    """The result of these settings and inputs on this model and task: loaded if it is there and
    sound, else computed.

    `version` stands beside the algorithm and is raised when its numbers change; `key` is the
    readable part of the name.
    """
    depends_on = {
        "experiment": experiment,
        "settings": asdict(settings) if settings is not None else {},
        "inputs": inputs or {},
        "model_fingerprint": model.fingerprint,
        "task_fingerprint": None if task is None else task.fingerprint,
        "version": version,
    }
    identity = sha256(depends_on)
    key = key or _key(settings)
    place = folder(model.budget) / slug(model.name) / slug(experiment)
    path = place / f"{slug(key)}-{identity[:12]}.json"
    try:
        if stored := load(path, identity, model.budget):
            path.with_suffix(".snapshot").unlink(missing_ok=True)  # of a process killed at its end
            note_use(path)
            return stored
    except BadFile as error:
        warnings.warn(f"{error}: computing it again", stacklevel=2)
    snapshots = Snapshots(path.with_suffix(".snapshot"), identity)
    output = compute(snapshots)
    numbers, tensors = output if isinstance(output, tuple) else (output, {})
    record = {
        **depends_on,
        "key": key,
        "seed": getattr(settings, "seed", None),
        "model": model.name,
        "task": getattr(task, "name", None),
        "seconds": snapshots.seconds(),
        "identity": identity,
    }
    note_use(path)
    return _keep(path, record, numbers, tensors, model.budget)


class NotStored(Exception):
    """What was asked for would have to be computed."""


def refuse(_: Snapshots) -> Numbers:
    raise NotStored


def is_stored(ask: Callable[..., Result], *asked: Any) -> bool:
    """Whether `ask(*asked, compute=…)`, which hands `compute` to `run`, needs no computing."""
    try:
        ask(*asked, compute=refuse)
    except NotStored:
        return False
    return True


def _key(settings: Any) -> str:
    """What differs from the defaults, in words."""
    if settings is None:
        return "default"
    given = {
        field.name: (getattr(settings, field.name), field.default) for field in fields(settings)
    }
    changed = {name: value for name, (value, default) in given.items() if value != default}
    words = [f"{k}={v}" for k, v in changed.items() if isinstance(v, str | int | float)]
    return "_".join(words) or "default"


def _keep(path: Path, record: Numbers, numbers: Numbers, tensors: Tensors, budget: str) -> Result:
    """Writes what was computed and hands it on; where it cannot be written, it is at least not lost
    to the caller."""
    data = _to_bytes(tensors) if tensors else None
    name = f"{path.stem}.{sha256(data)[:8]}.safetensors" if data else None
    record = {**record, "tensors": name, "tensors_sha256": data and sha256(data)}
    record["numbers"] = numbers
    for attempt in range(3):
        try:
            if data:
                write_bytes(path.with_name(name), data)
            write_record(path, record, budget)
            path.with_suffix(".snapshot").unlink(missing_ok=True)
            break
        except OSError as error:
            warnings.warn(f"{path} could not be written ({error}), try {attempt + 1}", stacklevel=3)
            time.sleep(attempt)
    else:
        warnings.warn(f"{path} is not stored: the result is in memory only", stacklevel=3)
    whole = unplain(plain(record))
    kept = safetensors.torch.load(data) if data else {}
    return Result(whole["numbers"], kept, whole["seconds"], path)


def note_use(path: Path) -> None:
    """Tells whoever runs a notebook (a line in the file `OA_USED`) which results it stands on, see
    `paper/publishing.py`."""
    if used := os.environ.get("OA_USED"):
        with open(used, "a") as file:
            file.write("/".join(path.parts[-3:]) + "\n")


def load(path: Path, identity: str, budget: str) -> Result | None:
    """The stored result; None where there is none that counts, BadFile where it is not what it
    should be."""
    if not path.exists():
        return None
    record = read_record(path)
    if record.get("identity") != identity:
        raise BadFile(f"{path} belongs to another run (settings, model, task or version differ)")
    tensors: Tensors = {}
    try:
        if record["tensors"]:
            beside = path.with_name(Path(record["tensors"]).name)
            data = read_bytes(beside)
            if sha256(data) != record["tensors_sha256"]:
                raise BadFile(f"{beside} is not the one its JSON names")
            tensors = safetensors.torch.load(data)
        if record["budget"] == "test" and budget != "test":
            return None
        if not isinstance(record["numbers"], dict):
            raise BadFile(f"{path} has no numbers")
        return Result(record["numbers"], tensors, record["seconds"], path)
    except (KeyError, TypeError, SafetensorError) as error:
        raise BadFile(f"{path} lacks what a result has ({error})") from error


# ---- published results


def records(model_name: str, experiment: str) -> dict[str, Numbers]:
    """Published records of the newest version, by file name."""
    place = published() / slug(model_name) / slug(experiment)
    by_name = {path.name: read_record(path) for path in sorted(place.glob("*.json"))}
    for name, record in by_name.items():
        if not isinstance(record.get("version"), int) or not isinstance(
            record.get("numbers"), dict
        ):
            raise BadFile(f"{place / name} is not a result: it has no version or no numbers")
    if not by_name:
        folders = {path.parent.relative_to(published()) for path in published().glob("*/*/*.json")}
        known = ", ".join(sorted(map(str, folders))) or "none yet"
        raise FileNotFoundError(f"no published results in {place}; there are: {known}")
    newest = max(record["version"] for record in by_name.values())
    return {name: record for name, record in by_name.items() if record["version"] == newest}


def results(model_name: str, experiment: str, mixed: bool = False) -> pd.DataFrame:
    """Published results as one table, settings and inputs beside numbers, without running anything.

    Results of several models of one name (the column `fingerprint` tells them apart) are refused
    unless `mixed`.
    """
    by_name = records(model_name, experiment)
    models = {record.get("model_fingerprint") for record in by_name.values()}
    if len(models) > 1 and not mixed:
        raise ValueError(
            f"'{model_name}' has published {experiment} of {len(models)} models of that name "
            f"(fingerprints {', '.join(map(str, models))}); mixed=True gives all of them"
        )
    rows = []
    for name, record in by_name.items():
        extra = {
            "file": name,
            "fingerprint": record.get("model_fingerprint"),
            "task": record.get("task"),
            **record.get("inputs", {}),
            **record["settings"],
        }
        for row in table_rows(record["numbers"]):
            clash = {f"settings.{k}" if k in row else k: v for k, v in extra.items()}
            rows.append({**clash, **row})
    return pd.DataFrame(rows)
