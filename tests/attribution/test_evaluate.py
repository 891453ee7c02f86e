"""Measures against SciPy, truth against one-by-one retraining, ceilings, resuming, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import cases
import dualfluence as dfl
import problems
from dualfluence.attribution import Attribution, evaluate

RNG = np.random.default_rng(0)


def _case(q=4, n=10, s=30):
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(q, n))
    masks = evaluate.random_masks(n, s, seed=2)
    return scores, masks, -(masks @ scores.T) + 0.5 * rng.normal(size=(s, q))


def test_lds_is_the_mean_rank_correlation():
    scores, masks, targets = _case()
    got = evaluate.lds(scores, masks, targets)
    predicted = -(masks @ scores.T)
    want = [stats.spearmanr(predicted[:, j], targets[:, j]).statistic for j in range(4)]
    np.testing.assert_allclose(got.per_query, want, rtol=1e-12)
    assert got.value == pytest.approx(np.mean(want))
    assert got.interval[0] <= got.value <= got.interval[1]


def test_ties_share_their_rank():
    scores, masks, targets = _case()
    targets = np.round(targets)
    got = evaluate.lds(scores, masks, targets).per_query
    predicted = -(masks @ scores.T)
    want = [stats.spearmanr(predicted[:, j], targets[:, j]).statistic for j in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_perfect_scores_have_lds_one_and_attributions_are_taken_as_they_are():
    scores, masks, _ = _case()
    got = evaluate.lds(Attribution(values=scores, of="loss"), masks, -(masks @ scores.T))
    assert got.value == pytest.approx(1.0)


def test_queries_that_do_not_vary_are_left_out_and_counted():
    scores, masks, targets = _case()
    targets[:, 1] = 3.0
    got = evaluate.lds(scores, masks, targets)
    assert np.isnan(got.per_query[1])
    assert got.notes == ("1 queries do not vary and are left out",)


def test_noise_ceiling_is_what_the_truth_itself_reaches():
    """A perfect predictor of the mean correlates with noisy means by the ceiling."""
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(1, 400, 40))
    repeats = signal + 1.5 * rng.normal(size=(10, 400, 40))
    reached = np.mean(
        [stats.spearmanr(signal[0, :, j], repeats.mean(0)[:, j]).statistic for j in range(40)]
    )
    got = evaluate.noise_ceiling(repeats)
    assert abs(got.value - reached) < 0.02  # 400 subsets: a correlation is good to about 0.02


def test_leave_one_out_correlation_is_pearsons():
    a, b = RNG.normal(size=(3, 20)), RNG.normal(size=(3, 20))
    got = evaluate.loo_correlation(a, b).per_query
    np.testing.assert_allclose(got, [np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)])


def test_auc_counts_pairs():
    suspicion = np.array([0.1, 0.9, 0.5, 0.5, 0.3])
    wrong = np.array([False, True, True, False, False])
    # Pairs: 0.9 beats all three, 0.5 beats two and ties with one.
    assert evaluate.mislabel_auc(suspicion, wrong) == pytest.approx((3 + 2.5) / 6)


def test_removal_curves_come_apart_for_true_scores():
    effects = np.linspace(-1, 1, 20)

    def retrain(masks):
        return (~masks) @ effects[:, None]

    curve = evaluate.removal_curve(effects[None], retrain, [0, 2, 5])
    assert curve.helpful[2] > curve.random[2] > curve.harmful[2]
    assert curve.helpful[0] == curve.harmful[0]
    evaluate.plot_removal(curve)


def _fitted(name="softmax"):
    p = problems.linear_problem(14, 3, 60, name, q=5, ridge=0.05)
    return p, cases.fit(p)


def test_linearised_models_are_retrained_as_one_by_one():
    p, fitted = _fitted()
    masks = evaluate.random_masks(14, 6, seed=0)
    got = evaluate.retrain_linearised(fitted, masks, p.x_q, p.y_q, relative=1e-9, progress=False)
    for row, target in zip(masks, got.targets, strict=True):
        theta = cases.retrain(p, row.astype(float))
        f = p.f0_q + p.J_q @ theta
        want = np.asarray(fitted.loss.value(jnp.asarray(f), jnp.asarray(p.y_q)))
        np.testing.assert_allclose(target, want, atol=1e-7)


@pytest.mark.thorough
def test_scores_of_a_linearised_model_predict_its_own_retraining():
    p = problems.linear_problem(40, 3, 30, "softmax", q=12, ridge=0.1, seed=3)
    fitted = cases.fit(p)
    masks = evaluate.random_masks(40, 40, seed=0)
    truth = evaluate.retrain_linearised(fitted, masks, p.x_q, p.y_q, progress=False)
    scores = fitted.attribute(p.x_q, p.y_q, progress=False)
    assert evaluate.lds(scores, truth.masks, truth.targets).value > 0.9


def _train(key, indices):
    x = jnp.asarray(np.linspace(-1, 1, 12))
    noise = 0.01 * jax.random.normal(key)
    return jnp.mean(x[indices] ** 2) + noise


def _measure(params):
    return params * jnp.arange(1.0, 4.0)


def test_networks_are_trained_with_the_seeds_that_are_said():
    masks = evaluate.random_masks(12, 5, seed=0)
    got = evaluate.retrain_networks(
        _train, _measure, masks, seeds=[7, 8], slice_size=4, progress=False
    )
    assert got.repeats.shape == (2, 5, 3)
    for r, seed in enumerate([7, 8]):
        for j, row in enumerate(masks):
            want = _measure(_train(jax.random.key(seed), jnp.asarray(np.flatnonzero(row))))
            np.testing.assert_allclose(got.repeats[r, j], want, rtol=1e-12)


def test_subsets_of_one_seed_differ_by_their_data_alone():
    masks = np.repeat(evaluate.random_masks(12, 1, seed=0), 3, axis=0)
    got = evaluate.retrain_networks(_train, _measure, masks, seeds=[7, 8], progress=False).repeats
    np.testing.assert_array_equal(got[:, 1:], got[:, :1].repeat(2, axis=1))
    assert (got[0] != got[1]).all()


def test_a_killed_truth_goes_on_bit_for_bit(tmp_path):
    masks = evaluate.random_masks(12, 5, seed=0)
    options = {"seeds": [7, 8], "slice_size": 4, "progress": False}
    want = evaluate.retrain_networks(_train, _measure, masks, **options).repeats

    def dies(done, total, label):
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate.retrain_networks(
            _train, _measure, masks, **(options | {"progress": dies}), folder=tmp_path
        )
    assert len(list(tmp_path.iterdir())) == 2
    got = evaluate.retrain_networks(_train, _measure, masks, **options, folder=tmp_path)
    np.testing.assert_array_equal(got.repeats, want)
    with pytest.raises(ValueError, match="other data"):
        evaluate.retrain_networks(
            _train, _measure, masks, **options, folder=tmp_path, name="another"
        )


def test_a_figure_of_methods_and_the_ceiling(tmp_path):
    scores, masks, targets = _case()
    methods = {"ours": evaluate.lds(scores, masks, targets)}
    ceiling = evaluate.noise_ceiling(np.stack([targets, targets + 0.1]))
    evaluate.plot_measured(methods, ceiling=ceiling).savefig(tmp_path / "lds.png")
    assert (tmp_path / "lds.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s, m, t: evaluate.lds(s.T, m, t), "masks for"),
        (lambda s, m, t: evaluate.lds(s[0], m, t), "must be a matrix"),
        (lambda s, m, t: evaluate.lds(s, m, t.T), r"targets must have shape \(s, q\)"),
        (lambda s, m, t: evaluate.lds(s, m * 3, t), "true or false"),
        (lambda s, m, t: evaluate.lds(s * np.nan, m, t), "finite"),
        (lambda s, m, t: evaluate.lds(s, m[:2], t[:2]), "at least 3 subsets"),
        (lambda s, m, t: evaluate.noise_ceiling(t), r"\(r, s, q\)"),
        (lambda s, m, t: evaluate.loo_correlation(s, t), "one shape"),
        (lambda s, m, t: evaluate.mislabel_auc(s[0], np.zeros(10)), "must be mislabelled"),
        (lambda s, m, t: evaluate.mislabel_auc(s[0], np.zeros(3)), "one length"),
        (lambda s, m, t: evaluate.removal_curve(s, lambda k: k, [11]), r"in \[0, 10\)"),
        (lambda s, m, t: evaluate.random_masks(1, 3, seed=0), "at least 1 and less than"),
        (
            lambda s, m, t: evaluate.retrain_networks(
                _train, _measure, np.tril(np.ones((3, 10), bool)), seeds=[0]
            ),
            "one size",
        ),
        (
            lambda s, m, t: evaluate.retrain_networks(_train, _measure, m, seeds=[0, 0]),
            "distinct",
        ),
        (
            lambda s, m, t: evaluate.retrain_linearised(_fitted()[1], m, t, t),
            r"booleans of shape \(s, 14\)",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call(*_case())


def test_scores_of_another_number_of_queries_are_refused():
    scores, masks, targets = _case()
    with pytest.raises(ValueError, match="one row per subset, one column per query"):
        evaluate.lds(scores[:2], masks, targets)
    assert isinstance(dfl.attribution.evaluate.lds(scores, masks, targets).value, float)
