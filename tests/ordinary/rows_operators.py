"""Every structure of `K` against its dense matrix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dualfluence import operators as ops
from dualfluence import store
from dualfluence.operators._base import as_mesh, on_mesh

from .table import each, raises, row

KINDS = (
    "AbstractKernelOperator BorderedOperator DenseOperator KroneckerOperator LowRankOperator "
    "MatrixFreeOperator MixedOperator ShardedMatrixFreeOperator ShardedOperator"
)


def sigma(at):
    return np.asarray(at.x, float) @ np.asarray(at.x, float).T + 0.1 * np.eye(at.n)


def built(at):
    """One operator of each structure and the matrix that it stands for."""
    n, c = at.n, at.c
    K, S = at.K.reshape(n * c, n * c), sigma(at)
    dense = ops.DenseOperator(jnp.asarray(K, at.dtype), c)
    yield dense, K
    kron = ops.KroneckerOperator(jnp.asarray(S, at.dtype), c)
    yield kron, np.kron(S, np.eye(c))
    yield ops.LowRankOperator(jnp.asarray(at.J, at.dtype)), K
    free = ops.MatrixFreeOperator(at.model, at.x, c)
    yield free, K
    more = np.concatenate([at.J, at.Jq])
    whole = np.einsum("iap,jbp->iajb", more, more)
    both = whole.reshape((n + at.q) * c, -1)
    cross = jnp.asarray(both[: n * c, n * c :], at.dtype)
    corner = ops.DenseOperator(jnp.asarray(both[n * c :, n * c :], at.dtype), c)
    yield ops.BorderedOperator(dense, cross, corner), both
    empty = ops.BorderedOperator.around(free, jnp.asarray(whole[:, :, n:], at.dtype))
    np.testing.assert_equal((empty.num_points, empty.cross.shape[1]), (n, 0))
    at.close(empty.mv(at.y), free.mv(at.y))
    yield ops.grow(free, jnp.asarray(whole[:, :, n:], at.dtype), n, n + at.q), both
    if at.bits == 64:
        narrow = ops.DenseOperator(jnp.asarray(K, jnp.float32), c)
        mixed = ops.widen(narrow)
        assert isinstance(mixed, ops.MixedOperator)
        yield mixed, np.asarray(narrow.matrix, float)
        assert ops.widen(dense) is dense
    else:
        with raises(ValueError, "jax_enable_x64"):
            ops.widen(dense)
    layout = on_mesh(n, as_mesh(jax.devices()))
    yield dense.spread(layout), K
    yield free.spread(layout), K
    path = at.folder / "operators-store"
    yield store.build(at.model, at.x, path).operator(), K


@eqx.filter_jit
def products(op, v, multiplied, written):
    """What the methods return, in one program: products, and derived operators multiplied or written out."""
    both = op.mm(jnp.stack([v, -2 * v], axis=2))
    found = op.mv(v), both, op.diagonal(), asked(op.dense), asked(lambda: op.wide_mv(v))
    return (
        *found,
        {name: made.mv(v) for name, made in multiplied.items()},
        {name: made.dense() for name, made in written.items()},
    )


def asked(call):
    """What a method returns, or the error that says that this structure does not have it."""
    try:
        return call()
    except ops.UnsupportedStructure as error:
        words = str(error)
    assert words.startswith("kernel: "), words
    return None


@row(*each("operators", KINDS, "take cut with_precision spread at_points with_columns"))
@row(*each("operators", KINDS, "with_features map_narrow"))
@row(*each("store", "StoredOperator", "take cut with_precision spread at_points with_columns"))
@row(*each("store", "StoredOperator", "with_features map_narrow"))
@row(*each("operators", KINDS, "mv mm dense diagonal check wide_mv"))
@row(*each("operators", KINDS, "num_points num_outputs num_bytes dtype solve_dtype layout rank"))
@row(*each("operators", KINDS, "in_memory has_entries is_kronecker follows_points grows narrow"))
@row(*each("operators", KINDS, "product_precision entries entries_on_mesh"))
@row("operators.DenseOperator.each", "operators.KroneckerOperator.each", "UnsupportedStructure")
@row(*each("store", "StoredOperator", "mv mm dense diagonal check wide_mv num_points num_outputs"))
@row(*each("store", "StoredOperator", "num_bytes dtype solve_dtype layout rank in_memory"))
@row(*each("store", "StoredOperator", "has_entries is_kronecker follows_points grows narrow"))
@row(*each("store", "StoredOperator", "product_precision entries entries_on_mesh"))
@row("operators.BorderedOperator.around", "operators.grow", "operators.widen", shared=True)
def every_structure(at):
    for op, K in built(at):
        name = type(op).__name__
        kinds = (ops.ShardedOperator, ops.ShardedMatrixFreeOperator)
        np.testing.assert_equal(isinstance(op, kinds), op.layout.sharding is not None)
        assert isinstance(op, ops.AbstractKernelOperator)
        n = op.num_points
        np.testing.assert_equal((n * at.c, op.num_outputs), (len(K), at.c))
        v = at.array(n, at.c, seed=21)
        want = (K @ np.asarray(v, float).ravel()).reshape(n, at.c)
        multiplied, written, wanted = changes(at, op, K)
        one, both, own, dense, wide, many, whole = products(op, v, multiplied, written)
        for how, value in many.items():
            at.close(value, want, what=f"{name}.{how}")
        for how, value in whole.items():
            at.close(value, wanted[how], what=f"{name}.{how}")
        at.close(one, want, what=name)
        at.close(both[:, :, 1], -2 * want, what=name)
        at.close(own, np.diagonal(K).reshape(n, at.c), what=name)
        assert dense is not None or op.layout.sharding is not None
        if dense is not None:
            at.close(dense, K, what=name)
        if wide is not None:
            at.close(wide, want, what=name)
        assert isinstance(op.check(), str)
        assert op.num_bytes >= 0
        np.testing.assert_equal(np.dtype(op.dtype), at.dtype)
        assert np.dtype(op.solve_dtype) <= at.dtype
        np.testing.assert_equal(op.layout.num_points, n)
        np.testing.assert_equal(op.entries_on_mesh is not None, isinstance(op, ops.ShardedOperator))
        assert op.rank is None or op.rank == at.theta.size
        np.testing.assert_equal(op.in_memory, name != "StoredOperator")
        np.testing.assert_equal(op.is_kronecker, name == "KroneckerOperator")
        np.testing.assert_equal(op.follows_points, "MatrixFree" in name)
        assert op.grows in (True, False)
        np.testing.assert_equal(op.narrow is op, name != "MixedOperator")
        assert op.product_precision in (None, jax.lax.Precision.HIGHEST)
        held = asked(op.entries)
        np.testing.assert_equal(held is not None, op.has_entries)
        if name in ("DenseOperator", "KroneckerOperator"):
            np.testing.assert_equal(len(held), n * op.each)


def changes(at, op, K):
    """Operators made of this one: same products, others written out, and what those must be."""
    n, c, size = at.n, at.c, op.num_points
    blocks, rows, m = (
        K.reshape(size, c, size, c),
        np.array([size - 1, 0, size - 1]),
        max(n, size - 1),
    )
    same = {
        "with_precision": asked(lambda: op.with_precision(jax.lax.Precision.HIGHEST)),
        "spread": asked(lambda: op.spread(on_mesh(size, as_mesh(jax.devices())))),
        "map_narrow": op.map_narrow(lambda inner: inner),
        "at_points": asked(lambda: op.at_points(at.x, op.layout)),
    }
    columns, grown = two_more(at, op, K)
    J = np.concatenate([at.J, at.Jq])
    features = jnp.asarray(at.Jq, at.dtype)
    others = {
        "take": asked(lambda: op.take(rows)),
        "cut": asked(lambda: op.cut(m)),
        "with_columns": asked(lambda: op.with_columns(columns, size, size + 2)),
        "with_features": asked(lambda: op.with_features(features, size, size + at.q)),
    }
    want = {
        "take": blocks[rows][:, :, rows].reshape(3 * c, 3 * c),
        "cut": blocks[:m, :, :m].reshape(m * c, -1),
        "with_columns": grown,
        "with_features": np.einsum("iap,jbp->iajb", J, J).reshape(len(J) * c, -1),
    }
    there = lambda made: {k: v for k, v in made.items() if v is not None}  # noqa: E731
    return there(same), there(others), want


def two_more(at, op, K):
    """The columns of two points after those that there are, and the matrix with them."""
    size, c = op.num_points, at.c
    if op.is_kronecker:
        new = np.concatenate([np.full((size, 2), 0.25), 2 * np.eye(2)])
        S = np.asarray(op.entries(), float)
        want = np.kron(np.block([[S, new[:size]], [new[:size].T, new[size:]]]), np.eye(c))
    else:
        corner = 2 * np.eye(2 * c).reshape(2, c, 2, c)
        new = np.concatenate([np.full((size, c, 2, c), 0.25), corner])
        side = new[:size].reshape(size * c, 2 * c)
        want = np.block([[K, side], [side.T, corner.reshape(2 * c, 2 * c)]])
    return jnp.asarray(new, at.dtype), want
