"""Added points go into spare rows: exact answers, exact shapes, and few compilations."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.dual import _newton
from dualfluence.operators._base import MAX_SPARE, MIN_SPARE, rows_for

C = 2
LOSS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.05, "progress": False}


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


def rbf(a, b):
    return jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1))


def data(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 4)), rng.integers(0, C, count)


def model(dtype=np.float64):
    rng = np.random.default_rng(3)
    params = {"inner": rng.normal(size=(4, 6)), "outer": rng.normal(size=(6, C))}
    return dfl.linearize(network, jax.tree.map(lambda a: jnp.asarray(a, dtype), params))


def stored(x, folder):
    return dfl.store.build(rbf, x, folder / "k", num_outputs=C, tile=7, progress=False).operator()


REFINED = dfl.KernelOptions(refine=True)
FORMS = {
    "dense": lambda x, folder: (model(), {}),
    "dense, CG": lambda x, folder: (model(), {"solver": dfl.CG(), "sketch": dfl.Sketch(5)}),
    "matrix-free": lambda x, folder: (model(), {"kernel": "matrix-free"}),
    "kronecker": lambda x, folder: (rbf, {"kernel": dfl.KernelOptions(num_outputs=C)}),
    "low rank": lambda x, folder: (
        dfl.low_rank(model(), x, 8, method="random-features"),
        {},
    ),
    "stored": lambda x, folder: (rbf, {"kernel": stored(x, folder)}),
    "refined": lambda x, folder: (model(np.float32), {"kernel": REFINED, "tolerance": 1e-12}),
}


def scratch(form, folder, x, y, weights):
    """A fit of all points at once; of a store, which holds the first ones only, the same kernel."""
    source, options = FORMS[form](x, folder)
    return dfl.fit(source, x, y, weights=weights, **{**LOSS, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_of_additions_is_a_fit_of_all_points(form, tmp_path):
    n, added = 20, 3
    x, y = data(n + added)
    source, options = FORMS[form](x[:n], tmp_path / "old")
    dtype = np.float32 if form == "refined" else np.float64
    x = x.astype(dtype)
    fitted = dfl.fit(source, x[:n], y[:n], **{**LOSS, **options})
    until = 1e-5 if form == "refined" else 1e-10  # parameters in float32 round by more
    for i in range(n, n + added):
        update = fitted.edit(dfl.Add(x[i : i + 1], y[i : i + 1]), until=until)
        assert update.delta_alpha.shape == update.alpha.shape == update.outputs.shape == (i + 1, C)
        assert update.x.shape == (i + 1, 4)
        fitted = update.commit()
        assert fitted.kernel_op.num_points == rows_for(n + 1, 0)
    new = dfl.Replace([1], x=x[:1] + 0.5)
    fitted = fitted.edit([new, dfl.Remove([n + 1])], until=until).commit()

    x_all, y_all = np.concatenate([x, x[:1] + 0.5]).astype(dtype), np.append(y, y[1])
    weights = np.ones(n + added + 1)
    weights[[1, n + 1]] = 0
    if form == "low rank":  # the same random features
        want = dfl.fit(source, x_all, y_all, weights=weights, **LOSS)
    else:
        want = scratch(form, tmp_path / "new", x_all, y_all, weights)
    # Both are certified to within `until` of the optimum of a problem with outputs of order one. The entries
    # of a float32 kernel, about 20, round by the shapes of their tiles: there the kernels differ by 2e-6.
    slack = 1e-5 if form == "refined" else 1e-9
    np.testing.assert_allclose(fitted.outputs, want.outputs, atol=slack)
    np.testing.assert_allclose(fitted.alpha, want.alpha, atol=slack / 0.05)
    np.testing.assert_allclose(fitted.predict(x[:5] + 1), want.predict(x[:5] + 1), atol=slack)
    if want.source.network is not None:
        for one, other in zip(*map(jax.tree.leaves, (fitted.params(), want.params())), strict=True):
            np.testing.assert_allclose(one, other, atol=10 * slack)


FIRST_SIZES = {"dense": 23, "kronecker": 33, "matrix-free": 43, "low rank": 53, "stored": 63}
"""Another size for each, so that none finds what another one has compiled."""


@pytest.mark.thorough
@pytest.mark.parametrize("form", FIRST_SIZES)
def test_a_stream_of_additions_compiles_a_few_times(form, tmp_path, caplog):
    n, added = FIRST_SIZES[form], 8
    x, y = data(n + added, seed=1)
    source, options = FORMS[form](x[:n], tmp_path)
    fitted = dfl.fit(source, x[:n], y[:n], **{**LOSS, **options})

    def add(i):
        update = fitted.edit(dfl.Add(x[i : i + 1], y[i : i + 1]))
        jax.block_until_ready((update.predict(x[:2]), update.delta_outputs(x[:2])))
        return update.commit()

    fitted = add(n)  # grows
    fitted = add(n + 1)  # finds room
    traces = _newton.COUNTERS["traces"]
    assert fitted.kernel_op.num_points - fitted.data.num_points >= MIN_SPARE - 1
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for i in range(n + 2, n + added):
            fitted = add(i)
    assert _newton.COUNTERS["traces"] == traces
    compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert compiled == []


def test_capacity_is_bounded():
    assert rows_for(10, 12) == 12
    assert rows_for(13, 12) == 13 + MIN_SPARE
    assert rows_for(10_000, 0) == 10_000 + MAX_SPARE
    count, rows = 0, 500
    for points in range(500, 600):
        count += points > rows
        rows = rows_for(points, rows)
    assert count <= 2


@pytest.mark.thorough
def test_models_with_spare_rows_save_and_read_out_like_others(tmp_path):
    x, y = data(24, seed=2)
    fitted = dfl.fit(model(), x[:20], y[:20], **LOSS)
    fitted = fitted.edit(dfl.Add(x[20:], y[20:]), until=1e-10).commit()
    exact = fitted.without_spare_rows()
    assert exact.kernel_op.num_points == 24
    np.testing.assert_array_equal(exact.alpha, fitted.alpha)
    fitted.save(tmp_path / "m.npz", include_kernel=True)
    loaded = dfl.load(tmp_path / "m.npz", model())
    gone = dfl.Remove([3, 21])
    updates = [each.edit(gone) for each in (fitted, exact, loaded)]
    for update in updates[1:]:
        np.testing.assert_allclose(update.delta_alpha, updates[0].delta_alpha, atol=1e-11)
    held = fitted.with_jacobian().edit(gone)
    np.testing.assert_allclose(held.params()["outer"], updates[0].params()["outer"], atol=1e-11)
    moved = fitted.on(jax.devices()[:1]).edit(gone, rtol=1e-13)
    np.testing.assert_allclose(moved.delta_alpha, updates[0].delta_alpha, atol=1e-9)
