"""What is proven to keep points apart, operation by operation: nothing is computed, only traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dualfluence.kernels._apart import proves_apart

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)))
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)))
BATCHED = (((1,), (1,)), ((0,), (0,)))


def conv(x, kernel, layout=("NHWC", "HWIO", "NHWC")):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def sum_of(x, window):
    return lax.reduce_window(x, 0.0, lax.add, window, (1, 1), "SAME")


def look_up(table, index):
    return jnp.take_along_axis(table, index, axis=1)


def go(test, body):
    return lambda w, x: lax.while_loop(test, lambda s: (s[0] + 1, body(s[1], w)), (0, x))[1]


APART = {
    "product": lambda w, x: x @ w,
    "product from the left": lambda w, x: (w @ x.T).T,
    "product point by point": lambda w, x: lax.dot_general(x, x[:, :, None] * w, BATCHED),
    "constants of one row": lambda w, x: jnp.tanh(x + w[:1]) * w[1] + 1,
    "the same constant for all": lambda w, x: x * jnp.broadcast_to(w[0], x.shape),
    "a product with that": lambda w, x: x * (jnp.ones((len(x), 3)) @ w[:3]),
    "softmax": lambda w, x: jax.nn.softmax(x @ w, axis=1),
    "largest": lambda w, x: w[jnp.argmax(x, axis=1)],
    "own entries": lambda w, x: look_up(x @ w, jnp.argsort(x, axis=1)),
    "entries of all": lambda w, x: (x @ w)[:, jnp.asarray([2, 0])],
    "by index": lambda w, x: jax.vmap(lambda v: w[jnp.int32(v[0])])(x),
    "sorted": lambda w, x: jnp.sort(x @ w, axis=1),
    "two largest": lambda w, x: lax.top_k(x @ w, 2)[0],
    "cumulated": lambda w, x: jnp.cumsum(x @ w, axis=1),
    "turned": lambda w, x: lax.rev(x @ w, (1,)),
    "padded": lambda w, x: jnp.pad(x @ w, ((0, 0), (1, 2))),
    "joined": lambda w, x: jnp.concatenate([x, x @ w], axis=1),
    "split": lambda w, x: jnp.split(x @ w, 2, axis=1)[1],
    "cut": lambda w, x: (x @ w)[:, 1:3],
    "cut anywhere": lambda w, x: lax.dynamic_slice_in_dim(x @ w, jnp.argmax(w[0]), 2, axis=1),
    "overwritten": lambda w, x: lax.dynamic_update_slice(x @ w, x[:, :1], (0, 2)),
    "windows": lambda w, x: sum_of(x @ w, (1, 2)),
    "images": lambda w, x: conv(x.reshape(-1, 2, 2, 1), w.reshape(2, 2, 1, 4)).reshape(len(x), -1),
    "in pieces": lambda w, x: (x.reshape(-1, 2) @ w[:2]).reshape(len(x), -1),
    "another axis": lambda w, x: jnp.moveaxis(x[:, None, :, None] * w[0], 0, 2)[0].sum(0),
    "a scan of entries": lambda w, x: lax.scan(lambda c, v: (c + v, c * v), x[:, 0], x.T)[1].T @ w,
    "a scan with constants": lambda w, x: lax.scan(
        lambda c, v: (c + v[0] * v[1], c), x[:, 0],
        (x.T, jnp.broadcast_to(w[:, :1], (4, len(x)))),
    )[1].T,
    "paired in another order": lambda w, x: lax.dot_general(
        x.T[:, :, None], x.T[:, :, None], (((2,), (2,)), ((1, 0), (1, 0)))
    ),
    "a scan from zero": lambda w, x: lax.scan(lambda c, v: (c + v, c), jnp.zeros(len(x)), x.T)[0][:, None],
    "a loop": lambda w, x: lax.fori_loop(0, 3, lambda i, s: jnp.tanh(s @ w), x),
    "a loop that counts": go(lambda s: s[0] < 3, lambda x, w: jnp.tanh(x @ w)),
    "a branch": lambda w, x: lax.cond(w[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
    "row by row": lambda w, x: jax.vmap(lambda v: jnp.tanh(v @ w))(x),
    "bytes": lambda w, x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint8), jnp.float64
    ) @ w,
    "nothing of the points": lambda w, x: jnp.broadcast_to(w[:1], x.shape),
}  # fmt: skip

COUPLED = {
    "mean": lambda w, x: (x - x.mean(0)) @ w,
    "largest of all": lambda w, x: x @ w / jnp.max(jnp.abs(x)),
    "place of the largest": lambda w, x: x @ w + jnp.argmax(x, axis=0),
    "product of points": lambda w, x: x @ x.T @ x @ w,
    "product over points": lambda w, x: x @ (x.T @ x) @ w,
    "number of the point": lambda w, x: x @ w * jnp.arange(1.0, len(x) + 1)[:, None],
    "weights of points": lambda w, x: jnp.einsum("n,nj->nj", jnp.linspace(1, 2, len(x)), x @ w),
    "different constants": lambda w, x: x + w[: len(x)],
    "a product with those": lambda w, x: x * (w[: len(x), :3] @ w[:3]),
    "constants paired with points": lambda w, x: lax.dot_general(
        x, jnp.broadcast_to(w, (len(x), 4, 4)) * jnp.arange(len(x))[:, None, None], BATCHED
    ),
    "the point before": lambda w, x: jnp.roll(x, 1, axis=0) @ w,
    "cumulated": lambda w, x: jnp.cumsum(x @ w, axis=0),
    "turned": lambda w, x: lax.rev(x @ w, (0,)),
    "sorted": lambda w, x: jnp.sort(x @ w, axis=0),
    "largest": lambda w, x: lax.top_k((x @ w).T, len(x))[0].T,
    "moved by padding": lambda w, x: jnp.pad(x @ w, ((1, 0), (0, 0)))[:-1],
    "joined": lambda w, x: jnp.concatenate([x[1:], x[:1]], axis=0) @ w,
    "some of the points": lambda w, x: jnp.broadcast_to(x[1:2], x.shape) @ w,
    "cut where a point says": lambda w, x: lax.dynamic_slice_in_dim(w, jnp.int32(x[0, 0]), 1) + x,
    "one row overwritten": lambda w, x: lax.dynamic_update_slice(x, x[:1], (1, 0)) @ w,
    "overwritten where a point says": lambda w, x: lax.dynamic_update_slice(
        x, x[:, :1], (0, jnp.argmax(x[:, 0]))
    ) @ w,
    "looked up in points": lambda w, x: x[jnp.asarray([1] * len(x))] @ w,
    "looked up among points": lambda w, x: jnp.take_along_axis(x, jnp.argsort(x, axis=0), axis=0),
    "looked up in a table of rows": lambda w, x: look_up(
        jnp.broadcast_to(w[0], x.shape) * jnp.arange(len(x))[:, None], jnp.argsort(x, axis=1)
    ),
    "windows": lambda w, x: sum_of(x @ w, (2, 1)),
    "points as a kernel": lambda w, x: conv(
        w.reshape(1, 4, 4, 1), x.reshape(1, -1, 1, 4)
    ).reshape(-1)[: len(x), None] + x,
    "points as channels": lambda w, x: conv(
        x.T.reshape(1, 2, 2, -1), jnp.ones((1, 1, len(x), len(x)))
    ).reshape(4, -1).T,
    "mixed by reshaping": lambda w, x: x.T.reshape(len(x), 4) @ w,
    "a scan over points": lambda w, x: lax.scan(lambda c, v: (c + v, c), w[0], x)[1],
    "a scan that turns": lambda w, x: lax.scan(lambda c, v: (c[::-1] + v, c), x[:, 0], x.T)[1].T,
    "a scan from different numbers": lambda w, x: lax.scan(
        lambda c, v: (c + v, c), jnp.arange(1.0 * len(x)), x.T
    )[1].T,
    "as long as a point says": go(lambda s: s[1][0, 0] > 0, lambda x, w: x - 1),
    "the branch of a point": lambda w, x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x @ w),
    "one branch turns": lambda w, x: lax.cond(w[0, 0] > 0, jnp.tanh, lambda x: x[::-1], x @ w),
    "their number": lambda w, x: x @ w / len(x),
}  # fmt: skip


def proven(fn):
    return proves_apart(lambda leaves, rest, x: fn(leaves[0], x), [W], [], X)


@pytest.mark.parametrize("name", APART)
def test_operations_within_points_are_proven_apart(name):
    assert proven(APART[name])


@pytest.mark.parametrize("name", COUPLED)
def test_operations_across_points_are_not(name):
    assert not proven(COUPLED[name])
