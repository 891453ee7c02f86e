"""Settings of `Trajectory` compared side by side: many share one kernel and one factorisation.

Of the scores `S` of a checkpoint only `masks @ S.T` is kept, `(subsets, queries)`: all that a linear
datamodelling score needs, and sums over checkpoints and runs are sums of it.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualfluence.attribution import KAPPA
from dualfluence.attribution import _checkpoint as at
from dualfluence.attribution._terms import AVERAGED
from dualfluence.dual._inverse import invert_lower

HIGHEST = jax.lax.Precision.HIGHEST

EPOCHS = {
    "sketch": lambda e, total: e in (1, 2, 3, 5, 8, 14, 25, total),
    "first quarter": lambda e, total: e <= total / 4,
    "all": lambda e, total: True,
}


class Setting(NamedTuple):
    """Which checkpoints, `κ`, which terms come from averaged predictions, closed form or not."""

    epochs: str
    kappa: float = KAPPA
    averaged: str = "none"
    leverage: bool = False

    def __str__(self):
        form = ", leverage" if self.leverage else ""
        return f"epochs {self.epochs}, kappa {self.kappa:g}, averaged {self.averaged}{form}"

    def chosen(self, recipe):
        return [e for e in recipe["saved"] if EPOCHS[self.epochs](e, recipe["epochs"])]

    def pieces(self, recipe):
        return [Piece(e, self) for e in self.chosen(recipe)]


class Piece(NamedTuple):
    """One checkpoint at one setting."""

    epoch: float
    setting: Setting

    @property
    def averages(self):
        """The set of epochs whose average it uses; settings without one share their pieces."""
        return None if self.setting.averaged == "none" else self.setting.epochs

    @property
    def curvature(self):
        return self.averages if AVERAGED[self.setting.averaged].curvature else None

    @property
    def key(self):
        s = self.setting
        return (self.epoch, s.kappa, s.averaged, self.averages, s.leverage)


REFERENCE = Setting("sketch")
LOW = KAPPA / 2
PLAIN = ("none", "train", "points")
TIERS = (
    [Setting("sketch", k, a) for k in (KAPPA, LOW) for a in AVERAGED],
    [Setting(e, KAPPA, a) for e in ("first quarter", "all") for a in PLAIN],
    [Setting("sketch", KAPPA, a, True) for a in ("none", "train")],
    [Setting("first quarter", KAPPA, "all")],
    [Setting("all", KAPPA, "all"), *(Setting("first quarter", LOW, a) for a in AVERAGED)],
)
"""Candidates, those that have said most for their price first."""


def summed(kept, setting, recipe):
    """`masks @ S.T` of a setting from its pieces, or None where one is missing."""
    parts = [kept.get(piece.key) for piece in setting.pieces(recipe)]
    return None if any(p is None for p in parts) else np.sum(parts, axis=0, dtype=float)


def fill(
    kept: dict,
    settings: list[Setting],
    recipe: dict,
    solve: Callable[[float, list[Piece]], dict],
    in_time: Callable[[], bool],
    riders: list[Setting] | None = None,
) -> bool:
    """Compute what the settings lack, epoch by epoch; False when time ran out.

    Pieces of `riders` that need no factorisation of their own are computed along.
    """
    lacking = _lacking(kept, settings, recipe)
    along = _lacking(kept, riders or [], recipe)
    for epoch, pieces in lacking.items():
        if not in_time():
            return False
        paid = {(p.setting.kappa, p.curvature) for p in pieces.values()}
        free = {
            key: p
            for key, p in along.get(epoch, {}).items()
            if (p.setting.kappa, p.curvature) in paid and not p.setting.leverage
        }
        kept.update(solve(epoch, list((free | pieces).values())))
    return True


def _lacking(kept, settings, recipe):
    """`{epoch: {key: piece}}` of what is not kept yet."""
    found = {}
    for piece in itertools.chain.from_iterable(s.pieces(recipe) for s in settings):
        if piece.key not in kept:
            found.setdefault(piece.epoch, {})[piece.key] = piece
    return found


class Group(NamedTuple):
    """Pieces that share their curvature: one `RᵀKR`, one factor per `κ`."""

    pieces: list[Piece]
    roots: jax.Array
    g: jax.Array
    v: jax.Array
    pairs: dict


def solve_checkpoint(model, x, xq, pieces, terms, ridge, masks):
    """`{key: masks @ S.T}` of the pieces at one checkpoint, with one pass over the kernel.

    `terms(averages, averaged)` gives the `Local` of a piece, `ridge(kappa)` its `λ`.
    """
    groups = [
        _group(list(some), terms)
        for _, some in itertools.groupby(
            sorted(pieces, key=lambda p: str(p.curvature)), key=lambda p: str(p.curvature)
        )
    ]
    folded = [_empty(group) for group in groups]
    for start, block in at._row_blocks(model, x):
        here = jnp.asarray(start)
        folded = [
            _fold(*f, block, group.roots, group.g, here)
            for f, group in zip(folded, groups, strict=True)
        ]
        jax.block_until_ready(folded)
    cross = at._query_block(model, xq, x)
    found = {}
    for group in groups:
        found |= _solve_group(group, *folded.pop(0), cross, ridge, masks)
    return found


def _group(pieces, terms):
    g, v, pairs = {}, {}, {}
    for piece in pieces:
        name, averages = piece.setting.averaged, piece.averages
        local = terms(averages, name)
        own = AVERAGED[name]
        i = (averages if own.queries else None), (averages if own.train else None)
        v.setdefault(i[0], local.v)
        g.setdefault(i[1], local.g)
        pairs[piece.key] = i
    places = {key: (list(v).index(a), list(g).index(b)) for key, (a, b) in pairs.items()}
    return Group(pieces, local.roots, _stack(g), _stack(v), places)


def _stack(named):
    """The arrays, the last one repeated up to a power of two: few shapes, few compilations."""
    arrays = list(named.values())
    size = 1 << (len(arrays) - 1).bit_length()
    return jnp.stack(arrays + arrays[-1:] * (size - len(arrays)))


def _empty(group):
    n, _, r = group.roots.shape
    zeros = partial(jnp.zeros, dtype=group.roots.dtype)
    return zeros((n * r, n * r)), zeros((group.g.shape[0], n * r, n))


@partial(jax.jit, donate_argnums=(0, 1))
def _fold(B, T, block, R, G, start):
    rows, (n, _, r) = block.shape[0], R.shape
    here = jax.lax.dynamic_slice_in_dim(R, start, rows)
    left = jnp.einsum("iar,iajb->irjb", here, block, precision=HIGHEST)
    folded = jnp.einsum("irjb,jbs->irjs", left, R, precision=HIGHEST)
    push = jnp.einsum("irjb,kjb->kirj", left, G, precision=HIGHEST)
    zero = jnp.zeros_like(start)
    B = jax.lax.dynamic_update_slice(B, folded.reshape(rows * r, n * r), (start * r, zero))
    push = push.reshape(G.shape[0], rows * r, n)
    return B, jax.lax.dynamic_update_slice(T, push, (zero, start * r, zero))


_factor = jax.jit(at._factor_body)  # B stays for the next κ


@jax.jit
def _fold_queries(cross, v, R):
    thin = jnp.einsum("kqa,qanb->kqnb", v, cross, precision=HIGHEST)
    Y = jnp.einsum("nbr,kqnb->nrkq", R, thin, precision=HIGHEST)
    return thin, Y.reshape(-1, v.shape[0] * cross.shape[0])


@jax.jit
def _own_blocks(chol, T):
    """`at._own_blocks` for several `T` with one inverse."""
    n = T.shape[2]
    X = invert_lower(chol).reshape(-1, n, chol.shape[0] // n)
    gram = jnp.einsum("mka,mkb->kab", X, X, precision=HIGHEST)

    def gain(T_g):
        half = jax.scipy.linalg.solve_triangular(chol, T_g, lower=True)
        at_point = jnp.einsum("mka,mk->ka", X, half, precision=HIGHEST)
        return jnp.linalg.solve(gram, at_point[:, :, None])[:, :, 0]

    return jax.lax.map(gain, T)


@jax.jit
def predicted(scores, masks):
    """`masks @ S.T` of scores brought to one size per query."""
    size = jnp.sqrt(jnp.mean(scores**2, axis=1, keepdims=True))
    return jnp.dot(masks, (scores / jnp.where(size > 0, size, 1)).T, precision=HIGHEST)


def _solve_group(group, B, T, cross, ridge, masks):
    thin, Y = _fold_queries(cross, group.v, group.roots)
    found = {}
    for kappa in sorted({p.setting.kappa for p in group.pieces}):
        lam = jnp.asarray(ridge(kappa), B.dtype)
        chol = _factor(B, lam)
        V = at._solve_both(chol, Y).reshape(Y.shape[0], *group.v.shape[:2])
        here = [p for p in group.pieces if p.setting.kappa == kappa]
        with_leverage = sorted({group.pairs[p.key][1] for p in here if p.setting.leverage})
        gains = {}
        if with_leverage:
            gains = dict(
                zip(with_leverage, _own_blocks(chol, T[jnp.array(with_leverage)]), strict=True)
            )
        del chol
        for piece in here:
            i, j = group.pairs[piece.key]
            scores = at._scores(thin[i], V[:, i], T[j], group.g[j], lam)
            if piece.setting.leverage:
                scores += at._leverage(V[:, i], gains[j], lam)
            found[piece.key] = np.asarray(predicted(scores, masks), np.float32)
            if not np.isfinite(found[piece.key]).all():
                raise FloatingPointError(f"{piece}: the factorisation failed")
    return found
