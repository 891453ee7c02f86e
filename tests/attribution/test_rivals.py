"""The rivals against their definitions, by Jacobians in NumPy."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import token_nets as nets

import cases
import dualfluence as dfl
from dualfluence.attribution import (
    TRAK,
    GradCos,
    GradDot,
    TracIn,
    _tokens,
    evaluate,
    gradient_dot,
)

N, Q, C, D = 8, 3, 3, 4


def _case():
    rng = np.random.default_rng(0)
    data = (
        rng.normal(size=(N, D)),
        rng.integers(0, C, N),
        rng.normal(size=(Q, D)),
        rng.integers(0, C, Q),
    )
    return data, [cases.mlp_params(jax.random.key(k), (D, 5, C)) for k in range(2)]


def _terms(params, x, y):
    """Gradients of the margin and of the loss, `(n, p)`, and `1 − p`."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    f = lambda t: cases.mlp(unravel(t), jnp.asarray(x))  # noqa: E731
    log_p = lambda t: jax.nn.log_softmax(f(t))[np.arange(len(y)), y]  # noqa: E731
    margin = lambda t: log_p(t) - jnp.log1p(-jnp.exp(log_p(t)))  # noqa: E731
    return (
        np.asarray(jax.jacobian(margin)(flat)),
        -np.asarray(jax.jacobian(log_p)(flat)),
        1 - np.exp(np.asarray(log_p(flat))),
    )


def test_gradient_dot_is_the_product_of_gradients():
    (x, y, xq, yq), (params, _) = _case()
    _, train, _ = _terms(params, x, y)
    _, query, _ = _terms(params, xq, yq)
    got = gradient_dot(cases.mlp, params, x, y, xq, yq)
    np.testing.assert_allclose(got, query @ train.T / N, rtol=1e-9, atol=1e-12)


def test_trak_averages_over_models_before_it_multiplies():
    (x, y, xq, yq), models = _case()
    total, missing = 0.0, 0.0
    for params in models:
        phi, _, short = _terms(params, x, y)
        phi_q, _, _ = _terms(params, xq, yq)
        K = phi @ phi.T
        total = total + phi_q @ phi.T @ np.linalg.inv(K + 0.1 * np.trace(K) / N * np.eye(N))
        missing = missing + short
    got = TRAK(cases.mlp, models, damping=0.1).attribute(x, y, xq, yq).values
    np.testing.assert_allclose(got, total * missing / 4, rtol=1e-7, atol=1e-10)


def test_gradient_cosine_is_the_cosine():
    (x, y, xq, yq), (params, _) = _case()
    a, b = _terms(params, xq, yq)[1], _terms(params, x, y)[1]
    want = (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    got = GradCos(cases.mlp, params).attribute(x, y, xq, yq)
    np.testing.assert_allclose(got.values, want, rtol=1e-9, atol=1e-12)
    assert got.unit is None


def test_tracin_adds_up_checkpoints_by_their_rates():
    (x, y, xq, yq), models = _case()
    want = 0.0
    for rate, params in zip((0.1, 0.02), models, strict=True):
        want = want + rate * _terms(params, xq, yq)[1] @ _terms(params, x, y)[1].T / N
    got = TracIn(cases.mlp, models, (0.1, 0.02)).attribute(x, y, xq, yq)
    np.testing.assert_allclose(got.values, want, rtol=1e-9, atol=1e-12)
    same = TracIn(cases.mlp, models[:1]).attribute(x, y, xq, yq).values
    dot = GradDot(cases.mlp, models[0]).attribute(x, y, xq, yq).values
    np.testing.assert_array_equal(same, dot)


def test_projected_trak_tends_to_the_exact_kernel():
    (x, y, xq, yq), models = _case()
    exact = TRAK(cases.mlp, models, damping=0.1).attribute(x, y, xq, yq).values
    off = []
    for k in (10, 1000):
        got = TRAK(cases.mlp, models, k, damping=0.1).attribute(x, y, xq, yq).values
        off.append(cases.relative(got, exact))
    # Entries of the kernel are off by 1/√k of their size, 3 %; the solve at this damping
    # makes that ten times as much at most.
    assert off[1] < 0.3
    assert off[1] < off[0] / 2


def test_one_sign_for_all_of_them():
    """The query itself, duplicated into the training set, must help it by every score."""
    (x, y, _, _), models = _case()
    xq, yq = x[:2], y[:2]
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "linearised": False}
    model = dfl.linearize(cases.mlp, models[0])
    found = [
        GradDot(cases.mlp, models[0]).attribute(x, y, xq, yq),
        GradCos(cases.mlp, models[0]).attribute(x, y, xq, yq),
        TracIn(cases.mlp, models).attribute(x, y, xq, yq),
        TRAK(cases.mlp, models).attribute(x, y, xq, yq),
        dfl.primal.attribute(model, models[0], x, y, xq, yq, **options),
        dfl.primal.attribute(model, models[0], x, y, xq, yq, solver=dfl.primal.EKFAC(), **options),
    ]
    masks = evaluate.random_masks(N, 5, seed=0)
    for scores in found:
        assert scores.values.shape == (2, N)
        assert scores.values[0, 0] > 0
        assert scores.values[1, 1] > 0
        assert scores.direction == 1
        targets = -(masks @ scores.values.T)  # what these scores predict themselves
        assert evaluate.lds(scores, masks, targets).value == pytest.approx(1)


def test_other_quantities_keep_their_direction():
    (x, y, xq, yq), (params, _) = _case()
    loss, margin = (
        GradDot(cases.mlp, params).attribute(x, y, xq, yq, of=of) for of in ("loss", "margin")
    )
    assert margin.direction == -1
    # The loss falls where the margin rises: same gradients up to a negative factor per query.
    ratio = loss.values / margin.values
    np.testing.assert_allclose(ratio, ratio[:, :1] * np.ones(N), rtol=1e-8)
    assert (ratio < 0).all()


def test_points_may_be_a_tree_of_arrays():
    """A dict of a table and a scale per point, as Hugging Face has tokens and masks."""
    (x, y, xq, yq), models = _case()
    tree = lambda a: {"table": a[:, :2], "rest": (a[:, 2:], np.ones(len(a), np.int32))}  # noqa: E731

    def network(p, points):
        table, (rest, factor) = points["table"], points["rest"]
        return cases.mlp(p, jnp.concatenate([table, rest], axis=1)) * factor[:, None].astype(float)

    for make in (
        lambda fn: GradDot(fn, models[0]),
        lambda fn: GradCos(fn, models[0]),
        lambda fn: TracIn(fn, models, (0.1, 0.02)),
        lambda fn: TRAK(fn, models, damping=0.1),
        lambda fn: TRAK(fn, models, projection=30),
    ):
        want = make(cases.mlp).attribute(x, y, xq, yq).values
        got = make(network).attribute(tree(x), y, tree(xq), yq)
        np.testing.assert_allclose(got.values, want, rtol=1e-9, atol=1e-12)
        assert got.x is None
    with pytest.raises(ValueError, match="expected a tree of arrays like the training features"):
        GradDot(network, models[0]).attribute(tree(x), y, xq, yq)


@pytest.mark.parametrize("blocks", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_gradient_products_of_sequences_are_brute_force(monkeypatch, blocks):
    if blocks:
        monkeypatch.setattr(_tokens, "panel_size", lambda train: 4)
        monkeypatch.setattr(_tokens, "query_panel", lambda train, queries: 1)
        monkeypatch.setattr(_tokens.Sequences, "at_once", lambda self, rows: 3)
    data, models = nets.data(), [nets.params(k) for k in range(2)]
    x, y, xq, yq = data

    def rows(p, x, y):
        return np.einsum(
            "nap,na->np", nets.jacobian(p, x), nets.gradients(p, x, y).reshape(len(x), -1)
        )

    a, b = rows(models[0], xq, yq), rows(models[0], x, y)
    dot = GradDot(nets.net, models[0]).attribute(*data)
    np.testing.assert_allclose(dot.values, a @ b.T / len(x), rtol=1e-9, atol=1e-12)
    cosine = GradCos(nets.net, models[0]).attribute(*data).values
    lengths = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(cosine, a @ b.T / lengths, rtol=1e-9, atol=1e-12)
    want = 0.1 * a @ b.T + 0.02 * rows(models[1], xq, yq) @ rows(models[1], x, y).T
    rates, loaded = (0.1, 0.02), (models, lambda k: models[k])
    for checkpoints in loaded:
        got = TracIn(nets.net, checkpoints, rates).attribute(*data, loss=dfl.TokenCrossEntropy())
        np.testing.assert_allclose(got.values, want / len(x), rtol=1e-9, atol=1e-12)
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), models[0])
    got = GradDot(nets.net, narrow).attribute(*data).values
    assert cases.relative(got, dot.values) < 1e-5
    with pytest.raises(ValueError, match="y: targets have 3 tokens per sequence"):
        GradDot(nets.net, models[0]).attribute(x, y[:, :-1], xq, yq)


def test_rivals_refuse_what_they_cannot_score():
    (x, y, xq, yq), (params, _) = _case()
    for make, words in [
        (lambda: TracIn(cases.mlp, []), "at least one checkpoint"),
        (lambda: TracIn(cases.mlp, [params], [0.1, 0.2]), "one number or 1, one per checkpoint"),
        (lambda: TracIn(cases.mlp, [params], -0.1), "must be positive, got -0.1"),
        (lambda: TracIn(cases.mlp, lambda k: params, 0.1), "must have one number per checkpoint"),
        (lambda: TRAK(cases.mlp, []), "at least one model"),
        (lambda: TRAK(cases.mlp, [params], projection=0), "projection must be at least 1"),
        (lambda: TRAK(cases.mlp, [params], damping=0.0), "damping must be a positive number"),
        (
            lambda: TRAK(cases.mlp, [params]).attribute(x, np.eye(C)[y], xq, yq),
            "y must be class labels",
        ),
        (lambda: GradDot(cases.mlp, params).attribute(x, y[:3], xq, yq), "expected 8 rows"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
