"""What a request for sequences of tokens needs before it is scored: its loss, its form, its probes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._support.memory import total_memory
from .._support.types import Inputs, Numbers
from ..losses import AbstractLoss, SoftmaxCrossEntropy, TokenCrossEntropy
from ._probes import FULL_SHARE, Probes, RandomProbes, chosen, rank_of
from ._token_sketch import SKETCH_PROBES
from ._tokens import Flat, check_padding, check_tokens, outputs_shape
from ._view import BLOCK_SHARE

TOKEN_PROBES = 8
"""Probes of `auto` for sequences, or as many as fit. The rank of the curvature counts: on a small
transformer 1, 2, 4 and 8 had an LDS of 0.57, 0.64, 0.70 and 0.75."""


def as_sequences(
    runs: Sequence[Any],
    first: Callable[[], PyTree],
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None,
    loss: AbstractLoss | None,
) -> tuple[list[Any], AbstractLoss]:
    """Runs whose networks return rows, and the loss. By default the loss follows from what the network
    returns at its `first` parameters."""
    if loss is not None and not isinstance(loss, TokenCrossEntropy):
        check_padding("x", x, y)
        return list(runs), loss
    shape = outputs_shape(runs[0].apply_fn, first(), x)
    if loss is None and (shape is None or len(shape) != 2):
        check_padding("x", x, y)
        return list(runs), SoftmaxCrossEntropy()
    if shape is not None and len(shape) == 2:
        for name, inputs, targets in (("y", x, y), ("yq", xq, yq)):
            if targets is not None:
                check_tokens(name, targets, shape[0])
                check_padding(name, inputs, targets)
    return [replace(run, apply_fn=Flat(run.apply_fn)) for run in runs], TokenCrossEntropy()


def probes_of(
    probes: Any,
    data: Any,
    loss: AbstractLoss,
    method: str,
    leverage: bool,
    tokens: bool,
    mesh: Mesh | None,
) -> tuple[Probes | None, str]:
    """The probes of a checked request, `None` for the exact form, and a note on the choice."""
    n, c, dtype = data.x.shape[0], data.num_outputs, data.dtype
    if isinstance(loss, TokenCrossEntropy):
        if mesh is not None:
            raise ValueError("Trajectory: mesh is not available for sequences. Use worker=(i, N).")
        return sequence_probes(probes, n, c, dtype, method, leverage, tokens)
    if tokens:
        raise ValueError("Trajectory: tokens=True needs a network with outputs (n, T, V).")
    if method == "projected":
        if probes not in ("auto", None):
            raise ValueError(
                'Trajectory: method="projected" takes random projections instead of probes. Give one '
                "of them."
            )
        return None, ""
    f = jax.ShapeDtypeStruct((n, c), dtype)
    weights = jax.ShapeDtypeStruct((n,), dtype)
    factor = eqx.filter_eval_shape(loss.hess_factor, f, data.targets, weights)
    count = 1 if mesh is None else mesh.size
    return chosen(probes, n, c, rank_of(factor, f), dtype, count)


def sequence_probes(
    probes: Any, n: int, c: int, dtype: DTypeLike, method: str, leverage: bool, tokens: bool
) -> tuple[Probes | None, str]:
    """The random probes of a request; `None` for the exact form, which only small cases can pay."""
    projected = method == "projected"
    if projected and leverage:
        raise ValueError('Trajectory: leverage=True needs method="outputs" for sequences.')
    if isinstance(probes, int) and not isinstance(probes, bool):
        probes = RandomProbes(probes)
    if isinstance(probes, RandomProbes):
        return probes, ""
    if isinstance(probes, str) and probes == "auto":
        m = SKETCH_PROBES if projected else TOKEN_PROBES
        size = max(4, jnp.dtype(dtype).itemsize)
        while not projected and m > 1 and 2 * (n * m) ** 2 * size > FULL_SHARE * total_memory():
            m -= 1
        return RandomProbes(m), "number of random probes chosen automatically"
    small = n * c**2 * max(4, jnp.dtype(dtype).itemsize) <= BLOCK_SHARE * total_memory()
    if probes is None and small and not (projected or tokens):
        return None, ""
    raise ValueError(
        'Trajectory: for sequences probes must be "auto", a number or RandomProbes(m, seed), got '
        f"{probes!r}. probes=None, which is exact, is possible only with "
        f'method="outputs" and tokens=False, and if memory holds (T·V)² = {c}² numbers for each of the '
        f"{n} sequences."
    )


def token_shares(parts: np.ndarray, mean: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Parts of tokens, drawn towards zero as far as the score of their sequence is."""
    kept = values / np.where(mean != 0, mean, 1)
    return kept[:, :, None] * parts.reshape(*values.shape, -1)
