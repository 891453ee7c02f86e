"""Losses and their curvature, against formulas in NumPy."""

import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
import oracles
from dualfluence import losses

from .table import each, row


def kinds(at):
    """Every loss with ordinary targets and its truth, `(values, gradients, Hessians)`."""
    yield dfl.SquaredError(), np.asarray(at.y, float), oracles.squared
    yield dfl.Logistic(), (np.asarray(at.y) > 0).astype(float), oracles.logistic
    yield dfl.SoftmaxCrossEntropy(), np.eye(at.c)[at.labels], oracles.softmax_ce
    own = dfl.Convex(lambda f, y: jnp.sum(jnp.logaddexp(0, f) - y * f))
    yield own, (np.asarray(at.y) > 0).astype(float), oracles.logistic


@row(*each("", "SquaredError Logistic SoftmaxCrossEntropy Convex", "value grad hess_mv grad_noise"))
@row(*each("", "SquaredError Logistic SoftmaxCrossEntropy Convex", "prepare_targets hess_factor"))
@row(*each("losses", "AbstractLoss", "value grad hess_mv grad_noise prepare_targets hess_factor"))
@row(*each("losses", "AbstractFactor DiagonalFactor SoftmaxFactor BlockFactor", "mv rmv hess_mv"))
@row(*each("losses", "AbstractFactor DiagonalFactor SoftmaxFactor BlockFactor", "hess_diagonal"))
@row(*each("losses", "AbstractFactor DiagonalFactor SoftmaxFactor BlockFactor", "min_curvature"))
@row(*each("losses", "AbstractFactor DiagonalFactor SoftmaxFactor BlockFactor", "narrow folded"))
def every_loss(at):
    f, v, s = (
        at.array(at.n, at.c, seed=11),
        at.array(at.n, at.c, seed=12),
        np.linspace(0.5, 2, at.n),
    )
    met = set()
    for loss, y, truth in kinds(at):
        assert isinstance(loss, losses.AbstractLoss)
        targets = loss.prepare_targets(y, at.c, at.dtype)
        at.close(targets, y)
        value, grad, hess = truth(np.asarray(f, float), y)
        at.close(loss.value(f, targets), value)
        at.close(loss.grad(f, targets), grad)
        at.typed(loss.grad(f, targets))
        product = np.einsum("nab,nb->na", hess, np.asarray(v, float))
        at.close(loss.hess_mv(f, targets, v), product)
        noise = loss.grad_noise(f, targets, jnp.zeros_like(f))
        at.typed(noise)
        off = np.abs(np.asarray(loss.grad(f, targets), float) - grad)
        assert (off <= 8 * np.asarray(noise) + 1e-15).all(), f"{loss}: rounding above its estimate"
        factor = loss.hess_factor(f, targets, jnp.asarray(s, at.dtype))
        assert isinstance(factor, losses.AbstractFactor)
        met.add(type(factor).__name__)
        at.close(factor.hess_mv(v), s[:, None] * product, 2)
        at.close(factor.mv(factor.rmv(v)), s[:, None] * product, 2)
        pair = jnp.stack([v, 2 * v], axis=2)
        at.close(factor.hess_mv(pair)[:, :, 1], 2 * s[:, None] * product, 2)
        diagonal = np.broadcast_to(factor.hess_diagonal(), f.shape)
        at.close(diagonal, s[:, None] * np.einsum("naa->na", hess), 2)
        narrow = factor.narrow()
        at.close(narrow.mv(narrow.rmv(v)), s[:, None] * product, 4)
        K = np.asarray(at.K, float).reshape(at.n * at.c, -1)
        folded = narrow.folded(jnp.asarray(K, at.dtype), at.c)
        columns = jnp.eye(folded.shape[0], dtype=at.dtype).reshape(at.n, -1, folded.shape[0])
        R = np.asarray(narrow.mv(columns), float).reshape(at.n * at.c, -1)
        at.close(folded, R.T @ K @ R, 10)
        assert float(factor.min_curvature) > -1e-5
    np.testing.assert_array_equal(sorted(met), ["BlockFactor", "DiagonalFactor", "SoftmaxFactor"])


@row("losses.BlockFactor", "losses.DiagonalFactor", "losses.SoftmaxFactor")
def factors_by_hand(at):
    v, s = at.array(at.n, at.c, seed=12), at.array(at.n, at.c, seed=13)
    at.close(losses.DiagonalFactor(s).mv(v), np.asarray(s, float) * np.asarray(v, float))
    p = np.exp(np.asarray(s, float))
    p = p / p.sum(1, keepdims=True)
    w = np.linspace(1, 2, at.n)[:, None]
    made = losses.SoftmaxFactor(jnp.asarray(w**0.5, at.dtype), jnp.asarray(p**0.5, at.dtype))
    u = np.asarray(v, float)
    at.close(made.hess_mv(v), w * (p * u - p * (p * u).sum(1, keepdims=True)))
    blocks = at.array(at.n, at.c, at.c, seed=14)
    made = losses.BlockFactor(blocks, jnp.zeros((), at.dtype))
    at.close(made.mv(v), np.einsum("nab,nb->na", np.asarray(blocks, float), u))
    at.close(made.rmv(v), np.einsum("nba,nb->na", np.asarray(blocks, float), u))


@row("losses.AbstractLoss.prepare_targets", once=True)
def targets_as_users_give_them(at):
    labels = dfl.SoftmaxCrossEntropy().prepare_targets([0, 2, 1], 3, at.dtype)
    np.testing.assert_array_equal(labels, np.eye(3)[[0, 2, 1]])
    one = dfl.SquaredError().prepare_targets([0.5, 2.0], 1, at.dtype)
    np.testing.assert_array_equal(one, [[0.5], [2.0]])
    same = losses.AbstractLoss.prepare_targets
    assert callable(same)


@row(*each("", "TokenCrossEntropy", "value grad hess_mv grad_noise prepare_targets hess_factor"))
@row("TokenCrossEntropy")
def tokens_are_softmax_averaged(at):
    T = 3
    f = at.array(at.n, T * at.c, seed=15)
    y = np.random.default_rng(0).integers(0, at.c, (at.n, T))
    y[:, -1] = -100  # padding
    loss = dfl.TokenCrossEntropy()
    targets = loss.prepare_targets(y, T * at.c, at.dtype)
    np.testing.assert_array_equal(targets, y)
    flat = np.asarray(f, float).reshape(at.n * T, at.c)
    value, grad, hess = oracles.softmax_ce(flat, np.eye(at.c)[np.maximum(y, 0).reshape(-1)])
    share = np.array([0.5, 0.5, 0])
    at.close(loss.value(f, targets), value.reshape(at.n, T) @ share)
    grad = (grad.reshape(at.n, T, at.c) * share[None, :, None]).reshape(at.n, -1)
    at.close(loss.grad(f, targets), grad)
    at.typed(loss.grad(f, targets))
    off = np.abs(np.asarray(loss.grad(f, targets), float) - grad)
    assert (off <= 8 * np.asarray(loss.grad_noise(f, targets, jnp.zeros_like(f))) + 1e-15).all()
    v, s = at.array(at.n, T * at.c, seed=16), np.linspace(0.5, 2, at.n)
    each = np.einsum("nab,nb->na", hess, np.asarray(v, float).reshape(flat.shape))
    product = (each.reshape(at.n, T, at.c) * share[None, :, None]).reshape(at.n, -1)
    at.close(loss.hess_mv(f, targets, v), product, 2)
    factor = loss.hess_factor(f, targets, jnp.asarray(s, at.dtype))
    at.close(factor.mv(factor.rmv(v)), s[:, None] * product, 2)
    narrow = factor.narrow()
    at.close(narrow.mv(narrow.rmv(v)), s[:, None] * product, 4)
    diagonal = np.einsum("naa->na", hess).reshape(at.n, T, at.c) * share[None, :, None]
    at.close(factor.hess_diagonal(), s[:, None] * diagonal.reshape(at.n, -1), 2)
