"""Fits, edits and their read-outs, against retraining in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
import oracles

from .table import flat, raises, row

LOO_NEEDS_TWO = "needs two|at least two|nothing is left|every point"


def trained(at, loss="squared", weights=None, **changed):
    """`δ` of the exact optimum."""
    y = np.asarray(at.y, float) if loss == "squared" else at.probabilities
    data = {"J": at.J, "f0": at.f0, "y": y} | changed
    w = oracles.normalise(np.ones(len(data["y"])) if weights is None else weights)
    return oracles.retrain(data["J"], data["f0"], data["y"], w, at.ridge, oracles.LOSSES[loss])


def same_model(at, model, delta, scale=1.0):
    """Parameters and predictions of a model with `θ − θ₀ = δ`."""
    at.close(flat(model.params()) - at.theta, delta, scale, "parameters")
    at.close(model.predict(at.xq), at.f0q + at.Jq @ delta, scale, "predictions")
    at.typed(model.predict(at.xq))


def certified(at, model, delta):
    """The certificate is no less than the true distance, and says that it is small."""
    bound, gap = model.certificate.distance_bound, flat(model.params()) - at.theta - delta
    slack = 64 * np.finfo(at.dtype).eps * np.linalg.norm(at.theta)  # of θ₀ + Jᵀα itself
    assert np.isfinite(bound), "no bound"
    assert np.linalg.norm(gap) <= bound + slack, f"{np.linalg.norm(gap)} over the bound {bound}"


@row("fit", "Fitted", "SquaredError", "Fitted.params", "Fitted.predict", "Fitted.outputs")
@row("Fitted.alpha", "Fitted.x", "Fitted.num_outputs", "Fitted.layout", "Fitted.network")
@row("Fitted.problem", "Fitted.without_spare_rows", "Fitted.is_wide", "Fitted.precision")
@row("Update.is_wide", "Update.precision")
def a_fit_by_squared_error(at):
    fitted = dfl.fit(at.model, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    assert isinstance(fitted, dfl.Fitted)
    delta = trained(at)
    same_model(at, fitted, delta)
    certified(at, fitted, delta)
    at.close(fitted.outputs, at.f0 + at.J @ delta)
    alpha = (np.asarray(at.y, float) - at.f0 - at.J @ delta) / at.n / at.ridge
    at.close(fitted.alpha, alpha, 10)
    np.testing.assert_array_equal(fitted.x, at.x)
    np.testing.assert_equal((fitted.num_outputs, fitted.layout.num_points), (at.c, at.n))
    at.close(fitted.network.base_outputs(at.x), at.f0)
    losses = 0.5 * np.sum((at.f0 + at.J @ delta - np.asarray(at.y, float)) ** 2, axis=1)
    # What float64 computes is handed out in the dtype that JAX is set to.
    assert fitted.is_wide or at.bits == 32
    np.testing.assert_equal(fitted.alpha.dtype, at.dtype)
    update = fitted.edit(dfl.Reweight([0], [1.5]))
    np.testing.assert_equal(update.is_wide, fitted.is_wide)
    with update.precision():
        at.close(update.state.alpha, update.alpha)
    with fitted.precision():
        at.close(
            fitted.problem().value(fitted.state), losses.mean() + 0.5 * at.ridge * delta @ delta
        )
    at.close(fitted.without_spare_rows().alpha, fitted.alpha)
    assert fitted.stats.converged
    assert "Fitted" in repr(fitted)


@row("SoftmaxCrossEntropy", "Logistic", shared=True)
def a_fit_of_classes(at):
    kinds = [dfl.Logistic()] if at.c == 1 else [dfl.Logistic(), dfl.SoftmaxCrossEntropy()]
    for loss, name in zip(kinds, ["logistic", "softmax"], strict=False):
        fitted = dfl.fit(at.model, at.x, at.probabilities, loss=loss, ridge=at.ridge)
        delta = trained(at, name)
        same_model(at, fitted, delta, 2)
        certified(at, fitted, delta)
    if at.c == 1:  # one class has nothing to learn
        labels = np.zeros(at.n, int)
        alone = dfl.fit(at.model, at.x, labels, loss=dfl.SoftmaxCrossEntropy(), ridge=1.0)
        at.close(alone.outputs, at.f0)


@row("Convex", shared=True)
def a_fit_by_a_loss_of_ones_own(at):
    loss = dfl.Convex(lambda f, y: 0.5 * jnp.sum((f - y) ** 2))
    fitted = dfl.fit(at.model, at.x, at.y, loss=loss, ridge=at.ridge)
    same_model(at, fitted, trained(at))


@row("Sketch", shared=True)
def a_fit_without_entries(at):
    s, options = np.linspace(0.5, 2, at.n), {"loss": dfl.SquaredError(), "ridge": at.ridge}
    fitted = dfl.fit(
        at.model, at.x, at.y, weights=s, kernel="matrix-free", solver=dfl.CG(),
        sketch=dfl.Sketch(rank=1), **options,
    )  # fmt: skip
    same_model(at, fitted, trained(at, weights=s), 5)


@row("fit", "Sketch", quick=False)
def fits_with_options(at):
    options = {"loss": dfl.SquaredError(), "ridge": at.ridge}
    delta = trained(at)
    for solver in (dfl.Auto(), dfl.CG(), dfl.Cholesky()):
        same_model(at, dfl.fit(at.model, at.x, at.y, solver=solver, **options), delta, 5)
    sketch = dfl.Sketch(rank=1)
    for form in ("dense", "matrix-free"):
        fitted = dfl.fit(
            at.model, at.x, at.y, kernel=form, solver=dfl.CG(), sketch=sketch, **options
        )
        same_model(at, fitted, delta, 5)
    s = np.linspace(0.5, 2, at.n)
    same_model(at, dfl.fit(at.model, at.x, at.y, weights=s, **options), trained(at, weights=s))


@row("fit", "Fitted.ridge_path")
@row("attribution.RidgePath", "attribution.RidgePath.best", "attribution.RidgePath.best_gcv")
@row("attribution.RidgePath.reason", "attribution.RidgePath.plot", shared=True)
def a_ridge_from_the_data(at):
    if at.n == 1:
        with raises(ValueError, "two"):
            at.fitted.ridge_path()
        with raises(ValueError, "two"):
            dfl.fit(at.model, at.x, at.y, loss=dfl.SquaredError(), ridge="auto")
        return
    grid = np.array([0.03, 0.3, 3.0])
    path = at.fitted.ridge_path(grid)
    assert isinstance(path, dfl.attribution.RidgePath)
    np.testing.assert_array_equal(path.ridges, grid)
    y, want = np.asarray(at.y, float), []
    for ridge in grid:
        left = []
        for i in range(at.n):
            keep = np.arange(at.n) != i
            w = np.full(at.n - 1, 1 / (at.n - 1))
            delta = oracles.retrain(at.J[keep], at.f0[keep], y[keep], w, ridge, oracles.squared)
            left.append(0.5 * np.sum((at.f0[i] + at.J[i] @ delta - y[i]) ** 2))
        want.append(np.mean(left))
    at.close(path.leave_one_out, want, 5)
    best = grid[int(np.argmin(path.leave_one_out))]
    np.testing.assert_equal(path.best, best)
    np.testing.assert_equal(path.best_gcv, grid[int(np.argmin(path.gcv))])
    assert f"{best:.3g}" in path.reason
    assert path.plot().axes
    auto = dfl.fit(at.model, at.x, at.y, loss=dfl.SquaredError(), ridge="auto")
    assert np.isfinite(auto.ridge)
    assert auto.ridge > 0
    assert at.fitted.ridge_path().ridges.size == 33


@row("from_trained", "Fidelity", "FidelityWarning", shared=True)
def a_model_trained_elsewhere(at):
    def linear(theta, x):
        return x @ theta["W"] + theta["b"]

    x = np.concatenate([np.asarray(at.x, float), np.ones((at.n, 1))], axis=1)
    y = np.asarray(at.y, float)
    theta = np.linalg.solve(x.T @ x / at.n + at.ridge * np.eye(5), x.T @ y / at.n)
    best = {"W": jnp.asarray(theta[:4], at.dtype), "b": jnp.asarray(theta[4], at.dtype)}
    start = jax.tree.map(jnp.zeros_like, best)
    options = {"loss": dfl.SquaredError(), "ridge": at.ridge}
    taken = dfl.from_trained(dfl.linearize(linear, start), best, at.x, at.y, **options)
    assert isinstance(taken.fidelity, dfl.Fidelity)
    assert taken.certificate.certified
    at.close(taken.predict(at.xq), linear(best, at.xq))
    if at.n > 1:
        rest = x[1:].T @ x[1:] / (at.n - 1) + at.ridge * np.eye(5)
        want = np.linalg.solve(rest, x[1:].T @ y[1:] / (at.n - 1))
        after = taken.edit(dfl.Remove([0]))
        got = after.params()
        at.close(np.concatenate([got["W"], got["b"][None]]), want, 2)
        gap = np.linalg.norm(np.concatenate([got["W"], got["b"][None]]) - want)
        assert gap <= after.certificate.distance_bound
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        far = dfl.from_trained(at.model, at.other, at.x, at.y, **options)
    assert any(issubclass(w.category, dfl.FidelityWarning) for w in said)
    assert not far.certificate.certified
    at.close(far.predict(at.xq, linearised=False), at.model(at.other, at.xq))


@row("kernel_gradient_descent", "Descent", shared=True)
def descent_in_function_space(at):
    rate, epochs = 0.05, 7
    found = dfl.kernel_gradient_descent(
        at.model, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge, rate=rate, epochs=epochs,
        x_query=at.xq,
    )  # fmt: skip
    assert isinstance(found, dfl.Descent)
    want = oracles.kernel_gradient_descent(
        at.K, at.f0, np.asarray(at.y, float), at.weights, at.ridge, oracles.squared, rate, epochs
    )
    at.close(found.outputs, want)
    a = np.asarray(found.coordinates, float)
    at.close(found.query_outputs, at.f0q + np.einsum("qanb,nb->qa", at.Kq, a))
    np.testing.assert_equal(found.gradient_norms.shape, (epochs + 1,))


@row("Fitted.edit", "Update", "Remove", "Update.params", "Update.predict", "Update.outputs")
@row("Update.delta_alpha", "Update.alpha", "Update.delta_outputs", "Update.delta_loss")
@row("Update.commit", "Update.edit", "Update.x", "Update.layout", "Update.network")
@row("Fitted.retrain", shared=True)
def removals(at):
    if at.n == 1:
        with raises(ValueError, "every point has been removed"):
            at.fitted.edit(dfl.Remove([0]))
        with raises(ValueError, "every point has been removed"):
            at.fitted.retrain(dfl.Remove([0]))
        return
    gone = np.arange(max(1, at.n // 4))
    left = np.where(np.isin(np.arange(at.n), gone), 0.0, 1.0)
    before, delta = trained(at), trained(at, weights=left)
    update = at.fitted.edit(dfl.Remove(gone))
    assert isinstance(update, dfl.Update)
    same_model(at, update, delta, 2)
    certified(at, update, delta)
    at.close(update.outputs, at.f0 + at.J @ delta, 2)
    change = at.Jq @ (delta - before)
    at.close(update.delta_outputs(at.xq), change, 20)
    # Each is rounded to the dtype that it is handed out in.
    slack = 4 * np.finfo(update.alpha.dtype).eps * np.abs(update.alpha).max()
    moved = np.asarray(update.alpha) - np.asarray(at.fitted.alpha)
    np.testing.assert_allclose(update.delta_alpha, moved, rtol=1e-6, atol=slack)
    f, yq = at.f0q + at.Jq @ before, np.asarray(at.yq, float)
    value = lambda f: 0.5 * np.sum((f - yq) ** 2, axis=1)  # noqa: E731
    at.close(update.delta_loss(at.xq, at.yq), value(f + change) - value(f), 50)
    first = np.sum((f - yq) * change, axis=1)
    at.close(update.delta_loss(at.xq, at.yq, first_order=True), first, 50)
    same_model(at, at.fitted.retrain(dfl.Remove(gone)), delta, 2)
    same_model(at, update.commit(), delta, 2)
    back = update.edit(dfl.Reweight(gone, np.ones(gone.size)))
    same_model(at, back, before, 5)
    np.testing.assert_array_equal(update.x, at.x)
    np.testing.assert_equal(update.layout.num_points, at.n)
    at.close(update.network.base_outputs(at.x), at.f0)
    assert "Update" in repr(update)


@row("Relabel", "Reweight", "Replace", "Add", shared=True)
def other_edits(at):
    y, new = np.asarray(at.y, float), np.asarray(at.yq[:1], float)
    relabelled = np.concatenate([new, y[1:]])
    same_model(at, at.fitted.edit(dfl.Relabel([0], at.yq[:1])), trained(at, y=relabelled), 2)
    s = np.concatenate([[2.5], np.ones(at.n - 1)])
    same_model(at, at.fitted.edit(dfl.Reweight([0], [2.5])), trained(at, weights=s), 2)
    more = {
        "J": np.concatenate([at.J, at.Jq[:2]]),
        "f0": np.concatenate([at.f0, at.f0q[:2]]),
        "y": np.concatenate([y, np.asarray(at.yq[:2], float)]),
    }
    same_model(at, at.fitted.edit(dfl.Add(at.xq[:2], at.yq[:2])), trained(at, **more), 5)
    moved = {
        "J": np.concatenate([at.Jq[:1], at.J[1:]]),
        "f0": np.concatenate([at.f0q[:1], at.f0[1:]]),
        "y": relabelled,
    }
    both = at.fitted.edit(dfl.Replace([0], at.xq[:1], at.yq[:1]))
    same_model(at, both, trained(at, **moved), 5)
    features = at.fitted.edit(dfl.Replace([0], x=at.xq[:1]))
    same_model(at, features, trained(at, **(moved | {"y": y})), 5)
    targets = at.fitted.edit(dfl.Replace([0], targets=at.yq[:1]))
    same_model(at, targets, trained(at, y=relabelled), 2)


@row("Add.apply", "Relabel.apply", "Remove.apply", "Replace.apply", "Reweight.apply", shared=True)
def edits_of_a_training_set(at):
    data, loss, y = at.fitted.data, dfl.SquaredError(), np.asarray(at.y)
    ones, first = np.ones(at.n), np.arange(at.n) == 0
    after = dfl.Remove([0]).apply(data, loss, at.c)
    np.testing.assert_array_equal(after.sample_weights, np.where(first, 0, 1))
    after = dfl.Reweight([0], [3.0]).apply(data, loss, at.c)
    np.testing.assert_array_equal(after.sample_weights, np.where(first, 3, 1))
    after = dfl.Relabel([0], at.yq[:1]).apply(data, loss, at.c)
    np.testing.assert_array_equal(after.targets, np.concatenate([at.yq[:1], y[1:]]))
    after = dfl.Add(at.xq, at.yq).apply(data, loss, at.c)
    np.testing.assert_array_equal(after.x, np.concatenate([at.x, at.xq]))
    np.testing.assert_array_equal(after.sample_weights, np.concatenate([ones, np.ones(at.q)]))
    after = dfl.Replace([0], at.xq[:1], at.yq[:1]).apply(data, loss, at.c)
    np.testing.assert_array_equal(after.x, np.concatenate([at.x, at.xq[:1]]))
    np.testing.assert_array_equal(after.targets, np.concatenate([y, at.yq[:1]]))
    np.testing.assert_array_equal(after.sample_weights, [*np.where(first, 0, 1), 1])
    np.testing.assert_array_equal(data.sample_weights, ones)


@row("Fitted.edit", shared=True)
def a_classifier_after_edits(at):
    """Until its certificate says so, an edit of a loss that is not quadratic is retraining."""
    if at.n < 3:
        return
    gone = np.arange(max(1, at.n // 5))
    left = np.where(np.isin(np.arange(at.n), gone), 0.0, 1.0)
    delta = trained(at, at.loss_name, weights=left)
    one = at.classifier.edit(dfl.Remove(gone))
    certified(at, one, delta)
    many = at.classifier.edit(dfl.Remove(gone), steps=6)
    same_model(at, many, delta, 5)
    until = 1e-2 * float(np.linalg.norm(delta))
    near = at.classifier.edit(dfl.Remove(gone), until=until)
    certified(at, near, delta)
    assert near.certificate.distance_bound <= until
    w = oracles.normalise(left)
    start = flat(at.classifier.params()) - at.theta
    loss = oracles.LOSSES[at.loss_name]
    step = oracles.one_step_theta(at.J, at.f0, start, at.probabilities, w, at.ridge, loss)
    at.close(flat(one.params()) - at.theta, start + step, 5)


@row("Fitted.on", "Fitted.with_jacobian", "Fitted.purge", "Fitted.save", "load", shared=True)
def the_same_model_elsewhere(at):
    delta = trained(at)
    same_model(at, at.fitted.on(jax.devices()), delta)
    same_model(at, at.fitted.with_jacobian(), delta)
    path = at.folder / "model.npz"
    for include_kernel in (False, True):
        at.fitted.save(path, include_kernel=include_kernel)
        same_model(at, dfl.load(path, at.model), delta)
    if at.n == 1:
        return
    left = np.concatenate([[0.0], np.ones(at.n - 1)])
    without = trained(at, weights=left)
    purged = at.fitted.edit(dfl.Remove([0])).commit().purge()
    same_model(at, purged, without, 2)
    assert not np.isin(np.asarray(at.x)[0], np.asarray(purged.x)).any()
    with raises(ValueError, "purged"):
        purged.edit(dfl.Reweight([0], [1.0]))


@row("Fitted.attribute", "attribution.Attribution", shared=True)
def leaving_points_out(at):
    if at.n == 1:
        with raises(ValueError, LOO_NEEDS_TWO):
            at.fitted.attribute(at.xq, at.yq)
        return
    s = np.ones(at.n)
    want = oracles.leave_one_out_loss(
        at.J, at.f0, np.asarray(at.y, float), s, at.ridge, oracles.squared, at.Jq, at.f0q,
        np.asarray(at.yq, float),
    )  # fmt: skip
    found = at.fitted.attribute(at.xq, at.yq)
    assert isinstance(found, dfl.attribution.Attribution)
    at.close(found.values, want, 50)
    first = at.fitted.attribute(at.xq, at.yq, first_order=True)
    at.close(first.values, first_order(at), 50)


@row("Fitted.attribute", quick=False)
def leaving_points_out_of_a_classifier(at):
    if at.n == 1:
        return
    few, s = at.classifier.attribute(at.xq, at.query_classes, refine=1e-3), np.ones(at.n)
    truth = oracles.leave_one_out_loss(
        at.J, at.f0, at.probabilities, s, at.ridge, oracles.LOSSES[at.loss_name], at.Jq, at.f0q,
        at.query_probabilities,
    )  # fmt: skip
    np.testing.assert_allclose(few.values, truth, atol=1e-2 * np.abs(truth).max() + 2e-3)
    for of in ("output", "margin") if at.c > 1 else ("output",):
        at.typed(at.classifier.attribute(at.xq, at.query_labels, of=of).values)


def first_order(at):
    """`w_i v_qᵀ J_q H⁻¹ J_iᵀ∇ℓ_i`, with squared error."""
    delta, y = trained(at), np.asarray(at.y, float)
    H = oracles.hessian(delta, at.J, at.f0, y, at.weights, at.ridge, oracles.squared)
    pull = np.einsum("iap,ia->pi", at.J, at.f0 + at.J @ delta - y) / at.n
    v = at.f0q + at.Jq @ delta - np.asarray(at.yq, float)
    return np.einsum("qa,qap->qp", v, at.Jq) @ np.linalg.solve(H, pull)


@row("Fitted.attribute_groups", "attribution.GroupAttribution", shared=True)
def leaving_groups_out(at):
    if at.n < 3:
        with raises(ValueError, "whole training set"):
            at.fitted.attribute_groups({"all": np.arange(at.n)}, at.xq, at.yq)
        return
    groups = {"first": [0], "others": np.arange(1, at.n - 1)}
    found = at.fitted.attribute_groups(groups, at.xq, at.yq)
    assert isinstance(found, dfl.attribution.GroupAttribution)
    np.testing.assert_array_equal(found.names, list(groups))
    f, yq = at.f0q + at.Jq @ trained(at), np.asarray(at.yq, float)
    for k, rows in enumerate(groups.values()):
        left = np.where(np.isin(np.arange(at.n), rows), 0.0, 1.0)
        after = at.f0q + at.Jq @ trained(at, weights=left)
        want = 0.5 * np.sum((after - yq) ** 2 - (f - yq) ** 2, axis=1)
        at.close(found.values[:, k], want, 50)
