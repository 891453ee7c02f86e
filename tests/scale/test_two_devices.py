"""Models whose rows are on two devices, an odd number of points between them, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
import gates
from dualfluence import attribution, operators, unlearning
from dualfluence.attribution import _leave_one_out_mesh, _ridge_path_mesh
from dualfluence.fitted._setup import place_source
from dualfluence.linalg import _spread
from dualfluence.unlearning import Engine

N, C, RIDGE = 7, 2, 0.1
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)), RNG.normal(size=(N, C))
NEW, NEW_Y = RNG.normal(size=(3, 3)), RNG.normal(size=(3, C))
XQ, YQ = RNG.normal(size=(4, 3)), RNG.normal(size=(4, C))
W0 = RNG.normal(size=(3, C))

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="one device has no shares")


def linear():
    return dfl.linearize(lambda w, x: x @ w, jnp.asarray(W0))


def rbf(a, b):
    return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1) / 4)


MODELS = {
    "dense": (linear, "dense"),
    "matrix-free": (linear, "matrix-free"),
    "kronecker": (lambda: rbf, dfl.KernelOptions(num_outputs=C)),
}


def retrained(name, x, y, weights, ridge=RIDGE):
    """Outputs at the queries after training on these points, and those of the points themselves."""
    kernel = (lambda a, b: np.asarray(rbf(a, b))) if name == "kronecker" else lambda a, b: a @ b.T
    start = (lambda a: np.zeros((len(a), C))) if name == "kronecker" else lambda a: a @ W0
    D = weights[:, None] / weights.sum()
    alpha = np.linalg.solve(ridge * np.eye(len(x)) + D * kernel(x, x), D * (y - start(x)))
    return start(XQ) + kernel(XQ, x) @ alpha, start(x) + kernel(x, x) @ alpha


@pytest.fixture(scope="module", params=gates.table(MODELS, ["dense", "matrix-free"]))
def spread(request):
    """A model on two devices, solved until rounding."""
    make, kernel = MODELS[request.param]
    fitted = dfl.fit(make(), X, Y, loss=dfl.SquaredError(), ridge=RIDGE, kernel=kernel,
                     mesh=jax.devices()[:2], tolerance=1e-11, progress=False)  # fmt: skip
    return request.param, fitted


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-8)  # solves stop at 1e-11 of λ


def test_a_fit_on_two_devices(spread):
    name, fitted = spread
    at_queries, at_points = retrained(name, X, Y, np.ones(N))
    close(fitted.predict(XQ), at_queries)
    close(fitted.outputs, at_points)
    close(fitted.alpha, (Y - at_points) / (N * RIDGE))
    assert fitted.alpha.shape == (N, C)
    assert len(fitted.state.alpha.sharding.device_set) == 2
    assert fitted.certificate.distance_bound < 1e-6
    if name != "kronecker":
        close(XQ @ np.asarray(fitted.params()), at_queries)


def test_edits_on_two_devices(spread):
    name, fitted = spread
    weights = np.ones(N)
    weights[[0, N - 1]] = 0
    want = retrained(name, X, Y, weights)[0]
    update = fitted.edit(dfl.Remove([0, N - 1]), rtol=1e-12)
    close(update.predict(XQ), want)
    before = retrained(name, X, Y, np.ones(N))[0]
    loss = 0.5 * ((want - YQ) ** 2).sum(1) - 0.5 * ((before - YQ) ** 2).sum(1)
    close(update.delta_loss(XQ, YQ), loss)


def loss_without(name, points):
    """Change of the squared error at the queries after training without these points, by NumPy."""
    weights = np.ones(N)
    weights[points] = 0
    after, before = (retrained(name, X, Y, w)[0] for w in (weights, np.ones(N)))
    return 0.5 * ((after - YQ) ** 2 - (before - YQ) ** 2).sum(1)


@pytest.mark.parametrize("spread", gates.table(MODELS, ["dense"]), indirect=True)
def test_attribution_on_two_devices(spread):
    """Squared error: one Newton step is training without the point."""
    name, fitted = spread
    found = fitted.attribute(XQ, YQ, progress=False)
    close(found.values, np.stack([loss_without(name, [i]) for i in range(N)], axis=1))
    weights = np.ones(N)
    weights[N - 1] = 0
    close(found.outputs_without[N - 1], retrained(name, X, Y, weights)[1][N - 1])
    assert "2 devices" in found.notes[0]


@pytest.mark.thorough
@pytest.mark.parametrize("most", [1, 8])
def test_distinct_weights_on_two_devices(most, monkeypatch):
    """A factor for each weight, or conjugate gradients if too many. The ridge path needs factors."""
    for module in (_leave_one_out_mesh, _ridge_path_mesh):
        monkeypatch.setattr(module, "MAX_FACTORS", most)
    weights = np.arange(1.0, N + 1)
    fitted = dfl.fit(linear(), X, Y, weights=weights, loss=dfl.SquaredError(), ridge=RIDGE,
                     mesh=jax.devices()[:2], tolerance=1e-11, progress=False)  # fmt: skip
    before, losses, own = retrained("dense", X, Y, weights)[0], [], []
    for i in range(N):
        without = np.where(np.arange(N) == i, 0, weights)
        after, at_points = retrained("dense", X, Y, without)
        losses.append(0.5 * ((after - YQ) ** 2 - (before - YQ) ** 2).sum(1))
        own.append(0.5 * ((at_points[i] - Y[i]) ** 2).sum())
    found = fitted.attribute(XQ, YQ, progress=False)
    close(found.values, np.stack(losses, axis=1))
    assert found.notes[0].startswith("conjugate" if most == 1 else f"{N} Cholesky factors")
    if most == 1:
        with pytest.raises(ValueError, match="Fit without mesh, or choose the ridge with equal"):
            fitted.ridge_path([RIDGE])
        return
    close(fitted.ridge_path([RIDGE]).leave_one_out, [np.average(own, weights=weights)])


@pytest.mark.parametrize("spread", gates.table(MODELS, ["matrix-free"]), indirect=True)
def test_groups_on_two_devices(spread):
    name, fitted = spread
    groups = {"ends": [0, N - 1], "next": [1, 2]}
    found = fitted.attribute_groups(groups, XQ, YQ, progress=False)
    close(found.values, np.stack([loss_without(name, g) for g in groups.values()], axis=1))


@pytest.mark.thorough
def test_first_order_on_two_devices_is_the_derivative_in_a_weight(spread):
    """By finite differences of the weight of each point, with the sum of weights kept at N."""
    name, fitted = spread
    found = fitted.attribute(XQ, YQ, first_order=True, progress=False)
    h = 1e-5

    def loss(i, step):
        sizes = np.ones(N)
        sizes[i] -= step
        kernel = (lambda a: np.asarray(rbf(a, X))) if name == "kronecker" else lambda a: a @ X.T
        start = (lambda a: np.zeros((len(a), C))) if name == "kronecker" else lambda a: a @ W0
        D = sizes[:, None] / N
        alpha = np.linalg.solve(RIDGE * np.eye(N) + D * kernel(X), D * (Y - start(X)))
        return 0.5 * ((start(XQ) + kernel(XQ) @ alpha - YQ) ** 2).sum(1)

    want = [(loss(i, h) - loss(i, -h)) / (2 * h) for i in range(N)]
    np.testing.assert_allclose(found.values, np.stack(want, axis=1), atol=1e-7)  # h² and 1e-16/h


@pytest.mark.parametrize("spread", gates.table(MODELS, ["dense"]), indirect=True)
def test_ridge_path_on_two_devices(spread):
    name, fitted = spread
    if name == "matrix-free":
        with pytest.raises(operators.UnsupportedStructure, match="kernel='dense'"):
            fitted.ridge_path()
        return
    grid = [0.01, 0.3]
    path = fitted.ridge_path(grid)
    for at, ridge in enumerate(grid):
        losses = []
        for i in range(N):
            weights = np.ones(N)
            weights[i] = 0
            losses.append(0.5 * ((retrained(name, X, Y, weights, ridge)[1][i] - Y[i]) ** 2).sum())
        close(path.leave_one_out[at], np.mean(losses))
        whole = retrained(name, X, Y, np.ones(N), ridge)[1]
        close(path.training[at], 0.5 * ((whole - Y) ** 2).sum(1).mean())
        K = np.asarray(rbf(X, X)) if name == "kronecker" else X @ X.T
        values = np.maximum(np.linalg.eigvalsh(K) / N, 0)
        close(path.dof[at], C * (values / (values + ridge)).sum())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loss", [dfl.SquaredError(), dfl.Convex(lambda f, y: jnp.sum(jnp.cosh(f - y)))]
)
def test_the_ridge_chosen_on_two_devices_is_that_of_one(loss):
    """Seven points: the padding row is no part of the mean diagonal that the grid is scaled by."""
    options = {"loss": loss, "ridge": "auto", "progress": False}
    one, two = (dfl.fit(linear(), X, Y, mesh=m, **options) for m in (None, jax.devices()[:2]))
    np.testing.assert_allclose(two.ridge, one.ridge, rtol=1e-12)  # a mean in another order
    assert two.stats.notes[-1].startswith("ridge ")


@pytest.mark.parametrize("spread", gates.table(MODELS, ["dense"]), indirect=True)
def test_quick_removals_on_two_devices(spread, tmp_path):
    """Each is certified, and within its certificate of training without the points, which have two norms:
    that of parameters where there are some, and that of outputs divided by `√K_ii` elsewhere."""
    name, fitted = spread
    with unlearning.open(tmp_path / "desk", fitted) as desk:
        for point, gone in zip("60", ([6], [0, 6]), strict=True):
            answer = desk.remove(point)
            weights = np.ones(N)
            weights[gone] = 0
            at_queries, _ = retrained(name, X, Y, weights)
            off = np.linalg.norm(answer.predict(XQ) - at_queries, axis=1)
            roots = np.ones(len(XQ)) if name == "kronecker" else np.linalg.norm(XQ, axis=1)
            assert (off <= roots * answer.certificate.distance_bound).all()
            assert answer.certificate.relative_bound <= 1e-2  # what a desk keeps to by default
            assert not np.asarray(desk.model.alpha)[gone].any()
            want = {"matrix-free": "edit"}.get(name, "closed form")
            assert desk.engine.work.how.startswith(want)
        alpha = np.asarray(desk.model.alpha)
    with unlearning.open(tmp_path / "desk", fitted) as again:
        np.testing.assert_array_equal(again.model.alpha, alpha)


@pytest.mark.thorough
def test_the_inverse_on_two_devices_is_that_of_its_system(spread):
    name, fitted = spread
    if name == "matrix-free":
        return
    anchor = Engine(fitted).work.anchor
    rows = np.r_[np.arange(N), N - 1]  # the last point fills the second share up
    S = (np.asarray(rbf(X, X)) if name == "kronecker" else X @ X.T)[np.ix_(rows, rows)]
    K, W = np.kron(S, np.eye(C)), np.diag(np.repeat(np.r_[np.ones(N), 0] / N, C))
    close(anchor.N, np.linalg.solve(RIDGE * np.eye(len(K)) + K @ W, K))
    assert {shard.data.shape for shard in anchor.N.addressable_shards} == {(8 * C, 4 * C)}


def test_products_of_a_low_rank_model_on_two_devices():
    """By its features, and not by the kernel that they approximate."""
    low, v = dfl.low_rank(linear(), X, rank=2), RNG.normal(size=(N, C))
    source = place_source("fit", low, jax.devices()[:2], None)
    phi, phi_q = (np.asarray(low.features(jnp.asarray(x))) for x in (X, XQ))
    weights = np.einsum("ncr,nc->r", phi, v)
    close(source.cross_mv(jnp.asarray(XQ), jnp.asarray(X), jnp.asarray(v)), phi_q @ weights)
    # Rank 2 of a linear kernel: the same weights as parameters, whose outputs are those.
    close(XQ @ np.asarray(source.pull_back(jnp.asarray(X), jnp.asarray(v))), phi_q @ weights)


@pytest.mark.thorough
def test_a_float32_fit_goes_on_in_float64_on_two_devices():
    x, y = X.astype(np.float32), Y.astype(np.float32)
    entries = dfl.KernelOptions(num_outputs=C)
    fitted = dfl.fit(rbf, x, y, loss=dfl.SquaredError(), ridge=RIDGE, kernel=entries,
                     mesh=jax.devices()[:2], tolerance=1e-10, progress=False)  # fmt: skip
    assert fitted.is_wide
    want = retrained("kronecker", x.astype(float), y, np.ones(N))[1]
    np.testing.assert_allclose(
        fitted.outputs, want, rtol=0, atol=1e-6
    )  # inputs and results in float32


@pytest.mark.thorough
def test_low_rank_kernels_on_two_devices():
    """The features take part in every product, and not the kernel that they approximate."""
    low = dfl.low_rank(linear(), X, rank=2)
    fitted = dfl.fit(low, X, Y, loss=dfl.SquaredError(), ridge=RIDGE, mesh=jax.devices()[:2],
                     tolerance=1e-11, progress=False)  # fmt: skip
    close(fitted.predict(X), fitted.outputs)
    close(X @ np.asarray(fitted.params()), fitted.outputs)


def test_points_added_on_two_devices(spread):
    """A border with its own padding, and a second one beside it."""
    name, fitted = spread
    x, y = np.concatenate([X, NEW]), np.concatenate([Y, NEW_Y])
    grown = fitted.edit(dfl.Add(NEW, NEW_Y), rtol=1e-12)
    close(grown.predict(XQ), retrained(name, x, y, np.ones(N + 3))[0])
    weights = np.ones(N + 3)
    weights[[1, N + 2]] = 0
    again = grown.commit().edit(dfl.Remove([1, N + 2]), rtol=1e-12)
    at_queries, at_points = retrained(name, x, y, weights)
    close(again.predict(XQ), at_queries)
    close(again.outputs, at_points)


@pytest.mark.parametrize("name", ["dense", "kronecker", "matrix-free"])
def test_products_on_two_devices(name):
    make, kernel = MODELS[name]
    op = dfl.kernel_operator(make(), X, kernel=kernel, mesh=jax.devices()[:2], progress=False)
    assert isinstance(op, operators.ShardedOperator | operators.ShardedMatrixFreeOperator)
    rows = np.r_[np.arange(N), N - 1]  # the last point fills the second share up
    S = np.asarray(rbf(X, X)) if name == "kronecker" else X @ X.T
    S = S[np.ix_(rows, rows)]
    v = RNG.normal(size=(N + 1, C, 3))
    want = np.einsum("ij,jck->ick", S, v)
    v = jnp.asarray(v)
    close(jax.jit(lambda op, v: op.mv(v))(op, v[..., 0]), want[..., 0])
    close(jax.jit(lambda op, v: op.mm(v))(op, v), want)
    close(jax.jit(lambda op: op.diagonal())(op), np.diagonal(S)[:, None] * np.ones(C))
    if name != "matrix-free":
        close(jax.jit(lambda op, v: op.wide_mv(v))(op, v[..., 1]), want[..., 1])
    assert isinstance(op.check(), str)


def scored(mesh, kind):
    """Scores of two checkpoints, or of one model in parameter space."""
    rng = np.random.default_rng(0)
    x, y, xq, yq = (
        rng.normal(size=(N, 3)), rng.integers(0, C, N), rng.normal(size=(2, 3)), [1, 0],
    )  # fmt: skip

    def network(w, x):
        return jnp.tanh(x @ w["in"]) @ w["out"]

    def drawn():
        return {"in": rng.normal(size=(3, 4)), "out": rng.normal(size=(4, C))}

    if kind in ("exact", "random"):
        run = attribution.Trajectory(network, [drawn(), drawn()], steps=[10, 30], learning_rate=0.1)
        probes = None if kind == "exact" else attribution.RandomProbes(1, seed=1)
        how = {"probes": probes, "leverage": kind == "exact", "progress": False}
        return run.attribute(x, y, xq, yq, mesh=mesh, **how).values
    params = jax.tree.map(jnp.asarray, drawn())
    solver = {"cg": dfl.primal.CG(rtol=1e-12), "ekfac": dfl.primal.EKFAC()}[kind]
    found = dfl.primal.attribute(
        dfl.linearize(network, params, batch_size=3), params, x, y, xq, yq, solver=solver, ridge=0.1,
        loss=dfl.SoftmaxCrossEntropy(), mesh=mesh, self_influence=kind == "cg",
    )  # fmt: skip
    return found.values if kind == "ekfac" else np.concatenate([found.values, found.own[None]])


@pytest.mark.parametrize(
    "kind", gates.table(["exact", "random", "cg", "ekfac"], ["exact", "ekfac"])
)
def test_scores_on_two_devices_are_those_of_one(kind, monkeypatch):
    monkeypatch.setattr(_spread, "BLOCK", 3)  # several steps for each device
    one, two = scored(None, kind), scored(jax.devices()[:2], kind)
    # Sums in another order, and solves that stop at 1e-12.
    np.testing.assert_allclose(two, one, rtol=1e-8, atol=1e-10 * np.abs(one).max())
