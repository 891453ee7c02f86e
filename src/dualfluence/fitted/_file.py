"""A fitted state as a header and arrays: what its file holds."""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._support.archive import to_plain, write_archive
from ..dual._model import Reference
from ..losses import AbstractLoss, Logistic, SoftmaxCrossEntropy, SquaredError
from ..operators import (
    AbstractKernelOperator,
    UnsupportedStructure,
)
from ..problem._objective import State, TrainingSet
from ..solvers import AbstractPreconditioner

FORMAT, VERSION = "dualfluence-fitted", 3
WITNESSES = {"commitments", "blinds"}
"""Arrays of a desk's checkpoint that only its verification reads."""

CLOSED_FORMS: dict[str, AbstractLoss] = {
    "SquaredError": SquaredError(),
    "SoftmaxCrossEntropy": SoftmaxCrossEntropy(),
    "Logistic": Logistic(),
}
"""Losses that a file can name; the function of any other is given again to `load`."""


def write_record(
    path: Path,
    *,
    data: TrainingSet,
    op: AbstractKernelOperator,
    state: State,
    offset: Array,
    kernel_diagonal: Array,
    preconditioner: AbstractPreconditioner,
    reference: Reference | None,
    tangent_params: PyTree,
    loss: AbstractLoss,
    ridge: float,
    records: dict[str, Any],
    include_kernel: bool,
    witnesses: dict[str, np.ndarray],
) -> None:
    """Write the parts of a `Fitted` to one file.

    `records` go to its header. `witnesses` are arrays for whoever checks the file, see `WITNESSES`.
    """
    points = op.layout.points
    arrays = {
        "x": data.x,
        "targets": data.targets,
        "sample_weights": data.sample_weights,
        "alpha": points(state.alpha),
        "k_alpha": points(state.k_alpha),
        "offset": points(offset),
        "kernel_diagonal": points(kernel_diagonal),
    }
    if data.purged is not None:
        arrays["purged"] = data.purged
    if preconditioner.sketch is not None:
        arrays["preconditioner"] = points(preconditioner.sketch)
    if reference is not None:
        arrays |= _reference_arrays(reference, tangent_params)
    if include_kernel:
        arrays["kernel"] = _entries(op)
    arrays |= witnesses
    header = {
        "format": FORMAT,
        "version": VERSION,
        "loss": to_plain(LossName(name_of(loss), not is_closed_form(loss))),
        "ridge": float(ridge),
        "drift": float(state.drift),
        "operator": to_plain(describe_operator(op)),
        "reference": None if reference is None else to_plain(describe_reference(reference)),
        **({} if data.form is None else {"form": data.form.to_plain()}),
        **{name: to_plain(record) for name, record in records.items()},
    }
    write_archive(path, header, {name: np.asarray(array) for name, array in arrays.items()})


def name_of(loss: AbstractLoss) -> str:
    """What files call the loss."""
    return str(getattr(loss, "name", type(loss).__name__))


def is_closed_form(loss: AbstractLoss) -> bool:
    return any(type(loss) is type(known) for known in CLOSED_FORMS.values())


def is_stored(leaf: Any) -> bool:
    """Whether a leaf of the parameters goes to the file: numbers do, functions and keys do not."""
    if not eqx.is_array_like(leaf):
        return False
    return not jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.extended)


class OperatorForm(NamedTuple):
    """How `K` is multiplied with, as far as loading has to repeat it."""

    kronecker: bool
    form: str  # "matrix-free", or "auto" for one with entries
    refined: bool  # residuals and dual variables in float64 over a narrower K
    precision: str | None  # of products with a K in memory
    on_disk: bool
    dtype: str  # of the entries


class LossName(NamedTuple):
    """Which loss, and whether its function is one that the file cannot hold."""

    name: str
    own: bool


def describe_operator(op: AbstractKernelOperator) -> OperatorForm:
    precision = op.product_precision
    return OperatorForm(
        kronecker=op.is_kronecker,
        form="matrix-free" if op.follows_points else "auto",
        refined=op.narrow is not op,
        precision=None if precision is None else precision.name,
        on_disk=not op.in_memory,
        dtype=jnp.dtype(op.narrow.dtype).name,
    )


class ReferenceForm(NamedTuple):
    """What a `Reference` says beside its arrays."""

    linearised: bool
    tangent: str
    gap: float
    certified: bool


def describe_reference(reference: Reference) -> ReferenceForm:
    return ReferenceForm(
        bool(reference.linearised),
        reference.tangent,
        float(reference.gap),
        bool(reference.certified),
    )


def _reference_arrays(reference: Reference, tangent_params: PyTree) -> dict[str, Any]:
    leaves = jax.tree.leaves(reference.params)
    arrays = {f"reference_{i}": leaf for i, leaf in enumerate(leaves) if is_stored(leaf)}
    points = jax.tree.leaves(tangent_params)
    # `J` is taken where the network was trained, and a purge moves the reference from there.
    if reference.tangent == "trained" and any(
        a is not b for a, b in zip(leaves, points, strict=True)
    ):
        arrays |= {f"tangent_{i}": leaf for i, leaf in enumerate(points) if is_stored(leaf)}
    return {"reference_alpha": reference.alpha, **arrays}


def _entries(op: AbstractKernelOperator) -> Array:
    inner = op.narrow
    if not inner.has_entries:
        raise UnsupportedStructure(
            f"save: a {type(inner).__name__} has no entries in one place to store. Save without "
            "include_kernel; load computes K again, or takes it as kernel."
        )
    return inner.entries()
