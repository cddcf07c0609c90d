import math

import numpy as np
import pytest
import scipy.stats
import torch

from oa_utils import stats

RNG = np.random.default_rng(0)


def test_kl_of_a_certain_and_a_fair_coin_is_ln_2():
    p, q = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert stats.kl(p, q).tolist() == pytest.approx([math.log(2)])
    assert stats.kl(q, p).tolist() == [math.inf]
    assert stats.kl(p, p).tolist() == [0.0]


def test_kl_is_the_expected_log_ratio_for_each_row():
    p, q = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    assert torch.allclose(stats.kl(p, q), expected) and stats.kl(p, q).shape == (5,)
    assert torch.allclose(stats.kl(p[None], q[None]), expected[None])


def test_kl_has_finite_gradients_where_the_full_model_says_never():
    q = torch.zeros(1, 3, requires_grad=True)
    stats.kl(torch.tensor([[0.5, 0.5, 0.0]]).log(), q.log_softmax(-1)).sum().backward()
    assert torch.allclose(q.grad, torch.tensor([[1 / 3 - 0.5, 1 / 3 - 0.5, 1 / 3]]))
    impossible = torch.tensor([[0.0, -math.inf]])
    assert stats.kl(torch.tensor([[0.0, -200.0]]), impossible).tolist() == [0.0]


def test_spearman_sees_order_only():
    x = RNG.normal(size=50)
    assert stats.spearman(x, np.exp(3 * x)) == pytest.approx(1)
    assert stats.spearman(torch.tensor([1.0, 2, 3, 4]), [1, 3, 2, 4]) == pytest.approx(0.8)


def test_loglog_finds_power_laws_and_leaves_out_what_has_no_logarithm():
    x = np.exp(RNG.normal(size=50))
    assert stats.loglog(x, 5 * x**2) == pytest.approx(1)
    assert stats.loglog(np.append(x, [0, -1, 3]), np.append(5 * x**2, [1, 1, 0])) == pytest.approx(
        1
    )


def test_trimming_drops_the_ends_of_either_axis():
    x = np.exp(np.linspace(0, 5, 101))
    y = 2 * x
    x[0], y[100] = 1e-9, 1e9
    x[100], y[0] = x[99] * 1.01, y[1] * 0.99
    assert stats.loglog(x, y) < 0.9
    assert stats.loglog(x, y, trim=0.02) == pytest.approx(1)
    inner = slice(2, 99)
    noisy = y * np.exp(0.3 * RNG.normal(size=101))
    keep = (noisy >= np.quantile(noisy, 0.02)) & (noisy <= np.quantile(noisy, 0.98))
    keep[: inner.start] = keep[inner.stop :] = False
    by_hand = np.corrcoef(np.log(x[keep]), np.log(noisy[keep]))[0, 1]
    assert stats.loglog(x, noisy, trim=0.02) == pytest.approx(by_hand)


def test_mean_se_by_hand():
    mean, se = stats.mean_se([1.0, 2.0, 3.0, 4.0])
    assert (mean, se) == (2.5, pytest.approx(math.sqrt(5 / 3 / 4)))
    assert stats.mean_se(torch.tensor([3.0]))[0] == 3 and math.isnan(stats.mean_se([3.0])[1])


def test_ratio_error_agrees_with_the_bootstrap_and_uses_the_pairing():
    z = RNG.gamma(4.0, size=400)
    w = 0.5 * z + 0.2 * RNG.normal(size=400)
    ratio, se = stats.ratio_se(w, z)
    low, high = stats.bootstrap(lambda a, b: a.mean() / b.mean(), w, z, n=2000)
    assert ratio == pytest.approx(w.mean() / z.mean())
    assert (high - low) / (2 * 1.96) == pytest.approx(se, rel=0.1)
    assert stats.ratio_se(RNG.permutation(w), z)[1] > 2 * se
    assert (
        stats.ratio_se(w, -z)[1] == pytest.approx(stats.ratio_se(-w, z)[1])
        and stats.ratio_se(w, -z)[1] > 0
    )


def test_bootstrap_draws_rows_together_repeatably_at_the_level_asked_for():
    table = RNG.normal(size=(60, 3))

    def together(a, b):
        assert np.array_equal(a, b)
        return a[:, 0].mean()

    low, high = stats.bootstrap(together, table, table)
    assert (low, high) == stats.bootstrap(together, table, table)
    assert (low, high) != stats.bootstrap(together, table, table, seed=1)
    narrow = stats.bootstrap(together, table, table, level=0.5)
    assert low < narrow[0] < table[:, 0].mean() < narrow[1] < high
    assert (high - low) / (2 * 1.96) == pytest.approx(stats.mean_se(table[:, 0])[1], rel=0.15)


@pytest.mark.parametrize(
    "function",
    [stats.spearman, stats.loglog, stats.ratio_se, stats.median_ratio, stats.pareto],
)
def test_samples_of_different_length_are_refused(function):
    with pytest.raises(ValueError, match="differ"):
        function([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="differ in length"):
        stats.bootstrap(lambda a, b: 0.0, [1.0, 2.0, 3.0], [1.0, 2.0])


def test_ratios_by_hand():
    a, b = [1.0, 2.0, 9.0, 5.0], [4.0, 4.0, 3.0, 0.0]
    assert stats.median_ratio(a, b) == 0.5
    assert stats.clamped_mean_ratio(a, b) == pytest.approx((0.25 + 0.5 + 1) / 3)


def test_the_front_is_the_running_minimum():
    sizes, losses = [30, 10, 20, 20, 40, 50, 5], [0.3, 0.5, 0.45, 0.4, 0.3, 0.1, math.nan]
    assert stats.pareto(sizes, losses).tolist() == [1, 3, 0, 5]
    assert stats.pareto([], []).tolist() == []


def test_interpolation_is_linear_in_the_logarithm_along_the_front_and_silent_outside():
    sizes, losses = [100, 200, 150], [1.0, 0.01, 5.0]
    assert stats.interpolate(sizes, losses, 150) == pytest.approx(0.1)
    assert stats.interpolate(sizes, losses, 200) == pytest.approx(0.01)
    values = stats.interpolate(sizes, losses, [99, 125, 201])
    assert np.isnan(values[[0, 2]]).all() and values[1] == pytest.approx(10**-0.5)
    assert math.isnan(stats.interpolate([], [], 3))


def test_an_interval_by_students_t():
    mean, low, high = stats.mean_interval([1.0, 2.0, 3.0])
    assert (mean, high - mean) == (2.0, pytest.approx(4.3027 / 3**0.5, rel=1e-4))
    assert mean - low == high - mean
    assert stats.mean_interval([2.0]) == (2.0, None, None)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_few_equal_observations_have_no_interval(value):
    assert stats.mean_interval([value] * 3) == (pytest.approx(value), None, None)


def test_welch_by_scipy_and_with_a_single_observation():
    x, y = RNG.normal(size=4), 3 * RNG.normal(size=7)
    error, t = stats.welch(x, y)
    interval = scipy.stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    assert interval.high - interval.low == pytest.approx(2 * t * error)
    assert stats.welch(x, [5.0]) == pytest.approx((scipy.stats.sem(x), scipy.stats.t.ppf(0.975, 3)))
    assert stats.welch([1.0], [5.0])[0] == 0
