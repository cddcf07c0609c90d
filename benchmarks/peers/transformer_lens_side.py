"""TransformerLens 4.3's own attribution patching (EAP, faithfulness) beside ours, in one process
and in turn: it is in our venv.

It scores edges position by position, one prompt at a time, with the slope at the corrupt prompt;
ours at the clean one. So ours runs with the two prompts swapped, its sign turned, and theirs is
summed over positions. Faithfulness there is one prompt's, with four more runs, one for each class
of edges; ours runs the same five masks.
"""

import time

import torch
from common import arguments, load_batch, load_gpt2, report
from ours_side import answer_difference, edge_scores, random_mask
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
    faithfulness,
)

from oa_utils.masked import MaskedModel
from oa_utils.models import wrap

PROMPTS = 2
SLOTS = {"q_input": "q", "k_input": "k", "v_input": "v"}


def vertex(node) -> str:
    """Our name of the vertex that a node of theirs belongs to."""
    if node.kind in ("embed", "logits"):
        return "embed" if node.kind == "embed" else "out"
    head = "" if node.head is None else f".h{node.head}"
    return f"{'m' if 'mlp' in node.kind else 'a'}{node.layer}{head}"


def as_edge(writer, reader) -> tuple[str, str, str]:
    return vertex(writer), vertex(reader), SLOTS.get(reader.kind, "")


def timed(call):
    began = time.process_time()
    answer = call()
    return time.process_time() - began, answer


def edge_class(edge) -> str:
    """The class that theirs counts an edge in: by what reads it."""
    if edge.slot:
        return "v" if edge.slot == "v" else "qk"
    return "out" if edge.dst == "out" else "mlp"


def classes_removed(masked: MaskedModel, mask: torch.Tensor) -> torch.Tensor:
    """The mask, and the mask without each class of edges."""
    classes = [edge_class(edge) for edge in masked.graph.edges]
    masks = [mask]
    for name in sorted(set(classes)):
        masks.append(mask * torch.tensor([other != name for other in classes]))
    return torch.stack(masks)


def main() -> None:
    folder, _ = arguments()
    batch = {name: rows[:PROMPTS] for name, rows in load_batch(folder).items()}
    masked = MaskedModel(wrap(load_gpt2(folder), device="cpu"))
    bridge = masked.model.bridge
    # theirs takes slopes at the embeddings too, so these must be part of a graph
    bridge.embed.original_component.weight.requires_grad_(True)
    last = torch.full((PROMPTS,), batch["tokens"].shape[1] - 1)
    right = batch["right"]
    wrong = batch["wrong"]
    assert (right == right[0]).all() and (wrong == wrong[0]).all(), "one metric for all prompts"

    def metric(logits: torch.Tensor) -> torch.Tensor:
        logp = logits[0, -1].log_softmax(-1)
        return logp[right[0, 0]] - logp[wrong[0, 0]]

    config = EdgeAttributionConfig(granularity="edge")
    pair = (batch["tokens"], batch["counterfactual"])
    theirs_eap, result = timed(lambda: attribution_patch(bridge, *pair, metric, config))
    edge_scores(masked, batch, "counterfactual", "tokens")  # warms up
    ours_eap, scores = timed(lambda: edge_scores(masked, batch, "counterfactual", "tokens"))
    summed: dict[tuple, float] = {}
    for (writer, reader), score in result.edge_scores.items():
        edge = as_edge(writer, reader)
        summed[edge] = summed.get(edge, 0.0) + score
    theirs = torch.tensor([summed[tuple(edge)] for edge in masked.graph.edges])
    eap_error = (theirs + scores).abs().max() / scores.abs().max()

    mask = random_mask(masked)
    kept = {tuple(edge) for edge, value in zip(masked.graph.edges, mask, strict=True) if value}
    one = slice(0, 1)
    circuit = [edge for edge in result.edge_scores if as_edge(*edge) in kept]
    theirs_faith, faith = timed(
        lambda: faithfulness(bridge, pair[0][one], pair[1][one], metric, circuit)
    )
    masks = classes_removed(masked, mask)

    @torch.no_grad()
    def ours() -> float:
        n = len(masks)
        tokens = pair[0][one].expand(n, -1)
        fill = masked.activations(pair[1][one]).rows(torch.zeros(n, dtype=torch.int64))
        logp = masked(tokens, last[one].expand(n), masks, fill)
        ends = masked.model(torch.cat([pair[0][one], pair[1][one]]), last)
        both = answer_difference(ends, {name: rows[:2] for name, rows in batch.items()})
        first = {name: rows[one] for name, rows in batch.items()}
        ablated = answer_difference(logp[:1], first)[0]
        return float((ablated - both[1]) / (both[0] - both[1]))

    ours()
    ours_faith, recovered = timed(ours)
    report(
        {"eap": theirs_eap, "faithfulness": theirs_faith},
        ours={"eap": ours_eap, "faithfulness": ours_faith},
        errors={"eap": float(eap_error), "faithfulness": abs(recovered - faith.recovered)},
        n_edges=len(summed),
        prompts=PROMPTS,
    )


if __name__ == "__main__":
    main()
