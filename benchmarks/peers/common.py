"""What both sides of a comparison share; it runs under a peer's python too, so it imports
nothing of ours."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

torch.set_num_threads(1)


def medians(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of the processor, and what the last call gave; a first call warms up where
    there are more."""
    spent = []
    for _ in range(repeats + (repeats > 1)):
        began = time.process_time()
        answer = call()
        spent.append(time.process_time() - began)
    return float(np.median(spent[repeats > 1 :])), answer


def load_batch(folder: Path) -> dict[str, torch.Tensor]:
    with np.load(folder / "batch.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def load_gpt2(folder: Path):
    """The exported model, frozen, in evaluation mode."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder / "model").eval().requires_grad_(False)


def save(folder: Path, name: str, **arrays: torch.Tensor) -> None:
    values = {key: value.detach().numpy() for key, value in arrays.items()}
    np.savez(folder / f"{name}.npz", **values)


def load(folder: Path, name: str) -> dict[str, torch.Tensor]:
    with np.load(folder / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def peak_gb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def report(seconds: dict[str, float], **more: Any) -> None:
    """The last line that a side prints."""
    print(json.dumps({"seconds": seconds, "peak_gb": peak_gb(), **more}))


def arguments() -> tuple[Path, int]:
    """The folder with model and batch, and how often to repeat."""
    return Path(sys.argv[1]), int(sys.argv[2])
