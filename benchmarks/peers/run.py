"""Beside what others use for the same job: auto-circuit, tuned-lens, TransformerLens's own
attribution patching. `make bench-peers`; writes benchmarks/peers.json.

The same random weights (exported as a folder) and the same batch for both sides, seconds of the
processor on one thread. auto-circuit and tuned-lens live in venvs of their own in the user's cache,
made on demand from the pinned files beside this one; what cannot be installed or run is left out,
with the reason. Asked for some of them, the rows of the others stay as they are.
"""

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Collection
from pathlib import Path

BESIDE = Path(__file__).resolve().parent
sys.path[:0] = [str(BESIDE.parent), str(BESIDE.parent.parent)]

import timing  # noqa: E402
import torch  # noqa: E402
from common import load, save  # noqa: E402

from oa_utils.models import wrap  # noqa: E402
from oa_utils.store import cache_folder  # noqa: E402

CLOSE = 1e-4  # where the graphs agree; gradients: of the largest
FASTER = 15  # times than auto-circuit's mask gradient: the goal
TORCH = "torch==2.13.0"  # first and alone, or pip may bring a build for GPUs


def peer_python(name: str) -> str:
    """The python of a peer's venv, which is made where it is not there."""
    folder = cache_folder() / "peers" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making a venv for {name} in the user's cache (some minutes, once)", flush=True)
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, TORCH], check=True, stderr=subprocess.DEVNULL)
        wanted = BESIDE / f"{name}.txt"
        subprocess.run([*install, TORCH, "-r", wanted], check=True, stderr=subprocess.DEVNULL)
        bare = BESIDE / f"{name}.no-deps.txt"
        if bare.exists():
            call = [*install, "--no-deps", "-r", bare]
            subprocess.run(call, check=True, stderr=subprocess.DEVNULL)
        (folder / "ready").touch()
    return str(python)


def side(name: str, folder: Path, repeats: int, *more: str, python: str = sys.executable) -> dict:
    file = str(BESIDE / f"{name}.py")
    return timing.in_fresh_process(file, str(folder), str(repeats), *more, python=python)


def export(folder: Path) -> None:
    """The random model and a batch: prompts, counterfactuals, one right and one wrong answer."""
    hf = timing.random_gpt2()
    hf.save_pretrained(folder / "model")
    task = timing.random_task(wrap(hf, device="cpu"), timing.PROMPTS).train
    save(
        folder,
        "batch",
        tokens=task.tokens,
        counterfactual=task.counterfactual,
        right=task.right[:1].expand(len(task), 1).contiguous(),
        wrong=task.wrong[:1].expand(len(task), 1).contiguous(),
    )


def largest_difference(folder: Path, ours: str, theirs: str, relative: bool = False) -> float:
    """Between two saved answers, as a share of the largest entry if `relative`."""
    one = load(folder, ours)
    other = load(folder, theirs)
    difference = max(float((one[key] - other[key]).abs().max()) for key in one)
    largest = max(float(value.abs().max()) for value in one.values())
    return difference / largest if relative else difference


def against(what: str, peer: str, ours: float, theirs: float, error: float, **more) -> dict:
    line = timing.row(what, ours, theirs, peer, **more)
    return line | {"times_faster": theirs / ours, "difference": error, "agrees": error <= CLOSE}


def auto_circuit(folder: Path, repeats: int) -> list[dict]:
    python = peer_python("auto-circuit")
    side("ours_side", folder, repeats, "masks")
    theirs = side("auto_circuit_side", folder, 1, python=python)
    ours = side("ours_side", folder, repeats, "edges")
    if theirs["n_edges"] != ours["n_edges"]:
        raise RuntimeError(f"{theirs['n_edges']} edges there, {ours['n_edges']} here")
    peer = "auto-circuit 1.0.1"
    memory = {"peak_gb": ours["peak_gb"], "peer_peak_gb": theirs["peak_gb"]}
    forward = largest_difference(folder, "ours_logp", "auto_circuit_logp")
    gradient = largest_difference(folder, "ours_scores", "auto_circuit_scores", relative=True)
    one, other = ours["seconds"], theirs["seconds"]
    return [
        against("masked forward", peer, one["forward"], other["forward"], forward),
        against(
            "gradient by all masks",
            peer,
            one["gradient"],
            other["gradient"],
            gradient,
            goal=1 / FASTER,
            **memory,
        ),
    ]


def tuned_lens(folder: Path, repeats: int) -> list[dict]:
    theirs = side("tuned_lens_side", folder, repeats, python=peer_python("tuned-lens"))
    ours = side("ours_side", folder, repeats, "tuned")
    error = largest_difference(folder, "ours_losses", "tuned_lens_losses")
    spent = ours["seconds"]["step"], theirs["seconds"]["step"]
    what = "tuned lens, a training step of all layers and positions"
    return [against(what, "tuned-lens 0.2.0", *spent, error)]


def transformer_lens(folder: Path, repeats: int) -> list[dict]:
    both = side("transformer_lens_side", folder, 1)
    names = {"eap": "EAP, all edges", "faithfulness": "faithfulness of a circuit"}
    return [
        against(
            what,
            "TransformerLens 4.3 attribution_patching",
            both["ours"][key],
            both["seconds"][key],
            both["errors"][key],
            prompts=both["prompts"] if key == "eap" else 1,
        )
        for key, what in names.items()
    ]


PEERS: dict[str, Callable[[Path, int], list[dict]]] = {
    "auto-circuit": auto_circuit,
    "tuned-lens": tuned_lens,
    "transformer-lens": transformer_lens,
}


def kept(path: Path, peers: Collection[str], about_run: dict) -> tuple[list[dict], dict[str, str]]:
    """What a file has of other peers than these: rows, and why some were left out."""
    if set(peers) == set(PEERS) or not path.exists():
        return [], {}
    stored = json.loads(path.read_text("utf-8"))
    differing = [key for key, value in about_run.items() if stored[key] != value]
    if differing:
        sys.exit(f"{path.name} was measured with other {', '.join(differing)}: run all peers")
    rows = [row for row in stored["rows"] if row["peer"] not in peers]
    return rows, {peer: why for peer, why in stored["left_out"].items() if peer not in peers}


def main() -> None:
    parser = timing.options(__doc__, repeats=3)
    parser.add_argument("peers", nargs="*", default=list(PEERS), help=f"of {', '.join(PEERS)}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"prompts": timing.PROMPTS, "tokens": timing.LENGTH, **timing.SMALL}
    sizes["repeats"] = given.repeats
    rows, left_out = kept(timing.FOLDER / "peers.json", given.peers, timing.about_run(sizes))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder)
        for peer in given.peers:
            try:
                rows += [{"peer": peer, **row} for row in PEERS[peer](folder, given.repeats)]
            except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
                left_out[peer] = str(error).splitlines()[-1]
                print(f"{peer} left out: {error}")
    rows.sort(key=lambda row: list(PEERS).index(row["peer"]))
    timing.write("peers", rows, sizes, left_out=left_out)


if __name__ == "__main__":
    main()
