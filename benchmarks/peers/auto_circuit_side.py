"""auto-circuit 1.0.1 on the exported model: one masked forward, one gradient by all masks. Run by
the python of its own venv."""

import torch
from auto_circuit.data import PromptDataLoader, PromptPair
from auto_circuit.prune_algos.mask_gradient import mask_gradient_prune_scores
from auto_circuit.types import AblationType
from auto_circuit.utils.ablation_activations import batch_src_ablations
from auto_circuit.utils.graph_utils import patch_mode, patchable_model, set_all_masks
from common import arguments, load, load_batch, load_gpt2, medians, report, save
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights


def hooked(folder) -> HookedTransformer:
    """The exported weights as a HookedTransformer, nothing folded."""
    hf = load_gpt2(folder)
    shape = hf.config
    config = HookedTransformerConfig(
        n_layers=shape.n_layer,
        n_heads=shape.n_head,
        d_model=shape.n_embd,
        d_head=shape.n_embd // shape.n_head,
        d_mlp=4 * shape.n_embd,
        d_vocab=shape.vocab_size,
        n_ctx=shape.n_positions,
        eps=shape.layer_norm_epsilon,
        act_fn="gelu_new",
        normalization_type="LN",
        device="cpu",
    )
    model = HookedTransformer(config)
    weights = model.state_dict() | convert_gpt2_weights(hf, config)
    model.load_state_dict(weights)
    model.set_use_attn_result(True)
    model.set_use_split_qkv_input(True)
    model.set_use_hook_mlp_in(True)
    return model.eval().requires_grad_(False)


def main() -> None:
    folder, repeats = arguments()
    batch = load_batch(folder)
    columns = (batch["tokens"], batch["counterfactual"], batch["right"], batch["wrong"])
    pairs = [PromptPair(*row) for row in zip(*columns, strict=True)]
    loader = PromptDataLoader(pairs, seq_len=None, diverge_idx=0, batch_size=len(pairs))
    model = patchable_model(
        hooked(folder), factorized=True, slice_output="last_seq", separate_qkv=True
    )
    wrappers = {wrapper.module_name: wrapper for wrapper in model.dest_wrappers}
    [fill] = batch_src_ablations(
        model, loader, ablation_type=AblationType.RESAMPLE, clean_corrupt="corrupt"
    ).values()
    kept = load(folder, "masks")

    @torch.no_grad()
    def forward() -> torch.Tensor:
        set_all_masks(model, val=0.0)
        for name, wrapper in wrappers.items():
            wrapper.patch_mask.data.copy_(1 - kept[name])  # 1 = ablated
        with patch_mode(model, fill.clone()):
            return model(batch["tokens"])[model.out_slice].log_softmax(-1)

    def gradient() -> dict[str, torch.Tensor]:
        return mask_gradient_prune_scores(
            model, loader, None, grad_function="logprob", answer_function="avg_diff", mask_val=0.0
        )

    forward_seconds, logp = medians(forward, repeats)
    save(folder, "auto_circuit_logp", logp=logp)
    gradient_seconds, scores = medians(gradient, repeats)
    save(folder, "auto_circuit_scores", **scores)
    n_edges = sum(wrapper.patch_mask.numel() for wrapper in wrappers.values())
    report({"forward": forward_seconds, "gradient": gradient_seconds}, n_edges=n_edges)


if __name__ == "__main__":
    main()
