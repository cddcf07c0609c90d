"""Distances between predictions, agreement between measures, and how sure we are of either."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

Sample = Float[ndarray, " n"]  # or a tensor, a column, a list


def kl(logp_full: Float[Tensor, "... vocab"], logp_ablated: Float[Tensor, "... vocab"]) -> Float[Tensor, "..."]:
    """KL(full ‖ ablated) in nats; a token that the full model never says counts nothing, and no gradient turns NaN."""
    p = logp_full.exp()
    never = p == 0
    return (p * (logp_full.masked_fill(never, 0) - logp_ablated.masked_fill(never, 0))).sum(-1)


def array(x: Any) -> Float[ndarray, "..."]:
    return np.asarray(x.detach().cpu().double() if isinstance(x, Tensor) else x, dtype=float)


def pair(x: Any, y: Any) -> tuple[ndarray, ndarray]:
    x, y = array(x), array(y)
    if x.shape != y.shape:
        raise ValueError(f"the two samples differ in shape: {x.shape} and {y.shape}")
    return x, y


def spearman(x: Sample, y: Sample) -> float:
    return float(scipy.stats.spearmanr(*pair(x, y)).statistic)


def loglog(x: Sample, y: Sample, trim: float = 0.0) -> float:
    """Pearson correlation of logarithms over pairs positive in both; trim=0.02 leaves out 2 % at each end of either
    axis, as the paper's table did."""
    x, y = pair(x, y)
    keep = (x > 0) & (y > 0)
    if trim:
        for axis in (x, y):
            low, high = np.quantile(axis, [trim, 1 - trim])
            keep &= (axis >= low) & (axis <= high)
    return float(scipy.stats.pearsonr(np.log(x[keep]), np.log(y[keep])).statistic)


def mean_se(x: Sample) -> tuple[float, float]:
    """Mean and its standard error; one observation has no error that could be known."""
    x = array(x).ravel()
    return float(x.mean()), float(scipy.stats.sem(x)) if len(x) > 1 else float("nan")


def ratio_se(w: Sample, z: Sample) -> tuple[float, float]:
    """mean(w) / mean(z) of paired samples, with its standard error by the delta method."""
    w, z = pair(w, z)
    ratio = w.mean() / z.mean()
    return float(ratio), mean_se(w - ratio * z)[1] / abs(float(z.mean()))


def bootstrap(
    statistic: Callable[..., float], *arrays: Any, n: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of a statistic of several arrays whose rows belong together, and are drawn together."""
    arrays = tuple(array(a) for a in arrays)
    if len({len(a) for a in arrays}) != 1:
        raise ValueError(f"arrays to resample together differ in length: {[len(a) for a in arrays]}")
    interval = scipy.stats.bootstrap(
        (np.arange(len(arrays[0])),),
        lambda rows: statistic(*(a[rows] for a in arrays)),
        vectorized=False,
        n_resamples=n,
        confidence_level=level,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return float(interval.low), float(interval.high)


def ratios(a: Sample, b: Sample) -> Float[ndarray, " m"]:
    """a / b where b is positive: a component without effect has no ratio."""
    a, b = pair(a, b)
    return a[b > 0] / b[b > 0]


def median_ratio(a: Sample, b: Sample) -> float:
    return float(np.median(ratios(a, b)))


def clamped_mean_ratio(a: Sample, b: Sample) -> float:
    """Mean of min(a / b, 1): what the reference code printed as the median ratio."""
    return float(np.minimum(ratios(a, b), 1).mean())


def pareto(sizes: Sample, losses: Sample) -> Int[ndarray, " front"]:
    """Indices, by growing size, of the points that no smaller or equal size beats: the running minimum of the loss."""
    sizes, losses = pair(sizes, losses)
    order = np.lexsort((losses, sizes))
    order = order[np.isfinite(losses[order])]
    best = np.minimum.accumulate(np.concatenate([[np.inf], losses[order]]))
    return order[losses[order] < best[:-1]]


def interpolate(sizes: Sample, losses: Sample, at: Any) -> Any:
    """Loss of the Pareto front at the given sizes, its logarithm linear between points; NaN outside the front."""
    front = pareto(sizes, losses)
    sizes, losses = array(sizes)[front], array(losses)[front]
    logs = np.log(np.maximum(losses, np.finfo(float).tiny))
    values = (
        np.exp(np.interp(at, sizes, logs, left=np.nan, right=np.nan)) if len(front) else np.full(np.shape(at), np.nan)
    )
    return float(values) if np.ndim(at) == 0 else values


def sign_test(wins: int, n: int) -> float:
    """Two-sided p of so many wins in n fair tosses."""
    return float(scipy.stats.binomtest(wins, n).pvalue)
