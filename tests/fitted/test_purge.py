"""A purged point is gone from memory and from files, and every later answer is as before."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import problems

GONE, ALSO = [2, 5], [7]


def problem(loss_name="softmax"):
    return problems.linear_problem(14, 2, 40, loss_name, ridge=0.05)


def removed(p, **options):
    fitted = cases.fit(p, **options)
    return fitted.edit(dfl.Remove(GONE)).commit()


def holds(data: bytes, row: np.ndarray) -> bool:
    """Whether a few neighbouring numbers of the row are in there, in either precision."""
    flat = np.asarray(row).reshape(-1)
    return any(flat[:4].astype(kind).tobytes() in data for kind in (np.float64, np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *gates.table(
            [
                {"kernel": "matrix-free", "sketch": dfl.Sketch(8)},
                {"solver": dfl.CG(), "sketch": dfl.Sketch(8)},
                {"dtype": jnp.float32, "kernel": dfl.KernelOptions(refine=True)},
            ],
            quick=[],
        ),
    ],
    ids=["dense", "matrix-free", "cg", "refined"],
)
@pytest.mark.thorough
def test_later_requests_are_unchanged(options, tmp_path):
    p = problem()
    before = removed(p, **options)
    after = before.purge()
    after.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", cases.model(p, options.get("dtype", jnp.float64)))
    edits = [dfl.Remove(ALSO), dfl.Add(p.x_q[:1], p.y_q[:1]), dfl.Relabel([0], p.y_q[:1])]
    for edit in edits:
        want = before.edit(edit, until=1e-6)
        for fitted in (after, again):
            got = fitted.edit(edit, until=1e-6)
            # Both are within 1e-6 of the same optimum; rows of purged points are zero in both.
            assert cases.relative(got.params(), want.params()) < 1e-5
            assert not np.asarray(got.alpha)[GONE].any()
    scale = np.abs(before.predict(p.x_q)).max()
    eps = np.finfo(np.float32 if "dtype" in options else np.float64).eps
    np.testing.assert_allclose(after.predict(p.x_q), before.predict(p.x_q), atol=100 * eps * scale)
    np.testing.assert_array_equal(after.alpha[ALSO[0]], before.alpha[ALSO[0]])
    assert after.certificate == before.certificate


def test_later_requests_match_retraining_without_the_purged_points():
    p = problem("squared")
    purged = removed(p).purge()
    got = purged.edit(dfl.Remove(ALSO)).params()
    want = cases.retrain(p, cases.without(p, GONE + ALSO))
    assert cases.relative(got, want) < 1e-10  # one step is exact for squared error


@pytest.mark.parametrize("form", gates.table(["dense", "matrix-free"], ["dense"]))
def test_rows_are_gone_from_memory_and_file(tmp_path, form):
    p = problem()
    rows = [p.x[i] for i in GONE]
    fitted = removed(p, kernel=form, solver=dfl.CG(), sketch=dfl.Sketch(8))
    fitted.save(tmp_path / "before.npz")
    assert all(holds((tmp_path / "before.npz").read_bytes(), row) for row in rows)
    assert holds((tmp_path / "before.npz").read_bytes(), p.y[GONE[1]])
    # The search finds rows in memory as well: without this line the next search would prove nothing.
    assert any(holds(np.asarray(a).tobytes(), rows[0]) for a in jax.live_arrays())
    purged = fitted.purge()
    kernel = np.array(fitted.kernel_op.dense())[2 * GONE[0], :4]
    del fitted
    gc.collect()
    live = [np.asarray(a).tobytes() for a in jax.live_arrays() if a.dtype != "key<fry>"]
    soft = p.y[GONE[1]]  # probabilities that no other row has
    for row in (*rows, kernel, soft):
        assert not any(holds(data, row) for data in live)
    purged.save(tmp_path / "after.npz", include_kernel=form == "dense")
    data = (tmp_path / "after.npz").read_bytes()
    assert not any(holds(data, row) for row in (*rows, kernel, soft))


def test_targets_and_dual_variables_of_purged_points_are_gone():
    p = problem("squared")
    before = removed(p).with_jacobian()
    after = before.purge()
    for i in GONE:
        for array in (after.data.targets, after.x, after.outputs, after.kernel_diagonal):
            stand_in = np.asarray(array)[0]
            np.testing.assert_array_equal(np.asarray(array)[i], stand_in)
        assert not np.asarray(after.alpha)[i].any()
    for leaf in jax.tree.leaves(after.source.jacobian):
        np.testing.assert_array_equal(leaf[GONE[0]], leaf[0])
    assert cases.relative(after.params(), before.params()) < 1e-12


def test_no_edit_brings_a_purged_point_back(tmp_path):
    p = problem()
    purged = removed(p).purge()
    purged.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", cases.model(p))
    later = purged.edit(dfl.Add(p.x_q[:1], p.y_q[:1])).commit().edit(dfl.Remove(ALSO)).commit()
    for fitted in (purged, again, later, later.purge()):
        with pytest.raises(ValueError, match="point 2 was purged"):
            fitted.edit(dfl.Reweight([2], [1.0]))
        for edit in (dfl.Remove([2]), dfl.Relabel([2], p.y[:1]), dfl.Replace([2], x=p.x[:1])):
            with pytest.raises(ValueError, match="not in the training set"):
                fitted.edit(edit)
    removed(p).edit(dfl.Reweight([2], [1.0]))  # without a purge it can


@pytest.mark.thorough
def test_a_kernel_matrix_loses_the_rows_too():
    _, sigma, _ = problems.kronecker_problem(9, 2, 6, "squared")
    y = np.random.default_rng(0).normal(size=(6, 2))
    model = dfl.PrecomputedKernel(jnp.asarray(sigma))
    options = {"loss": dfl.SquaredError(), "ridge": 0.1}
    before = dfl.fit(model, np.arange(6), y, **options).edit(dfl.Remove([1])).commit()
    after = before.purge()
    queries = np.arange(6, 9)
    np.testing.assert_allclose(after.predict(queries), before.predict(queries), rtol=1e-12)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((after.source, after.kernel_op))]
    assert not any(np.isin(sigma[1, 2:5], leaf).any() for leaf in leaves)
    np.testing.assert_array_equal(after.x, [0, 0, 2, 3, 4, 5])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::dualfluence.dual._fidelity.FidelityWarning")
@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_a_trained_network_keeps_its_parameters(tmp_path, tangent):
    theta_0 = cases.mlp_params(jax.random.key(0), (5, 8, 2))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 5)), rng.normal(size=(10, 2))
    theta = jax.tree.map(lambda t: t + 0.1, theta_0)
    model = dfl.linearize(cases.mlp, theta_0)
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "tangent": tangent}
    for linearised in (True, False):
        fitted = dfl.from_trained(model, theta, x, y, linearised=linearised, **options)
        before = fitted.edit(dfl.Remove(GONE)).commit()
        after = before.purge()
        flat = lambda tree: np.concatenate([np.ravel(t) for t in jax.tree.leaves(tree)])  # noqa: E731
        assert cases.relative(flat(after.params()), flat(before.params())) < 1e-13
        one, two = (f.edit(dfl.Remove(ALSO)) for f in (before, after))
        assert cases.relative(flat(two.params()), flat(one.params())) < 1e-12
        assert cases.relative(two.delta_alpha, one.delta_alpha) < 1e-9
        want, got = (f.predict(x[:3], linearised=linearised) for f in (one, two))
        np.testing.assert_allclose(got, want, atol=1e-11)
        after.save(tmp_path / "a.npz")
        again = dfl.load(tmp_path / "a.npz", model, progress=False).edit(dfl.Remove(ALSO))
        np.testing.assert_array_equal(again.delta_alpha, two.delta_alpha)
        np.testing.assert_array_equal(flat(again.params()), flat(two.params()))


@pytest.mark.thorough
def test_what_cannot_be_purged_is_refused_clearly(tmp_path):
    p = problem("squared")
    model, x = cases.model(p), jnp.asarray(p.x)
    options = {"loss": dfl.SquaredError(), "ridge": 0.05}

    def gone(fitted, indices):
        return fitted.edit(dfl.Remove(indices)).commit()

    store = dfl.store.build(model, x, tmp_path / "k", tile=5, progress=False)
    stored = dfl.fit(model, x, p.y, kernel=store.operator(), **options)
    with pytest.raises(ValueError, match="on disk"):
        gone(stored, GONE).purge()
    spread = gone(cases.fit(p), GONE).on(jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh"):
        spread.purge()
    low = dfl.low_rank(model, x, 6)
    marks = np.asarray(low.landmarks)
    is_mark = np.array([(row == marks).reshape(len(marks), -1).all(1).any() for row in p.x])
    fitted = dfl.fit(low, x, p.y, **options)
    with pytest.raises(ValueError, match=f"point {np.argmax(is_mark)} is a landmark"):
        gone(fitted, [int(np.argmax(is_mark))]).purge()
    other = gone(fitted, [int(np.argmin(is_mark))])
    np.testing.assert_allclose(other.purge().predict(p.x_q), other.predict(p.x_q), atol=1e-12)


def test_an_edit_that_stopped_early_is_not_purged():
    p = problem()
    fitted = removed(p)
    half = fitted.state.alpha.at[GONE[0]].set(0.01)
    early = dfl.Update(fitted.source, fitted.data, type(fitted.state)(half, fitted.state.k_alpha),
                       None, fitted, fitted.certificate, fitted.stats).commit()  # fmt: skip
    with pytest.raises(ValueError, match="stopped early"):
        early.purge()


@pytest.mark.thorough
def test_spare_rows_of_added_points_are_purged_as_well():
    """Room for points to come is filled with copies of the last one, which may be removed."""
    p = problem()
    added = cases.fit(p).edit(dfl.Add(p.x_q[:1], p.y_q[:1])).commit()
    before = added.edit(dfl.Remove([14])).commit()
    after = before.purge()
    arrays = jax.tree.leaves((after.kernel_op, after.data.x, after.offset, after.source))
    assert not any(holds(np.asarray(a).tobytes(), p.x_q[0]) for a in arrays)
    want, got = (f.edit(dfl.Remove(ALSO), until=1e-9).params() for f in (before, after))
    assert cases.relative(got, want) < 1e-7


def test_nothing_to_purge_changes_nothing():
    fitted = cases.fit(problem())
    assert fitted.purge() is fitted
