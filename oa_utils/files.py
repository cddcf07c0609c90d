"""Where results live and how they are written: whole or not at all, strict JSON, sealed by a hash."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parent.parent
STARTED = time.time()
BUDGETS = ("test", "default", "paper")
FORMAT = "oa-run-1"
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PACKAGES = ("torch", "transformers", "transformer_lens", "numpy")


class BadFile(ValueError):
    """A file that must not be used; the message names it and says why."""


def budget() -> str:
    """How much to spend: `OA_BUDGET`, one of test, default, paper."""
    if (value := os.environ.get("OA_BUDGET") or "default") not in BUDGETS:
        raise ValueError(f"OA_BUDGET={value!r} is not one of {', '.join(BUDGETS)}")
    return value


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Goes when the process ends: test runs leave nothing behind."""
    return tempfile.TemporaryDirectory(prefix="oa-test-")


def store() -> Path:
    """Where results are kept: `OA_STORE`, else `.oa` in the repository, or a temporary folder for the test budget."""
    return Path(os.environ.get("OA_STORE") or (scratch().name if budget() == "test" else REPO / ".oa"))


@contextlib.contextmanager
def empty_store() -> Iterator[None]:
    """For a while nothing is stored: whatever is asked for is computed anew, and nothing of it is kept."""
    with tempfile.TemporaryDirectory() as folder:
        before, os.environ["OA_STORE"] = os.environ.get("OA_STORE"), folder
        try:
            yield
        finally:
            os.environ.pop("OA_STORE") if before is None else os.environ.update(OA_STORE=before)


def published() -> Path:
    return REPO / "data" / "results"


def threads() -> int:
    """Threads torch computes with; the same seed gives the same numbers only for the same count."""
    return torch.get_num_threads()


def fresh_since() -> float:
    """Older files are ignored: with `FRESH=1` than this process, with `FRESH=<unix time>` than that moment."""
    value = float(os.environ.get("FRESH") or 0)
    return STARTED if 0 < value < 1e9 else value


def slug(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.")[:80].rstrip("-.") or "none"


def plain(value: Any) -> Any:
    """JSON form of numbers and arrays; non-finite floats become strings, since strict JSON has none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str) and value.lstrip("\\") in NON_FINITE:
        return "\\" + value
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def unplain(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        return {key: unplain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if isinstance(value, str):
        return NON_FINITE[value] if value in NON_FINITE else value[value.lstrip("\\") in NON_FINITE :]
    return value


def sha256(content: Any) -> str:
    """Hash of bytes, or of the canonical JSON of anything else."""
    if not isinstance(content, bytes):
        content = json.dumps(plain(content), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(content).hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def write_json(path: Path, record: dict[str, Any]) -> None:
    """One line a field, with the circumstances it was made under, sealed by a hash of everything in it."""
    versions = {"python": sys.version.split()[0], **{name: metadata.version(name) for name in PACKAGES}}
    record = plain({"format": FORMAT, "budget": budget(), "threads": threads(), "versions": versions, **record})
    record["sha256"] = sha256(record)
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items()]
    write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A record as `write_json` wrote it; anything else is a BadFile."""
    try:
        record = json.loads(path.read_bytes(), parse_constant=int)  # int("NaN") fails, as strict JSON must
    except ValueError as error:
        raise BadFile(f"{path} is not whole, valid JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise BadFile(f"{path} is foreign: it is not in this project's format {FORMAT!r}")
    if record.pop("sha256", None) != sha256(record):
        raise BadFile(f"{path} was changed after it was written: its hash does not match its content")
    return unplain(record)
