"""Distances between predictions, agreement between measures, and how sure we are of either."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

Sample = ndarray | Tensor | pd.Series | Sequence  # one number for each observation


def kl(
    logp_full: Float[Tensor, "... vocab"], logp_ablated: Float[Tensor, "... vocab"]
) -> Float[Tensor, "..."]:
    """KL(full ‖ ablated) in nats.

    A token that the full model never says counts nothing, and no gradient turns NaN.
    """
    p = logp_full.exp()
    never = p == 0
    log_ratio = logp_full.masked_fill(never, 0) - logp_ablated.masked_fill(never, 0)
    return (p * log_ratio).sum(-1)


def array(x: Any) -> Float[ndarray, "..."]:
    """Numbers of any kind as float64."""
    if isinstance(x, Tensor):
        x = x.detach().cpu().double()
    return np.asarray(x, dtype=float)


def pair(x: Sample, y: Sample) -> tuple[ndarray, ndarray]:
    x = array(x)
    y = array(y)
    if x.shape != y.shape:
        raise ValueError(f"the two samples differ in shape: {x.shape} and {y.shape}")
    return x, y


# ---- agreement


def spearman(x: Sample, y: Sample) -> float:
    """Rank correlation."""
    return float(scipy.stats.spearmanr(*pair(x, y)).statistic)


def loglog(x: Sample, y: Sample, trim: float = 0.0) -> float:
    """Pearson correlation of logarithms, over pairs that are positive in both.

    trim=0.02 leaves out 2 % at each end of either axis, as the paper's table did.
    """
    x, y = pair(x, y)
    keep = (x > 0) & (y > 0)
    if trim:
        for axis in (x, y):
            low, high = np.quantile(axis, [trim, 1 - trim])
            keep &= (axis >= low) & (axis <= high)
    return float(scipy.stats.pearsonr(np.log(x[keep]), np.log(y[keep])).statistic)


# ---- errors


def mean_se(x: Sample) -> tuple[float, float]:
    """Mean and its standard error; one observation has no error that could be known."""
    x = array(x).ravel()
    error = scipy.stats.sem(x) if len(x) > 1 else np.nan
    return float(x.mean()), float(error)


def mean_interval(x: Sample) -> tuple[float, float | None, float | None]:
    """Mean with its 95 % interval by Student's t; one observation has none, nor have several that
    are all the same: how much others would differ is not known."""
    mean, se = mean_se(x)
    n = len(array(x))
    if n < 2 or se <= 1e-12 * abs(mean):
        return mean, None, None
    reach = se * float(scipy.stats.t.ppf(0.975, n - 1))
    return mean, mean - reach, mean + reach


def welch(x: Sample, y: Sample) -> tuple[float, float]:
    """Standard error of mean(x) − mean(y) of two independent samples, and how many of it reach 95 %
    by Student's t with Welch's degrees of freedom; a single observation adds no error."""
    several = [sample for sample in (array(x), array(y)) if len(sample) > 1]
    squares = [scipy.stats.sem(sample) ** 2 for sample in several]
    total = sum(squares)
    if total == 0:
        return 0.0, 1.96
    parts = [square**2 / (len(s) - 1) for square, s in zip(squares, several, strict=True)]
    return float(total**0.5), float(scipy.stats.t.ppf(0.975, total**2 / sum(parts)))


def ratio_se(w: Sample, z: Sample) -> tuple[float, float]:
    """mean(w) / mean(z) of paired samples, with its standard error by the delta method."""
    w, z = pair(w, z)
    ratio = w.mean() / z.mean()
    _, error = mean_se(w - ratio * z)
    return float(ratio), error / abs(float(z.mean()))


def bootstrap(
    statistic: Callable[..., float],
    *arrays: Any,
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of a statistic of several arrays whose rows are drawn together."""
    arrays = tuple(array(a) for a in arrays)
    lengths = [len(a) for a in arrays]
    if len(set(lengths)) != 1:
        raise ValueError(f"arrays to resample together differ in length: {lengths}")
    with np.errstate(all="ignore"):  # a draw may have no ratio, or no correlation
        interval = scipy.stats.bootstrap(
            (np.arange(lengths[0]),),
            lambda rows: statistic(*(a[rows] for a in arrays)),
            vectorized=False,
            n_resamples=n,
            confidence_level=level,
            method="percentile",
            rng=seed,
        ).confidence_interval
    return float(interval.low), float(interval.high)


# ---- ratios


def ratios(a: Sample, b: Sample) -> Float[ndarray, " m"]:
    """a / b where b is positive: a component without effect has no ratio."""
    a, b = pair(a, b)
    return a[b > 0] / b[b > 0]


def median_ratio(a: Sample, b: Sample) -> float:
    return float(np.median(ratios(a, b)))


def clamped_mean_ratio(a: Sample, b: Sample) -> float:
    """Mean of min(a / b, 1): what the reference code printed as the median ratio."""
    return float(np.minimum(ratios(a, b), 1).mean())


# ---- Pareto fronts


def pareto(sizes: Sample, losses: Sample) -> Int[ndarray, " front"]:
    """Indices, by growing size, of the points that no smaller or equal size beats."""
    sizes, losses = pair(sizes, losses)
    order = np.lexsort((losses, sizes))
    order = order[np.isfinite(losses[order])]
    best_so_far = np.minimum.accumulate(np.concatenate([[np.inf], losses[order]]))
    return order[losses[order] < best_so_far[:-1]]


def interpolate(
    sizes: Sample, losses: Sample, at: float | Sample
) -> float | Float[ndarray, " sizes"]:
    """Loss of the front at the given sizes, its logarithm linear between points; NaN outside."""
    front = pareto(sizes, losses)
    values = np.full(np.shape(at), np.nan)
    if len(front):
        logs = np.log(np.maximum(array(losses)[front], np.finfo(float).tiny))
        values = np.exp(np.interp(at, array(sizes)[front], logs, left=np.nan, right=np.nan))
    return float(values) if np.ndim(at) == 0 else values
