"""Breaks important lines one at a time and runs the tests that should notice.

    python scripts/mutants.py              # all of them, about half a minute each
    python scripts/mutants.py graph store  # those in files whose path has one of these words

Works in a copy of what is committed, never in the tree itself. A mutant is dead when a test fails
(or does not end); one that cannot be tested at all is broken.
`scripts/mutants.json` holds what the last run of each gave; it is not part of `make test`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).with_suffix(".json")
LONGEST = 300  # seconds for the tests of one mutant

GRAPH = "test_properties.py test_graph.py"
MASKED = "test_masked.py test_properties.py"
BUFFER = "test_buffer.py test_masked.py"
CIRCUITS = "test_circuits.py test_hostile.py"
STORE = "test_store.py test_hostile.py"
MODELS = "test_models.py test_hostile.py"
FAMILIES = "test_families.py"
MACHINE = "test_machine.py"
UGS = "test_properties.py test_search.py"
SEARCH = "test_search.py"
GAP = "test_evaluate.py"
KILLS = "test_kills.py"

MUTANTS = [  # file, what stands there once, what is put in its place, tests
    ("graph.py", "keep = (mask > 0).float()", "keep = (mask > 0.5).float()", GRAPH),
    ("graph.py", "slots), -1)).sum((1, 3)) > 0", "slots), -1))[:, 1:].sum((1, 3)) > 0", GRAPH),
    ("graph.py", "+= mlp[layer] * (onward[:, m : m + 1] > 0)", "+= mlp[layer]", GRAPH),
    ("graph.py", "(mlp[layer] * live[:, :n]).sum(-1) > 0", "mlp[layer].sum(-1) > 0", GRAPH),
    ("graph.py", "return mask * keep.to(mask.dtype)", "return keep.to(mask.dtype)", GRAPH),
    ("graph.py", "if i >= span.stop - span.start:", "if i > span.stop - span.start:", GRAPH),
    ("graph.py", "bisect_right(starts, i) - 1", "bisect_right(starts, i - 1) - 1", GRAPH),
    (
        "masked.py",
        "keys[:, None] > position[..., None]",
        "keys[:, None] >= position[..., None]",
        MASKED,
    ),
    (
        "masked.py",
        "torch.arange(1, length, device=embed.device)",
        "torch.arange(length - 1)",
        MASKED,
    ),
    ("masked.py", "live[before:m]].any(0).any(0)", "live[before:m]].any(0).all(0)", MASKED),
    (
        "masked.py",
        "by_head.sum(1, keepdim=True) + self.b_O[:, None, None]",
        "by_head.sum(1, keepdim=True)",
        MASKED,
    ),
    ("masked.py", "x = x + fill.attn[i] + late", "x = x + late", MASKED),
    (
        "masked.py",
        "embed.detach(), z.detach(), attn.detach(), mlps.detach(),",
        "embed, z, attn, mlps,",
        MASKED,
    ),
    ("masked.py", "if not 1 <= int(last.min())", "if not 0 <= int(last.min())", MASKED),
    ("masked.py", "if (tokens[:, 0] != tokens[0, 0]).any():", "if False:", MASKED),
    ("masked.py", "torch.promote_types(model.dtype, torch.float32)", "model.dtype", FAMILIES),
    ("masked.py", 'layer.norm_slot(k, "k")', "k", FAMILIES),
    ("sites.py", '"behind" if self.parallel and', '"behind" if False and', FAMILIES),
    (
        "buffer.py",
        "1 - mask if self.everywhere else (mask == 0).to(mask.dtype)",
        "1 - mask",
        BUFFER,
    ),
    ("buffer.py", ".div_(-x.shape[-1])", ".div_(x.shape[-1])", BUFFER),
    ("buffer.py", "return self.base + (total - total.detach())", "return self.base", BUFFER),
    (
        "circuits.py",
        "self.graph.prune_dangling(mask.reshape(-1).bool())",
        "mask.reshape(-1).bool()",
        CIRCUITS,
    ),
    (
        "circuits.py",
        "self.fingerprint is not None and self.fingerprint != model.fingerprint",
        "False",
        CIRCUITS,
    ),
    ("circuits.py", '-abs(edges[name]["score"])', '-edges[name]["score"]', CIRCUITS),
    ("circuits.py", "type(n_edges) is not int or not 0 <= n_edges", "not n_edges", CIRCUITS),
    (
        "circuits.py",
        'if record["gap"] is not None and not math.isfinite(record["gap"]):',
        "if False:",
        CIRCUITS,
    ),
    (
        "store.py",
        'if record.pop("sha256", None) != sha256(record):',
        'if not record.pop("sha256", None):',
        STORE,
    ),
    ("store.py", "if seal != sha256([text, sha256(_to_bytes(tensors))]):", "if not seal:", STORE),
    ("store.py", 'if sha256(data) != record["tensors_sha256"]:', "if not data:", STORE),
    ("store.py", 'if record["budget"] == "test" and budget != "test":', "if False:", STORE),
    ("store.py", "{path.stem}.{sha256(data)[:8]}.safetensors", "{path.stem}.safetensors", STORE),
    ("store.py", 'if head["identity"] != self.identity:', "if False:", STORE),
    ("store.py", 'self.seconds_before = head["seconds"]', "self.seconds_before = 0.0", STORE),
    ("store.py", "if len(models) > 1 and not mixed:", "if False:", STORE),
    ("store.py", '"version": version,', '"version": 1,', STORE),
    ("store.py", "None if task is None else task.fingerprint", "None", STORE),
    ("store.py", "if not path.is_file():", "if False:", STORE),
    ("store.py", 'if not isinstance(record["numbers"], dict):', "if False:", STORE),
    ("store.py", "for attempt in range(3):", "for attempt in range(1):", STORE),
    ("models.py", "if checksum(hf) == self._checksum:", "if True:", MODELS),
    (
        "models.py",
        "parts = itertools.chain(_content(module), _held_beside(module))",
        "parts = _content(module)",
        MODELS,
    ),
    ("models.py", "    _refuse_gaps(name, report)\n", "", MODELS),
    (
        "models.py",
        "resid = resid.to(torch.promote_types(self.dtype, torch.float32))",
        "resid = resid.to(self.dtype)",
        MODELS,
    ),
    ("models.py", "return before if self.parallel else between", "return between", FAMILIES),
    ("models.py", "if tokens.shape[1] > self.n_ctx:", "if False:", FAMILIES),
    ("models.py", "gain = 2.0 ** min(", "gain = 1.0 ** min(", MODELS),
    (
        "models.py",
        "(key_places <= positions[..., None])",
        "(key_places < positions[..., None])",
        MODELS,
    ),
    ("models.py", '"kv ... -> (kv group) ..."', '"kv ... -> (group kv) ..."', MODELS),
    ("models.py", "if is_chat and", "if False and", MODELS),
    (
        "models.py",
        "elif alone := not (model.origin and model.fingerprint == model.as_loaded):",
        "elif alone := not model.origin:",
        MODELS,
    ),
    (
        "sources.py",
        "if path.is_file() and file_sha256(path) == sha256:",
        "if path.is_file():",
        MODELS,
    ),
    (
        "sources.py",
        "all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())",
        "bool(hashes)",
        "test_hostile.py",
    ),
    ("sources.py", "if not hashes or hashes", "if hashes", "test_hostile.py"),
    (
        "sources.py",
        "if name not in WITHOUT_OWNER and not HUB_ID.fullmatch(name):",
        "if False:",
        MODELS,
    ),
    ("machine.py", "while os.getppid() == parent:", "while True:", MACHINE),
    ("machine.py", "if middle == span.start or not is_out_of_memory(error):", "if True:", MACHINE),
    (
        "machine.py",
        'usual = 1 if budget() == "test" or on != "cpu" else fitting',
        "usual = joblib.cpu_count()",
        MACHINE,
    ),
    ("machine.py", "    torch.set_num_threads(n_threads)\n", "", MACHINE),
    (
        "stats.py",
        "return (p * log_ratio).sum(-1)",
        "return (logp_ablated.exp() * log_ratio).sum(-1)",
        "test_stats.py",
    ),
    ("search/ugs.py", "BETAS = (0.9, 0.995)", "BETAS = (0.9, 0.9)", UGS),
    ("search/ugs.py", "return base / slower.get(settings.ablation, 1.0)", "return base", UGS),
    ("search/ugs.py", "widest = 2 * torch", "widest = 4 * torch", UGS),
    (
        "search/ugs.py",
        "scale = len(alpha) / inside(alpha.detach()).sum(0).clamp(min=1)",
        "scale = 1.0",
        UGS,
    ),
    ("search/hcgs.py", "log_alpha - beta * math.log", "log_alpha + beta * math.log", UGS),
    (
        "search/loop.py",
        'edges.detach() if how == "sample" else edges.detach().amax(0)',
        "edges.detach().amax(0)",
        SEARCH,
    ),
    ("search/loop.py", '            self.losses = state["losses"]\n', "", KILLS),
    ("search/loop.py", '            self.rng.set_state(state["rng"])\n', "", KILLS),
    (
        "search/loop.py",
        "torch.nn.utils.clip_grad_norm_(list(sampler.parameters.values()), self.settings.clip)",
        "pass",
        UGS,
    ),
    ("search/acdc.py", '"k": k, "mask"', '"k": 1, "mask"', KILLS),
    ("search/gaps.py", "if now <= self.least:", "if True:", UGS),
    ("search/gaps.py", "falling = 1 - 0.9 * self.step / settings.steps", "falling = 1.0", GAP),
    (
        "search/gaps.py",
        '            self.best = Constants(*state["best"])\n',
        "",
        "test_evaluate.py",
    ),
    ("training.py", "if gain > NOISE:", "if True:", "test_training.py"),
    ("training.py", '        rng.set_state(saved["rng"])\n', "", KILLS),
    ("tracing.py", '.mean(0), "unpatched": first}', ".mean(0)}", "test_tracing.py"),
    ("search/sweeps.py", 'return f"{wanted.method} {wanted.ablation}"', "pass", GAP),
    ("lenses.py", "if loss < state.best[i]:", "if True:", "test_lenses.py"),
    ("lenses.py", 'optimiser.load_state_dict(saved["optimiser"])', "pass", KILLS),
]


def copy_of_the_tree(folder: Path) -> None:
    """What is committed: other people may be at work in the tree itself."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def warm_up() -> None:
    """What every child would import; not the package itself, which is another one each time."""
    import hypothesis  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import seaborn  # noqa: F401
    import torch
    import transformer_lens.model_bridge  # noqa: F401
    import transformers  # noqa: F401

    torch.set_num_threads(1)


def tests_fail(folder: Path, tests: str) -> str:
    """`dead` where a test fails or does not end, `alive` where all pass, `broken` where there was
    nothing to test (the line does not even parse), in a child that imports the copy."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.setpgid(0, 0)
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            sys.dont_write_bytecode = True
            settings = {"OA_BUDGET": "test", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
            os.environ.update(settings | {"PYTHONDONTWRITEBYTECODE": "1"})
            import pytest

            files = [f"tests/{name}" for name in tests.split()]
            options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not real and not gpt2"]
            os._exit(int(pytest.main([*files, *options])))
        os._exit(70)
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "alive", 1: "dead"}.get(code, f"broken (exit {code})")
        time.sleep(0.2)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "dead (did not end)"


def main(words: list[str]) -> None:
    wanted = [m for m in MUTANTS if not words or any(word in m[0] for word in words)]
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    warm_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        for tests in dict.fromkeys(m[3] for m in wanted):
            if tests_fail(folder, tests) != "alive":
                sys.exit(
                    f"{tests} fails without any mutant:\n{(folder / 'log').read_text()[-3000:]}"
                )
        for file, old, new, tests in wanted:
            path = folder / "oa_utils" / file
            text = path.read_text()
            start = time.monotonic()
            if text.count(old) == 1:
                path.write_text(text.replace(old, new))
                verdict = tests_fail(folder, tests)
                path.write_text(text)
            else:
                verdict = f"not there: {text.count(old)} places"
            print(
                f"{verdict:8} {time.monotonic() - start:4.0f} s  {file}: {old.strip()}", flush=True
            )
            results[name_of(file, old, new)] = verdict
            write(results)
    verdicts = [verdict.partition(" ")[0] for verdict in results.values()]
    print(f"{verdicts.count('dead')} of {len(MUTANTS)} are dead, {verdicts.count('broken')} broken")


def name_of(file: str, old: str, new: str) -> str:
    return f"{file}: {old.strip()} -> {new.strip()}"


def write(results: dict[str, str]) -> None:
    """In the order of the list; what is no longer in it goes."""
    names = [name_of(*mutant[:3]) for mutant in MUTANTS]
    ordered = {name: results.get(name, "not run") for name in names}
    RESULT.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
