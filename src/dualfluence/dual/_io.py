"""Save and load a fitted state: one `.npz` file, no pickle, versioned, checksummed, atomic."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.files import write_atomically
from .._support.progress import ProgressFn
from ..losses import AbstractLoss, Convex, Logistic, SoftmaxCrossEntropy, SquaredError
from ..models._sources import AbstractSource, NetworkSource, as_source
from ..operators import AbstractKernelOperator, DenseOperator, KroneckerOperator, MatrixFreeOperator
from ..problem._certificate import Certificate
from ..problem._edits import TrainingSet
from ..problem._objective import State
from ..solvers import NoPreconditioner, SpectralPreconditioner
from ._fitted import Fidelity, Fitted
from ._readout import Reference
from ._record import Stats

FORMAT = "dualfluence-fitted"
VERSION = 1
PROBES = 4
CLOSED_FORMS: dict[str, AbstractLoss] = {
    "SquaredError": SquaredError(),
    "SoftmaxCrossEntropy": SoftmaxCrossEntropy(),
    "Logistic": Logistic(),
}


def save(fitted: Fitted, path: Any, *, include_kernel: bool = False) -> None:
    """Write `fitted` to `path` so that `load` restores it beside the same model.

    The model itself (a function) is not stored. `include_kernel` stores `K` as well, so that
    loading computes nothing.
    """
    fitted = fitted.without_spare_rows()
    arrays = _arrays(fitted)
    op = fitted.kernel_op
    if include_kernel:
        if not isinstance(op, (DenseOperator, KroneckerOperator)):
            raise ValueError(f"save: a {type(op).__name__} has no entries to store.")
        arrays["kernel"] = np.asarray(op.matrix)
    loss = fitted.loss
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "loss": loss.name if isinstance(loss, Convex) else type(loss).__name__,
        "ridge": fitted.ridge,
        "operator": type(op).__name__,
        "linearised": fitted.reference.linearised if fitted.reference else None,
        "tangent": fitted.reference.tangent if fitted.reference else None,
        "stats": fitted.stats._asdict(),
        "fidelity": vars(fitted.fidelity) if fitted.fidelity else None,
        "sha256": {name: _digest(array) for name, array in arrays.items()},
    }
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    write_atomically(Path(path), lambda file: np.savez(file, allow_pickle=False, **arrays))


def load(
    path: Any,
    model: Any,
    *,
    loss: AbstractLoss | None = None,
    progress: bool | ProgressFn = True,
) -> Fitted:
    """Restore what `save` wrote.

    **Arguments:**

    - `path`: the file.
    - `model`: the model it was fitted with, built again; outputs (or kernel entries) at a few
      training points are compared with the stored ones.
    - `loss`: needed only for a loss of your own (`Convex`), whose function is not stored.
    """
    meta, arrays = _read(Path(path))
    source = as_source(model, arrays["x"])
    data = TrainingSet(
        jnp.asarray(arrays["x"]), jnp.asarray(arrays["targets"]), arrays["sample_weights"]
    )
    c = arrays["alpha"].shape[1]
    certificate = _certificate(arrays["certificate"], trained="reference_alpha" in arrays)
    reference = _reference(source, arrays, meta, certificate)
    if (
        isinstance(source, NetworkSource)
        and reference is not None
        and reference.tangent == "trained"
    ):
        source = NetworkSource(replace(source.model, params=reference.params))
    _check_model(source, data, arrays, reference)
    op = _operator(source, data, arrays, meta, c, progress)
    state = State(jnp.asarray(arrays["alpha"]), jnp.asarray(arrays["k_alpha"]))
    features = arrays.get("preconditioner")
    return Fitted(
        source=source,
        data=data,
        state=state,
        reference=reference,
        loss=_loss(meta["loss"], loss),
        ridge=float(meta["ridge"]),
        kernel_op=op,
        offset=jnp.asarray(arrays["offset"]),
        kernel_diagonal=jnp.asarray(arrays["kernel_diagonal"]),
        preconditioner=NoPreconditioner()
        if features is None
        else SpectralPreconditioner(jnp.asarray(features)),
        certificate=certificate,
        stats=Stats(**{**meta["stats"], "notes": tuple(meta["stats"]["notes"])}),
        fidelity=Fidelity(**meta["fidelity"]) if meta["fidelity"] else None,
    )


def _arrays(fitted: Fitted) -> dict[str, np.ndarray]:
    cert, points = fitted.certificate, fitted.layout.points
    arrays = {
        "x": fitted.data.x,
        "targets": fitted.data.targets,
        "sample_weights": fitted.data.sample_weights,
        "alpha": fitted.alpha,
        "k_alpha": points(fitted.state.k_alpha),
        "offset": points(fitted.offset),
        "kernel_diagonal": points(fitted.kernel_diagonal),
        "certificate": np.asarray(
            [
                cert.gradient_norm,
                cert.rounding,
                cert.parameter_norm,
                cert.ridge,
                cert.gap,
                cert.certified,
            ]
        ),
    }
    if isinstance(fitted.preconditioner, SpectralPreconditioner):
        arrays["preconditioner"] = points(fitted.preconditioner.features)
    if fitted.reference is not None:
        arrays["reference_alpha"] = fitted.reference.alpha
        for i, leaf in enumerate(jax.tree.leaves(fitted.reference.params)):
            arrays[f"reference_{i}"] = leaf
    return {name: np.asarray(array) for name, array in arrays.items()}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.exists():
        raise FileNotFoundError(f"load: there is no file {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(arrays.pop("meta").tobytes().decode())
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, OSError) as error:
        raise ValueError(
            f"load: {path} is damaged or was not written by dualfluence ({error}). Restore it from a "
            "copy, or fit again."
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"load: {path} does not hold a fitted state of dualfluence.")
    if meta["version"] > VERSION:
        raise ValueError(
            f"load: {path} has format version {meta['version']}, this release reads up to {VERSION}. "
            "Update dualfluence."
        )
    for name, digest in meta["sha256"].items():
        if name not in arrays or _digest(arrays[name]) != digest:
            raise ValueError(f"load: {path} is damaged: array {name!r} fails its checksum.")
    return meta, arrays


def _digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _loss(name: str, given: AbstractLoss | None) -> AbstractLoss:
    if name in CLOSED_FORMS:
        return CLOSED_FORMS[name]
    if not isinstance(given, Convex) or given.name != name:
        raise ValueError(
            f"load: the file was fitted with a loss of your own named {name!r}; pass it as "
            f"loss=Convex(fn, name={name!r})."
        )
    return given


def _certificate(stored: np.ndarray, *, trained: bool) -> Certificate:
    """Files of earlier releases hold no gap: what they say of trained networks is not certified."""
    parts = stored.tolist()
    gap, certified = parts[4:] if len(parts) == 6 else (0.0, not trained)
    return Certificate(*parts[:4], gap=gap, certified=bool(certified))


def _reference(
    source: AbstractSource,
    arrays: dict[str, np.ndarray],
    meta: dict[str, Any],
    certificate: Certificate,
) -> Reference | None:
    if "reference_alpha" not in arrays:
        return None
    if not isinstance(source, NetworkSource):
        raise ValueError("load: the file holds a trained network; model must come from linearize.")
    treedef = jax.tree.structure(source.model.params)
    names = [f"reference_{i}" for i in range(treedef.num_leaves)]
    if any(name not in arrays for name in names):
        raise ValueError(
            "load: the stored parameters do not have the tree structure of the model's."
        )
    params = jax.tree.unflatten(treedef, [jnp.asarray(arrays[name]) for name in names])
    return Reference(
        params,
        jnp.asarray(arrays["reference_alpha"]),
        bool(meta["linearised"]),
        meta.get("tangent", "initial"),
        certificate.gap,
        certificate.certified,
    )


def _check_model(
    source: AbstractSource,
    data: TrainingSet,
    arrays: dict[str, np.ndarray],
    reference: Reference | None,
) -> None:
    """The kernel's diagonal at a few training points must be the stored one."""
    few = data.x[:PROBES]
    want = arrays["kernel_diagonal"][:PROBES]
    got = source.operator(few, want.shape[1], form="auto", progress=False).diagonal()
    slack = 1e3 * float(jnp.finfo(want.dtype).eps) * float(np.abs(want).max())
    worst = float(np.abs(np.asarray(got) - want).max()) if got.shape == want.shape else np.inf
    if not worst <= slack:
        raise ValueError(
            f"load: this model is not the one that was saved: its kernel at the first {len(few)} "
            f"points differs by {worst:.3g}. Build it from the same parameters."
        )


def _operator(
    source: AbstractSource,
    data: TrainingSet,
    arrays: dict[str, np.ndarray],
    meta: dict[str, Any],
    c: int,
    progress: bool | ProgressFn,
) -> AbstractKernelOperator:
    if "kernel" in arrays:
        kind = KroneckerOperator if meta["operator"] == "KroneckerOperator" else DenseOperator
        return kind(jnp.asarray(arrays["kernel"]), c)
    form = "matrix-free" if meta["operator"] == MatrixFreeOperator.__name__ else "auto"
    return source.operator(data.x, c, form=form, progress=progress)
