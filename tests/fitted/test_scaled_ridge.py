"""A ridge that pulls parameters differently: every answer is that of the network in `φ = P^{-1/2}(θ − θ₀)`.

The truth comes from the NumPy oracle on the Jacobian `JP^{1/2}` with a plain ridge, which knows of no scale.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
import oracles
import problems
from dualfluence.unlearning._removal import perturbed_params
from users import ordinary

LOSSES = {
    "squared": dfl.SquaredError(),
    "softmax": dfl.SoftmaxCrossEntropy(),
    "logistic": dfl.Logistic(),
}
FIRST = 9
"""Parameters of the first leaf, which has one number; the others have one each."""

RNG = np.random.default_rng(3)
P = np.concatenate([np.full(FIRST, 4.0), RNG.uniform(0.2, 20.0, size=16)])
START = {"a": jnp.asarray(RNG.normal(size=FIRST)), "b": jnp.asarray(RNG.normal(size=16))}
GONE = [1, 4, 7]
ORACLE = 1e-11
"""How far the oracle itself may be off: it stops at a gradient of 1e-13, over a ridge of 0.05."""


def apply(theta, x):
    move = jnp.concatenate([theta["a"] - START["a"], theta["b"] - START["b"]])
    return x[..., :-1] @ move + x[..., -1]


def make_model():
    return dfl.linearize(apply, START, scale={"a": 4.0, "b": P[FIRST:]})


def flat(tree):
    return np.concatenate([np.asarray(tree["a"]), np.asarray(tree["b"])])


def moved(params):
    return flat(params) - flat(START)


def problem(loss_name="softmax", n=12):
    return problems.linear_problem(n, 2, P.size, loss_name, ridge=0.05, weighted=True)


def retrained(p, s, x=None, y=None):
    """`θ − θ₀` at the optimum, by the change of variables."""
    x, y = p.x if x is None else x, p.y if y is None else y
    J, f0 = x[..., :-1] * np.sqrt(P), x[..., -1]
    w = oracles.normalise(s)
    return np.sqrt(P) * oracles.retrain(J, f0, y, w, p.ridge, oracles.LOSSES[p.loss_name])


def norm(step):
    """That of `P⁻¹`."""
    return np.sqrt((step**2 / P).sum())


def fit(p, **options):
    return dfl.fit(
        make_model(),
        p.x,
        p.y,
        loss=LOSSES[p.loss_name],
        ridge=p.ridge,
        weights=p.sample_weights,
        progress=False,
        **options,
    )


def without(p, gone=GONE):
    s = p.sample_weights.copy()
    s[gone] = 0
    return s


@pytest.mark.parametrize("loss_name", LOSSES)
def test_fit_meets_the_optimum_of_the_scaled_ridge(loss_name):
    p = problem(loss_name)
    fitted, want = fit(p), retrained(p, p.sample_weights)
    np.testing.assert_allclose(moved(fitted.params()), want, atol=1e-9)
    np.testing.assert_allclose(fitted.certificate.parameter_norm, norm(want), rtol=1e-9)
    # θ = θ₀ + PJᵀα, with the J of the network itself.
    pulled = make_model().vjp(jnp.asarray(p.x), fitted.alpha)
    np.testing.assert_allclose(moved(fitted.params()), P * flat(pulled), atol=1e-9)
    np.testing.assert_allclose(fitted.predict(p.x_q), p.f0_q + p.J_q @ want, atol=1e-9)
    np.testing.assert_allclose(
        fitted.network.distance(fitted.params(), START), norm(want), rtol=1e-9
    )


SETTINGS = {
    "dense": {"kernel": "dense"},
    "matrix-free": {"kernel": "matrix-free"},
    "conjugate gradients": {"kernel": "matrix-free", "solver": dfl.CG(), "sketch": dfl.Sketch(6)},
    "mesh": {"mesh": jax.devices()},
    "mesh, matrix-free": {"mesh": jax.devices(), "kernel": "matrix-free"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_every_form_of_the_kernel_removes_like_retraining(name):
    p = problem()
    fitted, want = fit(p, **SETTINGS[name]), retrained(p, without(p))
    update = fitted.edit(dfl.Remove(GONE), until=1e-7)
    np.testing.assert_allclose(moved(update.params()), want, atol=1e-6)
    assert norm(moved(update.params()) - want) <= update.certificate.distance_bound <= 1e-7


@pytest.mark.thorough
def test_the_jacobian_in_memory_changes_nothing():
    p = problem()
    fitted = fit(p)
    held = fitted.with_jacobian()
    np.testing.assert_allclose(flat(held.params()), flat(fitted.params()), atol=1e-12)
    np.testing.assert_allclose(held.predict(p.x_q), fitted.predict(p.x_q), atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["remove", "relabel", "reweight", "replace", "add"])
def test_every_edit_equals_retraining(kind):
    p, q = problem(), problem(n=14)
    x, y, s = p.x.copy(), p.y.copy(), p.sample_weights.copy()
    if kind == "remove":
        edit, s = dfl.Remove(GONE), without(p)
    elif kind == "relabel":
        y[GONE] = p.y[GONE][:, ::-1]
        edit = dfl.Relabel(GONE, y[GONE])
    elif kind == "reweight":
        s[GONE] = [0.5, 2.0, 3.0]
        edit = dfl.Reweight(GONE, s[GONE])
    elif kind == "replace":
        x[GONE], y[GONE] = q.x[-3:], q.y[-3:]
        edit = dfl.Replace(GONE, x[GONE], y[GONE])
    else:
        x, y = np.concatenate([x, q.x[-2:]]), np.concatenate([y, q.y[-2:]])
        edit, s = dfl.Add(q.x[-2:], q.y[-2:]), np.concatenate([s, np.ones(2)])
    want = retrained(p, s, x, y)
    update = fit(p).edit(edit, until=1e-8)
    np.testing.assert_allclose(moved(update.params()), want, atol=1e-7)
    left = norm(moved(update.params()) - want)
    assert left <= update.certificate.distance_bound + ORACLE


def test_one_step_is_certified_in_the_norm_of_the_scale():
    p = problem()
    update, want = fit(p).edit(dfl.Remove(GONE)), retrained(p, without(p))
    left = moved(update.params()) - want
    bound = update.certificate.distance_bound
    assert norm(left) <= bound
    # One parameter may be off by the root of its own scale times the bound, and no more.
    assert (np.abs(left) <= np.sqrt(P) * bound).all()


def test_attribution_is_that_of_the_scaled_ridge():
    p = problem("squared")
    values = fit(p).attribute(p.x_q, p.y_q, of="loss", progress=False).values
    J = p.J * np.sqrt(P)
    J_q = p.J_q * np.sqrt(P)
    loss = oracles.LOSSES["squared"]
    w = p.sample_weights
    truth = oracles.leave_one_out_loss(J, p.f0, p.y, w, p.ridge, loss, J_q, p.f0_q, p.y_q)
    assert values.shape == truth.shape
    assert np.corrcoef(values.ravel(), truth.ravel())[0, 1] > 0.8  # first order against the whole
    plain = dfl.linearize(
        lambda phi, x: x[..., :-1] @ (np.sqrt(P) * phi) + x[..., -1], np.zeros(P.size)
    )
    same = dfl.fit(
        plain, p.x, p.y, loss=dfl.SquaredError(), ridge=p.ridge, weights=w, progress=False
    ).attribute(p.x_q, p.y_q, of="loss", progress=False)
    np.testing.assert_allclose(values, same.values, rtol=1e-8, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_a_model_trained_elsewhere_is_taken_over(tangent):
    p = problem()
    step = retrained(p, p.sample_weights)
    trained = jax.tree.map(jnp.add, START, {"a": step[:FIRST], "b": step[FIRST:]})
    off = {"a": trained["a"] + 0.01, "b": trained["b"]}
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": p.ridge, "weights": p.sample_weights}
    for params in (trained, off):
        taken = dfl.from_trained(
            make_model(), params, p.x, p.y, tangent=tangent, progress=False, **options
        )
        assert taken.certificate.certified
        np.testing.assert_allclose(flat(taken.params()), flat(params), atol=1e-12)
        pulled = P * flat(make_model().vjp(jnp.asarray(p.x), taken.alpha))
        gap = norm(moved(params) - pulled)
        np.testing.assert_allclose(taken.certificate.gap, gap, rtol=1e-6, atol=1e-9)
        update = taken.edit(dfl.Remove(GONE), steps=4)
        left = norm(moved(update.params()) - retrained(p, without(p)))
        assert left <= update.certificate.distance_bound
    assert left > 1e-4  # the model that was moved away is not at its optimum, and the bound says so


@pytest.mark.thorough
def test_a_nonlinear_network_is_not_taken_for_linear_where_one_parameter_is_free():
    """A large scale makes outputs of a size beside which other nonlinearities look like rounding."""
    params = {"w": jnp.ones((3, 1), jnp.float32), "b": jnp.zeros(1, jnp.float32)}
    x = jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32)

    @ordinary
    def fn(theta, x):
        return x @ theta["w"] + 1e-3 * jnp.sin(x @ theta["w"]) + theta["b"]

    model = dfl.linearize(fn, params, scale={"w": None, "b": 1e8})
    trained = {"w": params["w"] + 0.5, "b": params["b"] + 1}
    with pytest.warns(dfl.FidelityWarning):
        taken = dfl.from_trained(
            model, trained, x, np.ones((8, 1)), loss=dfl.SquaredError(), ridge=1e-2, progress=False
        )
    assert not taken.certificate.certified
    zero = dfl.linearize(fn_bent, params, anchor="zero", scale={"w": None, "b": 1e8})
    with pytest.raises(ValueError, match="linear in its parameters"):
        dfl.fit(zero, x, np.ones((8, 1)), loss=dfl.SquaredError(), ridge=1.0, progress=False)


@ordinary
def fn_bent(theta, x):
    return jnp.sin(x @ theta["w"]) + theta["b"]


def taken_over(p, params):
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": p.ridge, "progress": False}
    return dfl.from_trained(make_model(), params, p.x, p.y, weights=p.sample_weights, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("trained", [False, True])
def test_files_come_back_and_refuse_another_scale(tmp_path, trained):
    p = problem()
    fitted = fit(p)
    if trained:
        fitted = taken_over(p, fitted.params())
    fitted.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", make_model(), progress=False)
    for get in (lambda f: flat(f.params()), lambda f: flat(f.edit(dfl.Remove(GONE)).params())):
        np.testing.assert_array_equal(get(again), get(fitted))
    for scale in (None, {"a": 4.0, "b": 1.0001 * P[FIRST:]}):
        other = dfl.linearize(apply, START, scale=scale)
        with pytest.raises(ValueError, match=r"load: .*(not the one|tree structure)"):
            dfl.load(tmp_path / "a.npz", other, progress=False)


@pytest.mark.thorough
def test_purging_keeps_parameters_and_later_edits():
    p = problem()
    taken = taken_over(p, fit(p).params())
    kept = taken.edit(dfl.Remove(GONE), steps=6).commit()
    clean = kept.purge()
    np.testing.assert_allclose(flat(clean.params()), flat(kept.params()), atol=1e-12)
    a, b = (f.edit(dfl.Remove([0]), steps=3).params() for f in (clean, kept))
    np.testing.assert_allclose(flat(a), flat(b), atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("solver", [None, dfl.primal.CG(), dfl.primal.EKFAC()], ids=repr)
def test_parameter_space_solves_the_same_system(solver):
    p = problem("squared")
    theta = jax.tree.map(
        jnp.add, START, START
    )  # anywhere: a Newton step is exact for squared error
    edit = dfl.Reweight(GONE, [0.5, 2.0, 3.0])
    update = dfl.primal.influence(
        make_model(),
        theta,
        p.x,
        p.y,
        edit,
        loss=dfl.SquaredError(),
        ridge=p.ridge,
        weights=p.sample_weights,
        rtol=1e-10,
        solver=solver,
        on_failure="report",
    )
    s = p.sample_weights.copy()
    s[GONE] = [0.5, 2.0, 3.0]
    want = retrained(p, s)
    after = moved(update.params())
    change = flat(update.delta_params)
    np.testing.assert_allclose(after, flat(START) + change, atol=1e-12)
    np.testing.assert_allclose(update.delta_norm, norm(change), rtol=1e-12)
    if isinstance(solver, dfl.primal.EKFAC):  # an approximation: it goes the right way
        assert norm(after - want) < norm(flat(START) - want)
    else:
        np.testing.assert_allclose(after, want, atol=1e-6)
        np.testing.assert_allclose(update.predict(p.x_q), p.f0_q + p.J_q @ want, atol=1e-6)


@pytest.mark.thorough
def test_published_parameters_are_noisy_in_the_norm_of_the_certificate():
    fitted = fit(problem())
    rng = np.random.default_rng(0)
    draws = [flat(perturbed_params(fitted, 0.1, rng)) - flat(fitted.params()) for _ in range(500)]
    # The standard deviation of 500 draws is off by 1/√1000 = 3 %, the worst of 25 by four times that.
    np.testing.assert_allclose(np.std(draws, axis=0), 0.1 * np.sqrt(P), rtol=0.13)


@pytest.mark.thorough
def test_a_free_intercept_meets_the_optimum_without_its_ridge():
    """Against Newton's method on weights and an intercept that nothing pulls."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) + 0.5
    y = (x @ [1.0, -2.0, 0.5] + 0.3 + rng.normal(size=60) > 0).astype(float)
    ridge = 1 / 60
    model = dfl.linearize(
        ordinary(lambda t, x: x @ t["w"] + t["b"]),
        {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)},
        scale={"w": None, "b": "free"},
    )
    fitted = dfl.fit(model, x, y[:, None], loss=dfl.Logistic(), ridge=ridge, progress=False)
    keep = np.setdiff1d(np.arange(60), GONE)
    update = fitted.edit(dfl.Remove(GONE), steps=5)
    for got, rows in ((fitted, np.arange(60)), (update, keep)):
        params = got.params()
        found = np.append(params["w"][:, 0], params["b"])
        np.testing.assert_allclose(found, _free_newton(x[rows], y[rows], ridge), atol=1e-6)


def _free_newton(x, y, ridge):
    X = np.column_stack([x, np.ones(len(x))])
    pull = ridge * np.diag([1.0] * x.shape[1] + [0.0])
    theta = np.zeros(X.shape[1])
    for _ in range(50):
        s = 0.5 * (1 + np.tanh(0.5 * (X @ theta)))
        H = X.T @ (X * (s * (1 - s))[:, None]) / len(x) + pull
        theta = theta - np.linalg.solve(H, X.T @ (s - y) / len(x) + pull @ theta)
    return theta


@pytest.mark.thorough
def test_a_desk_and_its_verification_know_the_scale(tmp_path):
    p = problem()
    with dfl.unlearning.open(tmp_path / "desk", fit(p)) as desk:
        desk.remove([GONE[0]])
        desk.remove(GONE[1:])
        desk.checkpoint(tmp_path / "model.npz")
        bound, params = desk.certificate.distance_bound, desk.model.params()

    def kernel(x1, x2):
        return np.einsum("iap,p,jbp->iajb", x1[..., :-1], P, x2[..., :-1])

    report = dfl.unlearning.verify(tmp_path / "desk", tmp_path / "model.npz", kernel=kernel)
    assert report.valid, report.summary()
    left = norm(moved(params) - retrained(p, without(p)))
    assert left <= report.computed + ORACLE
    assert report.computed <= bound
    other = dfl.unlearning.verify(
        tmp_path / "desk",
        tmp_path / "model.npz",
        kernel=lambda a, b: np.einsum("iap,jbp->iajb", a[..., :-1], b[..., :-1]),
    )
    assert not other.valid  # the kernel without the scale is another model's
