"""A scale of the ridge: the kernel is `JPJᵀ` in every form, and one number per leaf costs no rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.kernels import kernel_report
from dualfluence.operators import MatrixFreeOperator
from users import ordinary

RNG = np.random.default_rng(0)
N, D, H, C = 9, 4, 6, 3
X, XQ = (jnp.asarray(RNG.normal(size=(n, D))) for n in (N, 5))
PARAMS = {
    "w1": RNG.normal(size=(D, H)) / 2,
    "b1": RNG.normal(size=H),
    "w2": RNG.normal(size=(H, C)),
    "b2": RNG.normal(size=C),
}
SCALE = {"w1": 2.0, "b1": RNG.uniform(0.5, 3, H), "w2": None, "b2": 100.0}


@ordinary
def apply(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def jacobian(x):
    """`J` of every leaf, `(n, c, size)`, one output of one point at a time."""
    grads = [
        [jax.grad(lambda p, xi=xi, a=a: apply(p, xi[None])[0, a])(PARAMS) for a in range(C)]
        for xi in jnp.asarray(x)
    ]
    return {k: np.array([[np.ravel(g[k]) for g in row] for row in grads]) for k in PARAMS}


def kernel(x1, x2, scale=SCALE):
    """`Σ_k P_k J_k(x1) J_k(x2)`, parameter by parameter."""
    J1, J2 = jacobian(x1), jacobian(x2)
    P = {
        k: np.ravel(np.broadcast_to(1 if s is None else s, PARAMS[k].shape))
        for k, s in scale.items()
    }
    return sum(np.einsum("iap,p,jbp->iajb", J1[k], P[k], J2[k]) for k in PARAMS)


@pytest.fixture(scope="module")
def model():
    return dfl.linearize(apply, PARAMS, scale=SCALE)


@pytest.mark.thorough
def test_every_form_of_the_kernel_is_that_of_the_scale(model):
    K, K_q = kernel(X, X), kernel(XQ, X)
    v = RNG.normal(size=(N, C))
    close = {"rtol": 1e-12, "atol": 1e-11}
    np.testing.assert_allclose(model.kernel(X), K, **close)
    np.testing.assert_allclose(model.kernel(XQ, X), K_q, **close)
    np.testing.assert_allclose(model.kernel(X, method="jacobian"), K, **close)
    np.testing.assert_allclose(jax.jit(lambda a, b: model.kernel_block(a, b))(XQ, X), K_q, **close)
    np.testing.assert_allclose(model.kernel_diagonal(X), np.einsum("iaia->ia", K), **close)
    products = np.einsum("iajb,jb->ia", K, v)
    free = MatrixFreeOperator(model, X, C)
    np.testing.assert_allclose(free.mv(jnp.asarray(v)), products, **close)
    np.testing.assert_allclose(free.diagonal(), np.einsum("iaia->ia", K), **close)
    np.testing.assert_allclose(free.dense(), K.reshape(N * C, N * C), **close)
    for form in ("dense", "matrix-free"):
        op = dfl.kernel_operator(model, X, kernel=form, progress=False)
        np.testing.assert_allclose(op.mv(jnp.asarray(v)), products, **close)


def test_products_with_the_jacobian_stay_those_of_the_network(model):
    J = jacobian(X)
    v = RNG.normal(size=(N, C))
    pulled = model.vjp(X, jnp.asarray(v))
    for k in PARAMS:
        want = np.einsum("iap,ia->p", J[k], v).reshape(PARAMS[k].shape)
        np.testing.assert_allclose(pulled[k], want, atol=1e-12)
    np.testing.assert_allclose(model(PARAMS, X), apply(PARAMS, X), atol=1e-14)


@pytest.mark.parametrize("method", ["nystrom", "random-features"])
def test_low_rank_models_approximate_the_kernel_of_the_scale(model, method):
    # As many features as rows (Nyström: exact), or very many (random: off by 1/√rank).
    rank = N * C if method == "nystrom" else 4000
    op = dfl.kernel_operator(dfl.low_rank(model, X, rank, method=method), X, progress=False)
    K = kernel(X, X).reshape(N * C, N * C)
    error = np.linalg.norm(op.dense() - K) / np.linalg.norm(K)
    assert error < (1e-9 if method == "nystrom" else 0.1)


def test_one_number_for_a_leaf_keeps_its_rule_and_an_array_does_not(model):
    def forms(m):
        own = m.bound(X)
        report = kernel_report(own.apply_fn, own.params, X, trainable=own._mask())
        return {leaf.path.removeprefix("move/"): leaf.form for leaf in report.leaves}

    plain = forms(dfl.linearize(apply, PARAMS))
    numbers = forms(dfl.linearize(apply, PARAMS, scale={**SCALE, "b1": 3.0}))
    assert numbers == plain
    assert forms(model) == {**plain, "b1": forms(model)["b1"]} != plain
    fitted = dfl.fit(model, X, np.ones((N, C)), loss=dfl.SquaredError(), ridge=0.1, progress=False)
    assert any("whole Jacobian in K: b1" in note for note in fitted.stats.notes)


def test_a_scale_of_one_everywhere_is_none():
    for scale in (None, 1, {"w1": 1.0, "b1": None, "w2": 1, "b2": None}, lambda path, leaf: 1):
        assert dfl.linearize(apply, PARAMS, scale=scale).scale is None


def test_a_scale_may_be_a_prefix_a_rule_or_free():
    tree = {"head": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "body": jnp.ones(3)}

    def fn(p, x):
        return x @ p["head"]["w"] + p["head"]["b"] + p["body"].sum()

    def scales(scale):
        return [None if s is None else float(s) for s in dfl.linearize(fn, tree, scale=scale).scale]

    assert scales({"head": 4.0, "body": None}) == [None, 4.0, 4.0]
    assert scales({"head": {"w": None, "b": "free"}, "body": 2}) == [2.0, 1e7, None]
    assert scales(lambda path, leaf: "free" if leaf.ndim == 1 else 1) == [1e7, 1e7, None]
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    assert [float(s) for s in dfl.linearize(fn, narrow, scale="free").scale] == [1e7] * 3


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        ({"w1": 1.0}, ValueError, "prefix of the parameters' tree"),
        (0.0, ValueError, "positive and finite"),
        (-1.0, ValueError, "got -1"),
        (np.inf, ValueError, "scale='free'"),
        (np.nan, ValueError, "positive and finite"),
        ("pulled", ValueError, "'free'"),
        ({**SCALE, "b1": np.ones(H + 1)}, ValueError, r"scale of b1 .*shape \(6,\), got \(7,\)"),
        ({**SCALE, "b2": 1j}, TypeError, "real numbers"),
        ({**SCALE, "b1": 1e-400}, ValueError, "positive"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(scale, error, words):
    with pytest.raises(error, match=words):
        dfl.linearize(apply, PARAMS, scale=scale)


def test_a_scale_of_a_leaf_that_is_not_trained_says_nothing():
    model = dfl.linearize(
        apply, PARAMS, trainable=lambda path, leaf: path[0].key == "w2", scale={**SCALE, "w2": 9.0}
    )
    (only,) = model.scale
    assert float(only) == 9
    J = jacobian(X)["w2"]
    np.testing.assert_allclose(
        model.kernel(X), 9 * np.einsum("iap,jbp->iajb", J, J), rtol=1e-12, atol=1e-12
    )


def test_other_numbers_of_the_same_scale_compile_nothing_new():
    """Compiled programs are found by the tree: numbers of the scale must be leaves of it."""
    models = [dfl.linearize(apply, PARAMS, scale={**SCALE, "w1": s}).bound(X) for s in (2.0, 5.0)]
    assert jax.tree.structure(models[0]) == jax.tree.structure(models[1])


def test_distances_are_those_of_the_inverse_scale(model):
    other = {k: v + RNG.normal(size=v.shape) for k, v in PARAMS.items()}
    squares = [
        ((other[k] - PARAMS[k]) ** 2 / (1 if SCALE[k] is None else SCALE[k])).sum() for k in PARAMS
    ]
    np.testing.assert_allclose(model.distance(other, PARAMS), np.sqrt(sum(squares)), rtol=1e-12)


@pytest.mark.parametrize(("scales", "named"), [([1.0, -2.0], "-2.0"), ([1.0, np.nan], "nan")])
def test_the_scale_that_is_wrong_is_named(scales, named):
    params = [jnp.ones((2, 1)), jnp.ones((2, 1))]
    with pytest.raises(ValueError, match=f"positive and finite in float64, got {named}"):
        dfl.linearize(lambda p, x: x @ (p[0] + p[1]), params, scale=scales)
    each = [jnp.ones((2, 1)), np.array([[1.0], [scales[1]]])]
    with pytest.raises(ValueError, match=f"got {named}"):
        dfl.linearize(lambda p, x: x @ (p[0] + p[1]), params, scale=each)
