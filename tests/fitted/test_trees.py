"""Inputs that are trees of arrays: a small transformer on tokens with a mask, through every call.

The truth is the NumPy oracle on Jacobians that JAX forms whole, on the user's own trees.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import dualfluence as dfl
import gates
import oracles
from dualfluence._support.points import Form, form_of, is_tree
from users import ordinary

RNG = np.random.default_rng(0)
N, T, V, D, C = 10, 5, 7, 4, 3
RIDGE = 0.05
GONE = [1, 4]


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[0]))


PARAMS = {
    "embedding": draw(V, D),
    "query": draw(D, D),
    "key": draw(D, D),
    "value": draw(D, D),
    "head": {"w": draw(D, C), "b": jnp.zeros(C)},
}


@ordinary
def transformer(params, x):
    """One block of attention that does not look at what the mask hides, then a masked mean."""
    tokens, mask = x["tokens"], x["mask"]
    h = params["embedding"][tokens]
    scores = jnp.einsum("ntd,nsd->nts", h @ params["query"], h @ params["key"]) / np.sqrt(D)
    weights = jax.nn.softmax(jnp.where(mask[:, None, :], scores, -1e9), axis=-1)
    h = h + jnp.tanh(weights @ (h @ params["value"]))
    pooled = jnp.einsum("nt,ntd->nd", mask / mask.sum(axis=1, keepdims=True), h)
    return pooled @ params["head"]["w"] + params["head"]["b"]


def sentences(n):
    lengths = RNG.integers(1, T + 1, size=n)
    tokens = RNG.integers(0, V, size=(n, T)).astype(np.int32)
    return {"tokens": tokens, "mask": np.arange(T) < lengths[:, None]}


X, XQ, NEW = sentences(N), sentences(3), sentences(2)
Y, YQ = RNG.integers(0, C, size=N), RNG.integers(0, C, size=3)
FREE = {"embedding": None, "query": None, "key": None, "value": 2.0, "head": {"w": None, "b": 50.0}}


def rows(x, index):
    return {k: v[np.asarray(index)] for k, v in x.items()}


def joined(a, b):
    return {k: np.concatenate([a[k], b[k]]) for k in a}


def seen(x, scale=1.0):
    """`J P^{1/2}` and `f₀`, formed whole."""
    theta, unravel = ravel_pytree(PARAMS)
    whole = jax.jacrev(lambda t: transformer(unravel(t), x))(theta)
    return np.asarray(whole) * np.sqrt(scale), np.asarray(transformer(PARAMS, x))


def retrained(x, y, s, xq=XQ):
    """Outputs of the optimum at queries, and `θ − θ₀`."""
    J, f0 = seen(x)
    step = oracles.retrain(J, f0, np.eye(C)[y], oracles.normalise(s), RIDGE, oracles.softmax_ce)
    J_q, f0_q = seen(xq)
    return f0_q + J_q @ step, step


def moved(params):
    return np.asarray(ravel_pytree(params)[0] - ravel_pytree(PARAMS)[0])


def fit(**options):
    settings = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": RIDGE, "progress": False} | options
    return dfl.fit(dfl.linearize(transformer, PARAMS), X, Y, **settings)


@pytest.fixture(scope="module")
def fitted():
    return fit()


SETTINGS = {
    "dense": {"kernel": "dense"},
    "matrix-free": {"kernel": "matrix-free", "solver": dfl.CG()},
    "mesh": {"mesh": jax.devices()},
    "mesh, matrix-free": {"mesh": jax.devices(), "kernel": "matrix-free"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_a_transformer_with_a_mask_is_fitted_and_loses_points(name):
    model = fit(**SETTINGS[name])
    for got, s in ((model, np.ones(N)), (None, ~np.isin(np.arange(N), GONE))):
        got = got or model.edit(dfl.Remove(GONE), until=1e-8)
        outputs, step = retrained(X, Y, s.astype(float))
        np.testing.assert_allclose(got.predict(XQ), outputs, atol=1e-7)
        np.testing.assert_allclose(moved(got.params()), step, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["relabel", "replace", "add"])
def test_every_edit_equals_retraining(fitted, kind):
    x, y, s = X, Y.copy(), np.ones(N)
    if kind == "relabel":
        y[GONE] = (y[GONE] + 1) % C
        edit = dfl.Relabel(GONE, y[GONE])
    elif kind == "replace":
        x = {k: v.copy() for k, v in X.items()}
        for k in x:
            x[k][GONE] = NEW[k]
        edit = dfl.Replace(GONE, NEW)
    else:
        x, y, s = joined(X, NEW), np.append(Y, [0, 2]), np.ones(N + 2)
        edit = dfl.Add(NEW, [0, 2])
    update = fitted.edit(edit, until=1e-8)
    outputs, _ = retrained(x, y, s)
    np.testing.assert_allclose(update.predict(XQ), outputs, atol=1e-7)
    again = fitted.retrain(edit, progress=False)
    np.testing.assert_allclose(again.predict(XQ), outputs, atol=1e-7)
    later = update.commit().edit(dfl.Remove([0]), until=1e-8)
    want = np.append(0.0, s[1:])
    np.testing.assert_allclose(later.predict(XQ), retrained(x, y, want)[0], atol=1e-7)


@pytest.mark.thorough
def test_attribution_is_what_leaving_each_point_out_adds_to_the_loss(fitted):
    scores = fitted.attribute(XQ, YQ, refine=1e-8, progress=False)
    onehot = np.eye(C)[YQ]
    before = oracles.softmax_ce(retrained(X, Y, np.ones(N))[0], onehot)[0]
    for i in (0, 3):
        s = np.ones(N)
        s[i] = 0
        after = oracles.softmax_ce(retrained(X, Y, s)[0], onehot)[0]
        np.testing.assert_allclose(scores.values[:, i], after - before, atol=1e-6)


def test_features_come_back_as_they_were_given(fitted):
    for k in X:
        np.testing.assert_array_equal(fitted.x[k], X[k])
        assert fitted.x[k].dtype == X[k].dtype
    assert "(5,) bool, (5,) int32" in repr(fitted)


@pytest.mark.thorough
@pytest.mark.parametrize("scaled", [False, True])
def test_a_trained_transformer_is_taken_over_saved_and_purged(tmp_path, scaled):
    model = dfl.linearize(transformer, PARAMS, scale=FREE if scaled else None)
    start = dfl.fit(
        model, X, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, progress=False
    ).params()
    taken = dfl.from_trained(
        model, start, X, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE,
        linearised=True, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(moved(taken.params()), moved(start), atol=1e-12)
    clean = taken.edit(dfl.Remove(GONE), steps=6).commit().purge()
    for k in X:
        np.testing.assert_array_equal(rows(clean.x, GONE)[k], np.repeat(X[k][:1], 2, axis=0))
    clean.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", model, progress=False)
    np.testing.assert_array_equal(again.predict(XQ), clean.predict(XQ))
    s = np.ones(N)
    s[[*GONE, 7]] = 0
    after = again.edit(dfl.Remove([7]), steps=6)
    P = np.ones(moved(PARAMS).size)
    if scaled:
        spread = jax.tree.map(
            lambda p, v: jnp.full(v.shape, 1.0 if p is None else p), FREE, PARAMS,
            is_leaf=lambda p: p is None,
        )  # fmt: skip
        P = np.asarray(ravel_pytree(spread)[0])
    J, f0 = seen(X, P)
    onehot = np.eye(C)[Y]
    phi = oracles.retrain(J, f0, onehot, oracles.normalise(s), RIDGE, oracles.softmax_ce)
    np.testing.assert_allclose(moved(after.params()), np.sqrt(P) * phi, atol=1e-7)


@pytest.mark.thorough
def test_a_low_rank_model_of_all_points_is_the_model_itself(fitted):
    low = dfl.low_rank(dfl.linearize(transformer, PARAMS), X, N * C)
    other = dfl.fit(low, X, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, progress=False)
    np.testing.assert_allclose(other.predict(X), fitted.predict(X), atol=1e-6)


@pytest.mark.thorough
def test_a_kernel_on_disk_and_a_desk_take_trees(tmp_path, fitted):
    model = dfl.linearize(transformer, PARAMS)
    store = dfl.store.build(model, X, tmp_path / "k", tile=4, progress=False)
    on_disk = fit(kernel=store.operator())
    np.testing.assert_allclose(on_disk.predict(XQ), fitted.predict(XQ), atol=1e-8)
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        desk.remove([1])
        desk.add(["new", "newer"], NEW, [0, 2])
        desk.correct([2], rows(NEW, [1]))
        outputs = desk.model.predict(XQ)
        desk.checkpoint(tmp_path / "model.npz")
    x, y, s = joined(joined(X, NEW), rows(NEW, [1])), np.append(Y, [0, 2, Y[2]]), np.ones(N + 3)
    s[[1, 2]] = 0
    np.testing.assert_allclose(outputs, retrained(x, y, s)[0], atol=1e-4)

    def kernel(a, b):
        return np.einsum("iap,jbp->iajb", seen(a)[0], seen(b)[0])

    report = dfl.unlearning.verify(tmp_path / "desk", tmp_path / "model.npz", kernel=kernel)
    assert report.valid, report.summary()


@pytest.mark.thorough
def test_parameter_space_takes_trees(fitted):
    model = dfl.linearize(transformer, PARAMS)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": RIDGE}
    update = dfl.primal.influence(
        model, fitted.params(), X, Y, dfl.Remove(GONE), rtol=1e-10, **options
    )
    one = fitted.edit(dfl.Remove(GONE))
    np.testing.assert_allclose(moved(update.params()), moved(one.params()), atol=1e-6)
    np.testing.assert_allclose(update.predict(XQ), one.predict(XQ), atol=1e-6)
    scores = dfl.primal.attribute(model, fitted.params(), X, Y, XQ, YQ, **options)
    same = fitted.attribute(XQ, YQ, first_order=True, progress=False)
    assert np.corrcoef(scores.values.ravel(), same.values.ravel())[0, 1] > 0.999


@pytest.mark.thorough
def test_checkpoints_are_attributed_on_trees():
    run = dfl.attribution.Trajectory(transformer, [PARAMS, PARAMS], [5, 10], 0.1)
    scores = run.attribute(X, Y, XQ, YQ, progress=False)
    flat = dfl.attribution.Trajectory(
        lambda p, x: transformer(p, {"tokens": x[:, :T], "mask": x[:, T:] > 0}),
        [PARAMS, PARAMS], [5, 10], 0.1,
    )  # fmt: skip

    def as_one(x):
        return np.concatenate([x["tokens"], x["mask"]], axis=1)

    same = flat.attribute(as_one(X), Y, as_one(XQ), YQ, progress=False)
    np.testing.assert_allclose(scores.values, same.values, rtol=1e-8, atol=1e-10)


def test_the_linearised_network_itself_takes_trees(fitted):
    model = dfl.linearize(transformer, PARAMS)
    J, f0 = seen(X)
    K = np.einsum("iap,jbp->iajb", J, J)
    np.testing.assert_allclose(model.kernel(X), K, atol=1e-12)
    np.testing.assert_allclose(model.kernel_diagonal(X), np.einsum("iaia->ia", K), atol=1e-12)
    np.testing.assert_allclose(model.base_outputs(X), f0, atol=1e-14)
    np.testing.assert_allclose(
        fitted.network.linearised(fitted.params(), XQ), fitted.predict(XQ), atol=1e-10
    )


class Pair(NamedTuple):
    image: np.ndarray
    age: np.ndarray


@pytest.mark.parametrize("kind", gates.table(["tuple", "named tuple", "nested"], ["nested"]))
def test_other_trees_and_dtypes(tmp_path, kind):
    image = RNG.normal(size=(6, 2, 2)).astype(np.float32)
    age = RNG.integers(0, 90, size=6).astype(np.int16)
    half = RNG.normal(size=6).astype(np.float16)
    x = {
        "tuple": (image, age),
        "named tuple": Pair(image, age),
        "nested": {"a": (image, [age, half])},
    }
    x, y = x[kind], RNG.normal(size=(6, 1))

    @ordinary
    def fn(params, x):
        image, age, *rest = jax.tree.leaves(x)
        shift = rest[0].astype(jnp.float64)[:, None] if rest else 0.0
        flat = image.reshape(image.shape[0], -1).astype(jnp.float64)
        return flat @ params["w"] + params["b"] * (age[:, None] / 90.0) + shift

    model = dfl.linearize(fn, {"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)})
    fitted = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1, progress=False)
    A = np.column_stack([image.reshape(6, -1), age / 90])
    shift = half[:, None].astype(float) if kind == "nested" else 0.0
    theta = np.linalg.solve(A.T @ A / 6 + 0.1 * np.eye(5), A.T @ (y - shift) / 6)
    np.testing.assert_allclose(fitted.predict(x), A @ theta + shift, atol=1e-9)
    assert jax.tree.structure(fitted.x) == jax.tree.structure(x)
    if kind == "named tuple":
        with pytest.raises(ValueError, match="hold only dicts with string keys, tuples and lists"):
            fitted.save(tmp_path / "a.npz")
        return
    fitted.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", model, progress=False)
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        ({}, ValueError, "a tree without any"),
        (
            {"tokens": X["tokens"], "mask": X["mask"][:-1]},
            ValueError,
            "the same number of them, got shapes",
        ),
        ({"tokens": X["tokens"], "mask": 3.0}, TypeError, r"x\['mask'\]: expected an array"),
        ({"tokens": X["tokens"], "mask": "no"}, TypeError, r"x\['mask'\].*got str"),
        ({"tokens": X["tokens"], "mask": np.array(1)}, ValueError, "points on axis 0"),
        (
            {"tokens": X["tokens"] * 1j, "mask": X["mask"]},
            TypeError,
            r"x\['tokens'\].*real numbers",
        ),
        ({"tokens": X["tokens"] * np.nan, "mask": X["mask"]}, ValueError, r"x\['tokens'\].*finite"),
        ({"tokens": X["tokens"], "maks": X["mask"]}, ValueError, "apply_fn.* fails for x of"),
    ],
)
def test_trees_that_make_no_sense_are_refused(x, error, words):
    model = dfl.linearize(transformer, PARAMS)
    with pytest.raises(error, match=words):
        dfl.fit(model, x, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, progress=False)


def test_queries_and_new_points_must_be_like_the_training_points(fitted):
    with pytest.raises(ValueError, match="expected a tree of arrays like the training features"):
        fitted.predict(XQ["tokens"])
    with pytest.raises(ValueError, match="expected a tree of arrays"):
        fitted.predict({"tokens": XQ["tokens"]})
    with pytest.raises(ValueError, match=r"\['tokens'\]: expected shape \(q, 5\), got \(3, 4\)"):
        fitted.predict({**XQ, "tokens": XQ["tokens"][:, 1:]})
    with pytest.raises(ValueError, match="expected a tree of arrays"):
        fitted.edit(dfl.Add(np.ones((1, 5)), [0]))
    with pytest.raises(ValueError, match="expected 2 rows, one per index"):
        dfl.Replace(GONE, XQ)
    plain = dfl.linearize(lambda p, x: x @ p, jnp.ones((2, 1)))
    one = dfl.fit(plain, np.eye(2), np.ones((2, 1)), loss=dfl.SquaredError(), ridge=1.0)
    with pytest.raises(TypeError, match="expected one array of numbers, got a dict"):
        one.predict({"a": np.eye(2)})
    with pytest.raises(TypeError, match="expected one array of numbers, got a dict"):
        one.edit(dfl.Add({"a": np.eye(2)}, np.ones((2, 1))))


def test_what_needs_one_array_says_so():
    with pytest.raises(TypeError, match="tree of arrays need a network made by linearize"):
        dfl.fit(lambda a, b: a["tokens"] @ b["tokens"].T, X, Y, loss=dfl.SquaredError(), ridge=1.0)


def test_a_list_stays_one_array_and_a_tuple_of_numbers_too():
    assert not is_tree([[1.0, 2.0], [3.0, 4.0]])
    assert not is_tree(((1.0, 2.0), (3.0, 4.0)))
    assert not is_tree(np.eye(2))
    assert is_tree((np.eye(2), np.ones(2)))
    form = form_of("x", {"a": np.eye(2, dtype=np.float32)})
    assert isinstance(form, Form)
    assert Form.from_plain(form.to_plain()) == form
