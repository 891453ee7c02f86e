"""The empirical kernel against the contracted Jacobian, in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS
from ntk_oracles import jacobian_kernel

from dualfluence.kernels import empirical_kernel, kernel_block, ntk_mv, traced_kernel

# Sums of a few thousand products of order one, both ways.
RTOL = 1e-12


def assert_close(got, want, rtol=RTOL):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=rtol * np.abs(want).max())


FEW = ("attention", "integers", "nonlinear")


@cache
def load(name):
    apply_fn, params, x = NETWORKS[name]()
    return apply_fn, params, x, jacobian_kernel(apply_fn, params, x)


@pytest.fixture(params=sorted(NETWORKS))
def case(request):
    return load(request.param)


@pytest.fixture(params=FEW)
def few(request):
    return load(request.param)


@pytest.mark.parametrize("method", ["structured", pytest.param("auto", marks=pytest.mark.slow)])
def test_equals_contracted_jacobian(case, method):
    apply_fn, params, x, want = case
    assert_close(empirical_kernel(apply_fn, params, x, method=method).value, want)
    mean = np.einsum("iaja->ij", want) / want.shape[1]
    assert_close(traced_kernel(apply_fn, params, x, method=method), mean)


def test_whole_jacobians(few):
    apply_fn, params, x, want = few
    assert_close(empirical_kernel(apply_fn, params, x, method="jacobian").value, want)


def test_two_sets_in_small_tiles_on_the_host(few):
    apply_fn, params, x, want = few
    got = empirical_kernel(apply_fn, params, x[:3], x[1:], tile_bytes=200_000, out="host").value
    assert isinstance(got, np.ndarray)
    assert_close(got, want[:3, :, 1:])


def test_block_under_jit(few):
    apply_fn, params, x, want = few
    arrays, statics = _split_arrays(params)
    block = jax.jit(lambda a, x1, x2: kernel_block(apply_fn, statics(a), x1, x2))
    assert_close(block(arrays, x[:2], x), want[:2])


def test_product_without_the_kernel(few):
    apply_fn, params, x, want = few
    v = np.random.default_rng(0).normal(size=want.shape[:2])
    got = ntk_mv(apply_fn, params, x, v, 2)
    assert_close(got, np.einsum("iajb,jb->ia", want, v))


def _split_arrays(params):
    leaves, treedef = jax.tree.flatten(params)
    where = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def join(arrays):
        full = list(leaves)
        for k, array in zip(where, arrays, strict=True):
            full[k] = array
        return jax.tree.unflatten(treedef, full)

    return [leaves[k] for k in where], join


def test_symmetric_tiles_mirror():
    apply_fn, params, _ = NETWORKS["mlp"]()
    x = jnp.asarray(np.random.default_rng(9).normal(size=(37, 5)))
    got = empirical_kernel(apply_fn, params, x, tile_bytes=20_000).value
    assert_close(got, jacobian_kernel(apply_fn, params, x))
    assert_close(got, np.transpose(got, (2, 3, 0, 1)))


def test_large_symmetric_kernels_are_cut_in_tiles():
    apply_fn, params, _ = NETWORKS["mlp"]()
    x = jnp.asarray(np.random.default_rng(9).normal(size=(700, 5)))
    ticks = []
    got = empirical_kernel(apply_fn, params, x, progress=lambda *t: ticks.append(t)).value
    assert len(ticks) == 15  # the upper half of 5 by 5
    assert_close(got[:40, :, -40:], jacobian_kernel(apply_fn, params, x[:40], x[-40:]))


def test_cross_terms_of_a_shared_weight_matter():
    # The sum over uses of each use's own kernel is what one gets by dropping the cross terms.
    apply_fn, params, x = NETWORKS["siamese"]()

    def apart(uses, x):
        a, b, d = uses["a"], uses["b"], uses["d"]
        h = jnp.tanh(x @ a) * jnp.tanh((x**2) @ b)
        back = jnp.tanh(h @ d.T) @ params["D"]
        return jnp.concatenate([h @ params["O"], back], axis=1)

    W = params["W"]
    without = empirical_kernel(apart, {"a": W, "b": W, "d": W}, x).value
    shared = empirical_kernel(apply_fn, params, x, trainable=lambda path: path == "W").value
    want = jacobian_kernel(lambda p, x: apply_fn({**params, "W": p}, x), W, x)
    assert_close(shared, want)
    assert np.abs(without - want).max() > 0.1 * np.abs(want).max()


@pytest.mark.parametrize(
    "trainable",
    [
        lambda path: path in ("W2", "b2"),
        {"W1": False, "b1": False, "W2": True, "b2": True},
    ],
    ids=["predicate", "pytree"],
)
def test_a_subset_of_parameters(trainable):
    apply_fn, params, x = NETWORKS["mlp"]()
    fixed = {k: params[k] for k in ("W1", "b1")}
    head = {k: params[k] for k in ("W2", "b2")}
    want = jacobian_kernel(lambda p, x: apply_fn({**fixed, **p}, x), head, x)
    assert_close(empirical_kernel(apply_fn, params, x, trainable=trainable).value, want)
    v = np.ones(want.shape[:2])
    got = ntk_mv(apply_fn, params, x, v, trainable=trainable)
    assert_close(got, np.einsum("iajb,jb->ia", want, v))


def test_a_prefix_selects_whole_subtrees():
    apply_mlp, flat, x = NETWORKS["mlp"]()
    params = {
        "body": {k: flat[k] for k in ("W1", "b1")},
        "head": {k: flat[k] for k in ("W2", "b2")},
    }

    def apply_fn(p, x):
        return apply_mlp({**p["body"], **p["head"]}, x)

    choice = {"body": True, "head": False}
    want = jacobian_kernel(lambda p, x: apply_fn({**params, "body": p}, x), params["body"], x)
    assert_close(empirical_kernel(apply_fn, params, x, trainable=choice).value, want)


def test_low_rank_adapters():
    base = NETWORKS["mlp"]()[1]
    rng = np.random.default_rng(0)
    lora = {"A": jnp.asarray(rng.normal(size=(5, 2))), "B": jnp.asarray(rng.normal(size=(2, 8)))}

    def apply(p, x):
        w = p["base"]["W1"] + p["lora"]["A"] @ p["lora"]["B"]
        return jnp.tanh(x @ w) @ p["base"]["W2"]

    x = jnp.asarray(rng.normal(size=(6, 5)))
    params = {"base": base, "lora": lora}
    got = empirical_kernel(apply, params, x, trainable={"base": False, "lora": True}).value
    want = jacobian_kernel(lambda p, x: apply({"base": base, "lora": p}, x), lora, x)
    assert_close(got, want)


def test_inputs_may_be_a_pytree():
    rng = np.random.default_rng(0)
    params = {"W": jnp.asarray(rng.normal(size=(3, 2))), "E": jnp.asarray(rng.normal(size=(5, 2)))}
    x = {"dense": jnp.asarray(rng.normal(size=(6, 3))), "id": jnp.asarray(rng.integers(0, 5, 6))}

    def apply(p, x):
        return jnp.tanh(x["dense"] @ p["W"] + p["E"][x["id"]])

    want = jacobian_kernel(apply, params, x)
    assert_close(empirical_kernel(apply, params, x, tile_bytes=4000).value, want)


def test_repeated_calls_do_not_trace_again():
    apply_fn, params, x = NETWORKS["mlp"]()
    traces = []

    def counted(p, x):
        traces.append(x.shape)
        return apply_fn(p, x)

    first = empirical_kernel(counted, params, x).value
    before = len(traces)
    again = jax.tree.map(lambda a: 2 * a, params)
    second = empirical_kernel(counted, again, x).value
    assert len(traces) == before
    assert np.abs(first - second).max() > 0
    assert_close(second, jacobian_kernel(apply_fn, again, x))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_low_precision_parameters_give_a_float32_kernel(dtype):
    apply_fn, params, x = NETWORKS["mlp"]()
    low = jax.tree.map(lambda a: a.astype(dtype), params)
    got = empirical_kernel(apply_fn, low, x.astype(dtype)).value
    same = jax.tree.map(lambda a: a.astype(jnp.float64), low)
    want = jacobian_kernel(apply_fn, same, x.astype(dtype).astype(jnp.float64))
    assert got.dtype == jnp.float32
    assert_close(got, want, rtol=2e-6)  # float32 rounding of sums of about ten products


def test_deep_networks_sum_more_products_than_are_held_at_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)))
    params = [jnp.eye(4) + 0.1 * k for k in range(8)]

    def apply(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return x

    want = jacobian_kernel(apply, params, x)
    assert_close(empirical_kernel(apply, params, x).value, want)
    slope = jax.grad(lambda p: kernel_block(apply, p, x, x).sum())(params)[0]
    step = [jnp.zeros((4, 4)).at[1, 2].set(1e-6), *[0.0] * 7]
    up, down = ([w + s * d for w, d in zip(params, step, strict=True)] for s in (1, -1))
    rise = jacobian_kernel(apply, up, x).sum() - jacobian_kernel(apply, down, x).sum()
    np.testing.assert_allclose(slope[1, 2], rise / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("tile_bytes", [None, 40_000])
def test_a_flat_kernel_has_the_same_entries(tile_bytes):
    apply_fn, params, x = NETWORKS["mlp"]()
    whole = empirical_kernel(apply_fn, params, x, tile_bytes=tile_bytes).value
    flat = empirical_kernel(apply_fn, params, x, tile_bytes=tile_bytes, flat=True).value
    np.testing.assert_array_equal(flat, np.asarray(whole).reshape(flat.shape))
