"""What was corrected with respect to the authors' released code, and what each correction changes:
a part of README.md, with numbers from what is published for the bundled model."""

from collections.abc import Callable

import oa_utils as oa
from oa_utils.paper import components

MODEL = "tiny"


def perturbed(perturbation: str, column: str) -> dict[str, float]:
    """A number of each lens under a perturbation along its own basis, mean over layers."""
    table = oa.results(MODEL, "faithfulness")
    rows = table[(table.perturbation == perturbation) & (table.basis == table.lens)]
    return rows.groupby("lens")[column].mean().to_dict()


def lead(perturbation: str) -> float:
    """OCA's magnitude correlation less the tuned lens's."""
    by_lens = perturbed(perturbation, "magnitude")
    return by_lens["oca"] - by_lens["tuned"]


def basis() -> str:
    right = perturbed("project_basis", "kl")["oca"]
    wrong = perturbed("project_columns", "kl")["oca"]
    leads = f"OCA's lead in magnitude correlation {lead('project_columns'):+.2f} in place of"
    return (
        f"a projection moves the model by {wrong:.2g} nats in place of {right:.2g}; {leads} "
        f"{lead('project_basis'):+.2f} (07, last part)"
    )


def projection() -> str:
    right = perturbed("project_basis", "kl")["oca"]
    wrong = perturbed("shift_basis", "kl")["oca"]
    both = f"with both slips OCA's lead in magnitude correlation is {lead('shift_columns'):+.2f}"
    return (
        f"the shift moves the model by {wrong:.2g} nats in place of {right:.2g}; {both} (07, last "
        "part)"
    )


def random_start() -> str:
    table = oa.results(MODEL, "latent_prediction")
    table = table[table.length == table["settings.length"]]
    losses = table.groupby("lens").loss.sum()
    ratio = losses["tuned_random"] / losses["tuned"]
    return f"the random start loses {ratio:.2f} times as much after as many steps (06)"


def median_ratio() -> str:
    table = oa.results(MODEL, "single_components")
    rows = table[(table.metric == "kl") & (table.part == "test") & (table.task == "ioi")]
    plain = rows[~rows.starts.map(lambda starts: "closed_form" in starts)]
    wide = components.wide(
        plain[plain.kind.isin(["head", "mlp"])].drop_duplicates(["component", "ablation", "family"])
    )
    compared = components.compare(wide, n=2, only=("median_ratio", "clamped_mean_ratio"))
    of_mean = compared[compared.ablation == "mean"].set_index("statistic").value
    return (
        f"{of_mean['clamped_mean_ratio']:.3f} in place of {of_mean['median_ratio']:.3f} (OA over "
        "mean; 01, Table 1)"
    )


def on_test_prompts() -> str:
    table = oa.results(MODEL, "sweeps")
    trained = table[(table.ablation == "optimal") & (table.task == "ioi")]
    ratio = (trained.gap / trained.train.astype(float)).median()
    return f"Δ under OA is {ratio:.2f} times as large on test prompts (IOI circuits, median; 02)"


Change = str | Callable[[], str]
CORRECTIONS: list[tuple[str, str, Change]] = [  # in the released code; here; what it changes
    (
        "the causal basis is read from the wrong side of the singular value decomposition, and the "
        "covariance is left out",
        "directions of W Σ^½, mapped back and in order",
        basis,
    ),
    (
        "a projection subtracts the sum over the whole batch: a common shift",
        "each context loses what it has along the direction",
        projection,
    ),
    (
        "the strength of a perturbation is calibrated for another kind of noise",
        "bisection to 0.2 nats on the perturbation that is used",
        "layers and lenses are compared at equal strength (07, first table)",
    ),
    (
        "the tuned lens starts from random matrices",
        "starts at the best of identity, shifted identity and ridge; the random start is shown "
        "beside",
        random_start,
    ),
    (
        "layers of causal tracing are numbered one too low, layer 0 is missing",
        "layer ℓ is layer ℓ",
        'every peak moves by one layer (05, "Appendix: two slips of the published plots")',
    ),
    (
        "facts are split in the order of the file, so relations of train and test hardly overlap",
        "60 / 40 within every relation",
        "constants are trained on the relations that they are measured on (05, same appendix)",
    ),
    (
        "the corrupted copy is patched too when windows are wide",
        "it never is",
        "the denominator of AIE is that of a corrupted run (a test)",
    ),
    (
        "the HardConcrete stretch is (s − 0.1) · 1.2",
        "1.2 s − 0.1, which is what its price assumes",
        "a few edges and Δ either way (02, options)",
    ),
    (
        "dangling edges of MLPs are judged over the whole batch of masks",
        "mask by mask",
        "Δ under OA of the circuit found (02, options); under CF it cannot matter",
    ),
    (
        "the price of vertices covers heads only and uses one degree for all",
        "every vertex by its own degree",
        "not measured (02, options, has no price of vertices at all)",
    ),
    (
        "the found circuit's Δ under OA is one training batch, random ones get test prompts",
        "the same protocol for both",
        "both ratios are of test prompts (04)",
    ),
    (
        '"median ratio" is a mean of ratios cut at 1; correlations leave out the outer 2 %',
        "both are given, each under its name",
        median_ratio,
    ),
    (
        "the magnitude correlation is one of logarithms, the formula of the paper has none",
        "as in the released code",
        "the rank correlation, shown beside, does not depend on it (07)",
    ),
    (
        "lenses, circuits and constants are evaluated on prompts that also trained them",
        "train, validation and test are disjoint",
        on_test_prompts,
    ),
]


def markdown() -> str:
    """The table for the README."""
    lines = [f"| in the released code | here | what it changes ({MODEL}) |", "|---|---|---|"]
    for released, here, change in CORRECTIONS:
        words = change if isinstance(change, str) else change()
        lines.append(f"| {released} | {here} | {words} |")
    return "\n".join(lines) + "\n"
