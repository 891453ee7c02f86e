r"""Gradients of sequences along probes, block by block of sequences.

A network of sequences has outputs `(n, T, V)`. One probe of sequence `i` is one backward pass with the
cotangent `R_{it}ε_t/√m` at every token `t` at once: tokens are independent, so that cross terms vanish in
the mean over draws. Outputs, gradients and probes of a block of sequences are made, used and dropped;
nothing is kept that grows with `n·T·V`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import HIGHEST, PRECISION, filter_jit
from .._support.memory import tile_budget, total_memory
from .._support.padding import padding_of
from .._support.points import common_dtype, is_tree
from .._support.sequences import AT_ONCE, panel_of, sequence_bytes, sequences_at_once
from .._support.types import ApplyFn, Inputs
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..losses._tokens import IGNORED
from ..problem._quantity import Quantity


class Flat(eqx.Module):
    """A network of sequences with the outputs of a sequence in one row: `(n, T, V)` as `(n, T·V)`."""

    apply_fn: ApplyFn = eqx.field(static=True)

    def __call__(self, params: PyTree, x: Inputs) -> Float[Array, "n c"]:
        f = self.apply_fn(params, x)
        if getattr(f, "ndim", 0) != 3:
            raise ValueError(
                "TokenCrossEntropy needs outputs of shape (n, T, V), a number for every token and every word "
                f"of the vocabulary, got {getattr(f, 'shape', type(f).__name__)}."
            )
        return f.reshape(f.shape[0], -1).astype(common_dtype(f.dtype, jnp.float32))


def outputs_shape(apply_fn: ApplyFn, params: PyTree, x: Inputs) -> tuple[int, ...] | None:
    """The shape of the network's outputs for one sequence, or `None` if it cannot be found."""
    try:
        first = jax.tree.map(lambda a: jnp.asarray(a)[:1], x) if is_tree(x) else jnp.asarray(x)[:1]
        return tuple(eqx.filter_eval_shape(apply_fn, params, first).shape[1:])
    except Exception:  # user code may raise anything; what follows says it by name
        return None


def check_tokens(name: str, targets: Any, length: int) -> None:
    """Raise unless targets have as many tokens as the outputs."""
    shape = jnp.shape(targets)
    if len(shape) == 2 and shape[1] != length:
        raise ValueError(
            f"{name}: targets have {shape[1]} tokens per sequence, the network's outputs {length}. Both need "
            "the same length: pad targets with -100, which counts for nothing, or give "
            f"adapters.tokenised length={length}. A causal network predicts tokens[:, 1:] from "
            "tokens[:, :-1]."
        )


def check_padding(name: str, x: Any, targets: Any) -> None:
    """Raise if targets count where the attention mask of the inputs is zero, or if there should be a
    mask and is none."""
    if not isinstance(x, Mapping) or "decoder_input_ids" in x:
        return
    if "attention_mask" not in x:
        if name != "yq":  # a few queries say too little about what is padding
            _check_no_padding(name, x.get("input_ids"), np.asarray(targets))
        return
    mask, y = np.asarray(x["attention_mask"]), np.asarray(targets)
    if mask.shape != y.shape or not ((y != IGNORED) & (mask == 0)).any():
        return
    i, t = np.argwhere((y != IGNORED) & (mask == 0))[0]
    raise ValueError(
        f"{name}: the target of token {t} of sequence {i} is {y[i, t]}, but attention_mask is 0 there: "
        f"padding would count as text. Put {IGNORED} at padding; adapters.tokenised does so."
    )


def _check_no_padding(name: str, ids: Any, y: np.ndarray) -> None:
    """Raise if tokens that count, or tokens of a text with one label, look like padding."""
    ids = np.asarray(() if ids is None else ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        return
    rows = list(ids)
    if y.shape == ids.shape:  # padding behind the last target changes nothing in a causal network
        rows = [row[: int(np.flatnonzero(own != IGNORED)[-1]) + 1]
                for row, own in zip(ids, y, strict=True) if (own != IGNORED).any()]  # fmt: skip
    if rows and (found := padding_of(rows)):
        raise ValueError(
            f"{name}: the inputs have no attention_mask, but {found}. Without a mask it would count as text. "
            "Keep the tokenizer's attention_mask among the inputs. If these tokens are text, give an "
            "attention_mask that is 1 everywhere."
        )


class Sequences(eqx.Module):
    """Training sequences at one checkpoint, for gradients of any block of them."""

    model: Linearized
    x: Array
    targets: Array
    keys: Array
    loss: AbstractLoss = eqx.field(static=True)
    m: int = eqx.field(static=True)

    @classmethod
    def of(
        cls, model: Linearized, x: Array, targets: Array, loss: AbstractLoss, m: int, key: Array
    ) -> "Sequences":
        # One key per sequence, and below one per token: neither blocks nor padding change a draw.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(x.shape[0]))
        return cls(model, x, targets, keys, loss, m)

    @property
    def num(self) -> int:
        return self.x.shape[0]

    def terms(self, f: Array, target: Array, key: Array) -> tuple[Array, Array]:
        """Probes `(c, m)` and the gradient of the mean loss, `(c,)`, of one sequence with outputs `f`."""
        share = jnp.full((1,), 1 / self.num, f.dtype)
        factor = self.loss.hess_factor(f[None], target[None], share)
        T, V = target.shape[0], f.shape[0] // target.shape[0]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(T))
        signs = jax.vmap(lambda k: jax.random.rademacher(k, (V, self.m), f.dtype))(keys)
        P = factor.mv(signs.reshape(1, T * V, self.m))[0]
        g = share * self.loss.grad(f[None], target[None])[0]
        return P / jnp.sqrt(jnp.asarray(self.m, f.dtype)), g

    def gradients(self, row: tuple[Array, Array, Array]) -> PyTree:
        """`JᵀP` and `Jᵀg` of one sequence, `m + 1` on axis 0 of every leaf."""
        x, target, key = row
        theta, outputs = self.model._outputs()
        f, back = jax.vjp(lambda t: outputs(t, x[None])[0], theta)
        P, g = self.terms(f, target, key)
        return jax.vmap(back)(jnp.concatenate([P.T, g[None]]))[0]

    def at_once(self, rows: int) -> int:
        """Sequences of which the backward passes with `rows` cotangents fit into the work space."""
        sizes = rows, self.model.apply_shape(self.x[:1])[1], self.model.num_params
        return sequences_at_once(*sizes, tile_budget(8 * AT_ONCE * sequence_bytes(*sizes)))


class Queries(eqx.Module):
    """Queries at one checkpoint: `Jᵀv` of any block of them."""

    model: Linearized
    x: Array
    quantity: Quantity

    @property
    def num(self) -> int:
        return self.x.shape[0]

    def gradient(self, row: tuple[Array, Array]) -> PyTree:
        x, target = row
        theta, outputs = self.model._outputs()
        f, back = jax.vjp(lambda t: outputs(t, x[None])[0], theta)
        return back(self.quantity.grad(f[None], target[None])[0])[0]


def token_blocks(
    train: Sequences, queries: Queries
) -> tuple[Iterator[tuple[int, Array]], Iterator[tuple[int, Array]]]:
    """The kernel along every probe and `g`, by blocks of rows; and the kernel of the queries along
    `v`."""
    panel, size = panel_size(train), query_panel(train, queries)
    whole = train_rows(train, 0, train.num) if panel >= train.num else None

    def against(left: Array) -> Array:
        """`left`, rows of gradients, times the gradients of every sequence."""
        tiles = []
        for start in range(0, train.num, panel):
            right = whole if whole is not None else train_rows(train, start, panel)
            tiles.append(_product(left, right))
        return jnp.concatenate(tiles, axis=-2)

    def rows() -> Iterator[tuple[int, Array]]:
        for start in range(0, train.num, panel):
            yield start, against(whole if whole is not None else train_rows(train, start, panel))

    def cross() -> Iterator[tuple[int, Array]]:
        for start in range(0, queries.num, size):
            yield start, against(query_rows(queries, start, size))

    return rows(), cross()


def panel_size(train: Sequences) -> int:
    """Sequences whose gradients are held at once: all, or half of what two panels may take."""
    size = jnp.dtype(train.model.dtype).itemsize
    return panel_of(train.num, train.m + 1, train.model.num_params, size, total_memory())


def query_panel(train: Sequences, queries: Queries) -> int:
    """Queries whose gradients take no more than a panel of sequences."""
    return min(queries.num, max(1, panel_size(train) * (train.m + 1)))


def train_rows(train: Sequences, start: int, size: int) -> Float[Array, "b r p"]:
    """`JᵀP` and `Jᵀg` of sequences from `start` on as rows."""
    stop = min(start + size, train.num)
    here = (train.x[start:stop], train.targets[start:stop], train.keys[start:stop])
    return _train_rows(train, here, min(train.at_once(train.m + 1), stop - start))


@filter_jit
def _train_rows(train: Sequences, here: tuple[Array, ...], size: int) -> Array:
    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(
            lambda row: _flat(train.gradients(row), train.m + 1), here, batch_size=size
        )


def query_rows(queries: Queries, start: int, size: int) -> Float[Array, "b p"]:
    """`Jᵀv` of queries from `start` on as rows."""
    here = (queries.x[start : start + size], queries.quantity.targets[start : start + size])
    return _query_rows(queries, here)


@filter_jit
def _query_rows(queries: Queries, here: tuple[Array, ...]) -> Array:
    with jax.default_matmul_precision(PRECISION):
        # One by one: there are few, and their outputs may be large.
        return jax.lax.map(lambda row: _flat(queries.gradient(row), 1)[0], here)


def _flat(tree: PyTree, rows: int) -> Array:
    leaves = [leaf.reshape(rows, -1) for leaf in jax.tree.leaves(tree)]
    dtype = common_dtype(jnp.float32, *leaves)
    return jnp.concatenate([leaf.astype(dtype) for leaf in leaves], axis=1)


@filter_jit
def _product(left: Float[Array, "*b p"], right: Float[Array, "n r p"]) -> Array:
    return jnp.einsum("...p,nrp->...nr", left, right, precision=HIGHEST)


def directions_of(
    train: Sequences, queries: Queries, solved: Float[Array, "s q"], ridge: Array
) -> Float[Array, "q p"]:
    r"""`z_q = (J_qᵀv_q − Σᵢ JᵢᵀPᵢV_{iq})/λ`: the score of a sequence is `z_qᵀJᵢᵀgᵢ`."""
    panel, m = panel_size(train), train.m
    z = query_rows(queries, 0, queries.num)
    V = solved.reshape(train.num, m, -1)
    for start in range(0, train.num, panel):
        rows = train_rows(train, start, panel)
        part = V[start : start + rows.shape[0]]
        z = z - jnp.einsum("nrp,nrq->qp", rows[:, :m], part, precision=HIGHEST)
    return z / ridge


def sequence_products(
    model: Linearized, data: Any
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """`w_i ∇m_q·∇ℓ_i` of all pairs, and the lengths of the gradients of sequences and of queries."""
    train = Sequences.of(model, data.x, data.targets, data.loss, 0, jax.random.key(0))
    queries = Queries(model, data.xq, data.quantity)
    panel, size = panel_size(train), query_panel(train, queries)
    tiles, own, other = [], [], []
    for start in range(0, queries.num, size):
        left, row = query_rows(queries, start, size), []
        other.append(jnp.linalg.norm(left, axis=1))
        for begin in range(0, train.num, panel):
            right = train_rows(train, begin, panel)
            row.append(np.asarray(_product(left, right)[:, :, 0]))
            if start == 0:
                own.append(jnp.linalg.norm(right[:, 0], axis=1))
        tiles.append(np.concatenate(row, axis=1))
    return np.concatenate(tiles), (np.concatenate(own), np.concatenate(other))


@filter_jit
def token_parts(train: Sequences, z: Float[Array, "q p"]) -> Float[Array, "q n t"]:
    """`z_qᵀJᵢᵀgᵢ` token by token: one forward derivative for each pair of query and sequence."""
    theta, outputs = train.model._outputs()
    rebuilt = ravel_pytree(theta)[1]
    size = min(z.shape[0], train.at_once(1))

    def one(row: tuple[Array, Array, Array]) -> Array:
        x, target, _ = row
        f, push = jax.linearize(lambda t: outputs(t, x[None])[0], theta)
        g = train.loss.grad(f[None], target[None])[0] / train.num

        def along(direction: Array) -> Array:
            return jnp.sum((g * push(rebuilt(direction))).reshape(target.shape[0], -1), axis=1)

        return jax.lax.map(along, z, batch_size=size)

    with jax.default_matmul_precision(PRECISION):
        parts = jax.lax.map(one, (train.x, train.targets, train.keys))
    return jnp.swapaxes(parts, 0, 1)
