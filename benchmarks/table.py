"""The README's table of costs, from the JSON files beside this one; it measures nothing."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
OWN = ("masked", "methods", "lenses", "spread")
COLUMNS = (
    "| what | ours | against | takes | ratio | goal | remark |\n|---|---|---|---|---|---|---|\n"
)


def load(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {"rows": []}


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def goal(line: dict[str, Any]) -> str:
    """The bar, and whether it is met."""
    if "goal" not in line:
        return ""
    return f"≤ {line['goal']:.3g} {'✓' if line['ratio'] <= line['goal'] else '✗'}"


def remark(line: dict[str, Any]) -> str:
    """Memory, agreement, sizes: what else was measured."""
    words = []
    if "net_gb" in line:
        words.append(f"{line['net_gb']:.2f} GB beside model and libraries")
    if "peer_peak_gb" in line:
        words.append(f"peak {line['peak_gb']:.1f} GB, theirs {line['peer_peak_gb']:.1f} GB")
    if "agrees" in line:
        same = "the same numbers" if line["agrees"] else "other numbers"
        words.append(f"{same} (difference {line['difference']:.0e})")
    if "same_numbers" in line:
        words.append("the same numbers" if line["same_numbers"] else "other numbers")
        words.append(
            f"wall clock; {line['overhead_s']:.1f} s above half; start {line['start_s']:.0f} s"
        )
    if "prompts" in line:
        words.append(f"{line['prompts']} prompts" if line["prompts"] > 1 else "1 prompt")
    if "runs" in line:
        sizes = [f"{run['method']} {run['n_edges']}: Δ {run['gap']:.2g}" for run in line["runs"]]
        words.append(", ".join(sizes))
    return "; ".join(words)


def as_row(line: dict[str, Any]) -> str:
    cells = [
        line["what"],
        duration(line["ours"]),
        line["against"],
        duration(line["base"]),
        f"{line['ratio']:.2f}",
        goal(line),
        remark(line),
    ]
    return f"| {' | '.join(cells)} |\n"


def growth(rows: list[dict[str, Any]]) -> str:
    """Rows measured at several sizes, as one line each: the ratio at every size, and exponents."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in rows:
        if "by" in line:
            kinds.setdefault(line["by"], []).append(line)
    text = "| as a function of | ratio to plain at each size | cost grows with the power |\n"
    text += "|---|---|---|\n"
    for name, lines in kinds.items():
        share = name.startswith("edges")
        sizes = [f"{line['size']:.0%}" if share else str(line["size"]) for line in lines]
        ratios = [f"{size}: {line['ratio']:.2f}" for size, line in zip(sizes, lines, strict=True)]
        powers = lines[0].get("exponents")
        grows = f"{powers['ours']:.2f} (plain {powers['base']:.2f})" if powers else ""
        text += f"| {name} | {', '.join(ratios)} | {grows} |\n"
    return text


def markdown() -> str:
    """What stands in the README between its two marks."""
    files = {name: load(name) for name in OWN}
    first = files["masked"]
    sizes = first["sizes"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    text = (
        f"GPT-2-small's shape ({sizes['n_layer']} layers, {sizes['n_embd']} wide, random weights), "
        f"{sizes['prompts']} × {sizes['tokens']} tokens where nothing else is said; "
        f"{first['clock']}, medians; {first['processor']}; {versions}. *Plain* is Hugging Face's "
        "forward and backward with frozen weights (gradient to the embeddings), logits at last "
        "positions: no gradient is cheaper.\n\n"
    )
    lines = [line for file in files.values() for line in file["rows"]]
    text += COLUMNS + "".join(as_row(line) for line in lines if "by" not in line)
    text += "\n" + growth(first["rows"])
    peers = load("peers")
    if peers["rows"]:
        text += "\nBeside others, on the same weights and the same batch (`make bench-peers`):\n\n"
        text += COLUMNS + "".join(map(as_row, peers["rows"]))
    for name, reason in peers.get("left_out", {}).items():
        text += f"\n{name} could not be run: {reason}\n"
    return text
