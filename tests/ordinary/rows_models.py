"""Networks and their tangent kernels, against the Jacobian written out."""

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import kernels

from .table import each, flat, network, outputs, raises, row


@row("linearize", "Linearized", "Linearized.base_outputs", "Linearized.apply_shape")
def outputs_of_a_network(at):
    model = dfl.linearize(network, at.params)
    assert isinstance(model, dfl.Linearized)
    at.close(model.base_outputs(at.x), at.f0)
    at.close(model(at.other, at.x), outputs(at.other, at.x))
    np.testing.assert_array_equal(model.apply_shape(at.x), (at.n, at.c))


@row("Linearized.linearised", "Linearized.jvp", "Linearized.vjp", "Linearized.jacobian")
def products_with_the_jacobian(at):
    move = jax.tree.map(jnp.subtract, at.other, at.params)
    at.close(at.model.linearised(at.other, at.x), at.f0 + at.J @ flat(move))
    at.close(at.model.jvp(at.x, move), at.J @ flat(move))
    at.close(flat(at.model.vjp(at.x, at.y)), np.einsum("nap,na->p", at.J, np.asarray(at.y, float)))
    J = at.model.jacobian(at.x)
    whole = [np.asarray(J[k], float).reshape(at.n, at.c, -1) for k in ("W1", "W2", "b")]
    at.close(np.concatenate(whole, axis=2), at.J)


@row(
    "Linearized.kernel",
    "Linearized.kernel_block",
    "Linearized.kernel_diagonal",
    "Linearized.kernel_rows",
    "Linearized.kernel_along",
)
def kernels_of_a_network(at):
    at.close(at.model.kernel(at.x), at.K)
    at.close(at.model.kernel(at.xq, at.x), at.Kq)
    at.typed(at.model.kernel(at.x, at.x))
    at.close(at.model.kernel_block(at.xq, at.x), at.Kq)
    at.close(at.model.kernel_diagonal(at.x), np.einsum("iaia->ia", at.K))
    for start, block in at.model.kernel_rows(at.x, 4):
        assert start >= 0, f"a block starts at row {start}"
        at.close(block, at.K[start : start + 4])
    along = at.model.kernel_along(at.xq, at.yq, at.x)
    at.close(along, np.einsum("qa,qanb->qnb", np.asarray(at.yq, float), at.Kq))


@row(
    "Linearized.split",
    "Linearized.norm",
    "Linearized.distance",
    "Linearized.num_params",
    "Linearized.dtype",
    "Linearized.arithmetic_eps",
    "Linearized.notes",
    "Linearized.batch",
    "Linearized.size",
    "Linearized.widening",
    "Linearized.widened",
)
def facts_about_a_network(at):
    at.close(at.model.size, np.linalg.norm(at.theta))
    assert at.model.widening is None
    if at.bits == 64:
        wide = at.model.widened()
        assert wide.widening is not None
        at.close(wide.base_outputs(at.x), at.f0)
    theta, rest = at.model.split(at.params)
    np.testing.assert_array_equal(flat(theta), at.theta)
    np.testing.assert_equal(jax.tree.leaves(rest), [])
    gap = flat(at.other) - at.theta
    at.close(at.model.norm(jax.tree.map(jnp.subtract, at.other, at.params)), np.linalg.norm(gap))
    at.close(at.model.distance(at.other, at.params), np.linalg.norm(gap))
    np.testing.assert_equal(at.model.num_params, at.theta.size)
    np.testing.assert_equal(np.dtype(at.model.dtype), at.dtype)
    np.testing.assert_equal(at.model.arithmetic_eps, np.finfo(at.dtype).eps)
    np.testing.assert_equal(at.model.notes, ())
    assert 1 <= at.model.batch(at.x) <= at.n


@row(
    "Linearized.in_scale",
    "Linearized.enter",
    "Linearized.leave",
    "Linearized.leave_step",
    "Linearized.as_given",
    "Linearized.plain",
    "Linearized.bound",
    "Linearized.reading",
)
def a_network_with_a_scale(at):
    scale = {"W1": 4.0, "W2": None, "b": 9.0}
    model = dfl.linearize(network, at.params, scale=scale)
    P = np.concatenate([np.full(at.params[k].size, scale[k] or 1.0) for k in ("W1", "W2", "b")])
    own = model.in_scale()
    at.close(own.kernel(at.xq, at.x), np.einsum("qap,p,nbp->qanb", at.Jq, P, at.J))
    entered = own.enter(at.other)
    at.close(own(entered, at.x), outputs(at.other, at.x))
    at.close(flat(own.leave(entered)), flat(at.other))
    gap = flat(at.other) - at.theta
    at.close(model.distance(at.other, at.params), np.linalg.norm(gap / np.sqrt(P)))
    back = own.as_given()
    at.close(flat(back.params), at.theta)
    at.close(back.kernel(at.xq, at.x), own.kernel(at.xq, at.x))
    at.close(own.plain(at.x).kernel(at.xq, at.x), at.Kq)
    at.close(model.bound(at.x).kernel(at.xq, at.x), own.kernel(at.xq, at.x))
    at.close(model.reading(None).kernel(at.xq, at.x), own.kernel(at.xq, at.x))
    step = jax.tree.map(jnp.subtract, at.other, at.params)
    at.close(flat(at.model.leave_step(step)), gap)


@row("kernels.empirical_kernel", "kernels.EmpiricalKernel", "kernels.kernel_report")
@row("kernels.KernelReport", "kernels.LeafReport")
def kernels_of_a_function(at):
    found = kernels.empirical_kernel(network, at.params, at.x)
    assert isinstance(found, kernels.EmpiricalKernel)
    at.close(found.value, at.K)
    at.typed(found.value)
    at.close(kernels.empirical_kernel(network, at.params, at.xq, at.x).value, at.Kq)
    for report in (found.report, kernels.kernel_report(network, at.params, at.x)):
        assert isinstance(report, kernels.KernelReport)
        assert all(isinstance(leaf, kernels.LeafReport) for leaf in report.leaves)
        rules = [leaf.rule for leaf in report.leaves]
        np.testing.assert_array_equal(rules, ["dense", "dense", "bias"])


@row("kernels.kernel_block", "kernels.traced_kernel", "kernels.kernel_rows", "kernels.ntk_mv")
@row("kernels.narrowest_dtype")
def other_ways_to_the_kernel(at):
    at.close(kernels.kernel_block(network, at.params, at.xq, at.x), at.Kq)
    trace, trace_q = (np.einsum("iaja->ij", K) / at.c for K in (at.K, at.Kq))
    at.close(kernels.traced_kernel(network, at.params, at.x), trace)
    at.close(kernels.traced_kernel(network, at.params, at.xq, at.x), trace_q)
    for start, block in kernels.kernel_rows(network, at.params, at.x, 3):
        at.close(block, at.K[start : start + 3])
    v = np.asarray(at.y, float)
    at.close(kernels.ntk_mv(network, at.params, at.x, at.y), np.einsum("iajb,jb->ia", at.K, v))
    narrow = kernels.narrowest_dtype(network, at.params, at.x)
    np.testing.assert_equal(np.dtype(narrow), at.dtype)


@row(*each("", "PrecomputedKernel", "kernel purged"), *each("", "Kernel", "kernel"), shared=True)
def kernels_without_a_network(at):
    S = np.asarray(at.x, float) @ np.asarray(at.x, float).T
    pool = dfl.PrecomputedKernel(jnp.asarray(S, at.dtype))
    every = np.arange(at.n)
    at.close(pool.kernel(every, every[::-1].copy()), S[:, ::-1])
    kept, last = np.arange(at.n) != 0, np.full(at.n, at.n - 1)
    stand_ins = np.where(kept, every, last)
    purged = pool.purged(jnp.asarray(every), kept, jnp.asarray(stand_ins))
    at.close(purged.kernel(every, every), S[np.ix_(stand_ins, stand_ins)])

    class Linear:
        def kernel(self, x1, x2):
            return jnp.asarray(x1) @ jnp.asarray(x2).T

    stranger: dfl.Kernel = Linear()
    fitted = dfl.fit(stranger, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    A = S + at.n * at.ridge * np.eye(at.n)
    want = np.asarray(at.xq, float) @ np.asarray(at.x, float).T @ np.linalg.solve(A, at.y)
    at.close(fitted.predict(at.xq), want)
    at.close(stranger.kernel(at.x, at.x), S)
    held = dfl.fit(pool, every, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    at.close(held.outputs, S @ np.linalg.solve(A, at.y))
    with raises(TypeError, "parameters"):
        fitted.params()


@row("low_rank", "kernel_operator", "KernelOptions", shared=True)
def ways_to_hold_a_kernel(at):
    dense = at.K.reshape(at.n * at.c, -1)
    at.close(dfl.kernel_operator(at.model, at.x).dense(), dense)
    for form in ("dense", "matrix-free"):
        op = dfl.kernel_operator(at.model, at.x, kernel=dfl.KernelOptions(form=form))
        at.close(op.mv(at.y), np.einsum("iajb,jb->ia", at.K, np.asarray(at.y, float)))
    whole = dfl.low_rank(at.model, at.x, at.n * at.c)
    fitted = dfl.fit(whole, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    # Landmarks at every point: their kernel's own rank, so that nothing is left out.
    at.close(fitted.outputs, at.fitted.outputs, 30)
    few = dfl.low_rank(at.model, at.x, 2, method="random-features")
    op = dfl.kernel_operator(few, at.x)
    at.typed(op.dense())
    np.testing.assert_equal(op.rank, 2)
    ranks = np.linalg.eigvalsh(np.asarray(op.dense(), float)) > 1e-4 * op.dense().max()
    assert ranks.sum() <= 2
