"""Load a fitted state: everything in its file is checked before it is used."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision
from jaxtyping import PyTree

from .._support.archive import Damaged, checking, from_plain, read_archive
from .._support.checks import check_finite, check_ridge
from .._support.compile import double, narrowed
from .._support.options import ProgressFn, check_loss, check_path, check_progress, maybe
from .._support.points import Form
from .._support.types import AnyPath, Inputs
from ..dual._fidelity import Fidelity
from ..dual._model import Reference, Widening
from ..kernels._affine import is_affine
from ..kernels._linearized import Linearized, as_network
from ..kernels._params import Shifted
from ..losses import AbstractLoss
from ..models._sources import AbstractSource, as_source
from ..operators import (
    AbstractKernelOperator,
    DenseOperator,
    KroneckerOperator,
    widen,
)
from ..problem._certificate import Certificate, Stats
from ..problem._objective import State, TrainingSet
from ..solvers import NoPreconditioner, SpectralPreconditioner
from ._file import (
    CLOSED_FORMS,
    FORMAT,
    VERSION,
    WITNESSES,
    LossName,
    OperatorForm,
    ReferenceForm,
    is_stored,
    name_of,
)
from ._fitted import Fitted
from ._options import FORMS, check_operator
from ._recheck import computed_again
from ._setup import KERNEL_SLACK, check_given, choose_form, rounding_unit, start_norm

PROBES = 8
"""Training points at which the model is compared with the file."""

DIAGONAL_SLACK, OUTPUT_SLACK = 1e3, 1e4
"""How many units in the last place another device may be off; larger, and other models pass."""

REQUIRED = {"x", "targets", "sample_weights", "alpha", "k_alpha", "offset", "kernel_diagonal"}
OPTIONAL = {"purged", "preconditioner", "reference_alpha", "kernel", *WITNESSES}
LEAF = re.compile(r"(reference|tangent)_\d+")
"""Leaves of the parameters, by their place in the tree."""


class Content(NamedTuple):
    """What a file says, checked as far as it can be without the model."""

    arrays: dict[str, np.ndarray]
    drift: float
    reference: ReferenceForm | None
    loss: LossName
    operator: OperatorForm
    certificate: Certificate
    stats: Stats
    fidelity: Fidelity | None
    form: Form | None
    may_widen: bool

    @property
    def shape(self) -> tuple[int, int]:
        """`(n, c)`."""
        n, c = self.arrays["alpha"].shape
        return n, c


def load(
    path: AnyPath,
    model: object,
    *,
    loss: AbstractLoss | None = None,
    kernel: AbstractKernelOperator | None = None,
    progress: bool | ProgressFn = True,
) -> Fitted:
    """Restore a model from a file of `Fitted.save`.

    A file that is damaged, contradictory or of another kind raises a `FileError`. Every array and the
    header have a SHA-256, sizes are compared before anything is read, and every field is checked. A
    checksum finds accidents, but an attacker who can write the file can also write its checksums.
    Therefore the certificate is not taken from the file: outputs, `Kα` and residual are computed again,
    with two products. A `K` in the file is compared with the model's at a few points, and the certificate
    is about the `K` of the file.

    **Arguments:**

    - `path`: the file.
    - `model`: the model of the fit, built again. Its kernel and outputs at a few training points are
      compared with the stored ones. Leaves of its parameters that are not numbers (functions, random
      keys) are taken from this model.
    - `loss`: needed only for a loss of your own, whose function is not stored.
    - `kernel`: `K` on the stored points, e.g. `store.build(...).operator()`, instead of computing
      it again. Form, precision and refinement come from the file.
    - `progress`: as in `fit`.
    """
    path = check_path("load", path)
    check_progress("load", progress)
    if loss is not None:
        check_loss("load", loss, AbstractLoss)
    maybe(check_operator, "load: kernel", kernel)
    header, arrays = read_archive(path, FORMAT, VERSION)
    with checking(path):
        content = _checked(header, arrays)
    # A model that was widened, or one that was made where 64-bit types are on.
    with double(content.arrays["alpha"].dtype == np.float64):
        return _restored(path, model, content, loss, kernel, progress)


def _restored(
    path: Path,
    model: object,
    content: Content,
    loss: AbstractLoss | None,
    kernel: AbstractKernelOperator | None,
    progress: bool | ProgressFn,
) -> Fitted:
    """The model of a file whose fields have been checked."""
    arrays = content.arrays
    own_loss = _loss(content, loss)
    with checking(path):
        _check_targets(own_loss, content)
    source = _source(model, content)
    x, narrow = jnp.asarray(arrays["x"]), source
    if arrays["offset"].dtype == np.float64 and source.can_widen:
        source = source.widened(x)
    reference = _reference(source, content)
    if reference is not None:
        assert source.network is not None  # or there would be no reference
        proven = reference.linearised or is_affine(source.network, x)
        reference = replace(reference, proven=proven)
    initial, source = source.network, _at_tangent(source, content, reference)
    # A refined model has its K in float32, from the network as its user gave it.
    kept = (
        content.operator.refined
        and narrow.can_widen
        and jnp.dtype(content.operator.dtype) == jnp.float32
    )
    at_tangent = _at_tangent(narrow, content, narrowed(reference)) if kept else source
    fitted = Fitted(
        source=source,
        data=_training_set(content),
        state=_state(content),
        reference=reference,
        loss=own_loss,
        ridge=content.certificate.ridge,
        kernel_op=_operator(at_tangent, content, kernel, progress),
        offset=jnp.asarray(arrays["offset"]),
        kernel_diagonal=jnp.asarray(arrays["kernel_diagonal"]),
        preconditioner=SpectralPreconditioner(jnp.asarray(arrays["preconditioner"]))
        if "preconditioner" in arrays
        else NoPreconditioner(),
        certificate=content.certificate,
        stats=content.stats,
        fidelity=content.fidelity,
        start_norm=start_norm(source),
        widening=_widening(content, kernel),
    )
    fitted = replace(fitted, epsilon=rounding_unit(source, fitted.kernel_op))
    slack = _slack(content, OUTPUT_SLACK)
    _check_outputs(fitted, slack)
    return computed_again(fitted, initial, slack)


def _widening(content: Content, kernel: AbstractKernelOperator | None) -> Widening:
    """What the caller of the fit said (`refine=False`), else what there is to compute in float64 with."""
    if not content.may_widen:
        return "never"
    return "as stored" if kernel is not None or "kernel" in content.arrays else "computed anew"


def _source(model: object, content: Content) -> AbstractSource:
    """The source as it was when the model was fitted; if features were a tree of arrays, it takes packed
    rows."""
    if content.form is None:
        return as_source(model, content.arrays["x"])
    network = as_network(model)
    if not isinstance(network, Linearized):
        raise ValueError(
            "load: the file's features are a tree of arrays, which only a model from linearize takes."
        )
    return as_source(network.reading(content.form), content.arrays["x"])


def _checked(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Content:
    """Every field, or an exception that names the wrong field."""
    fidelity, ridge, drift = header["fidelity"], header["ridge"], header["drift"]
    trained = header["reference"]
    content = Content(
        arrays,
        drift,
        None if trained is None else from_plain(ReferenceForm, trained, "reference"),
        from_plain(LossName, header["loss"], "loss"),
        from_plain(OperatorForm, header["operator"], "operator"),
        from_plain(Certificate, header["certificate"], "certificate"),
        from_plain(Stats, header["stats"], "stats"),
        None if fidelity is None else from_plain(Fidelity, fidelity, "fidelity"),
        _form(header, arrays),
        header.get("may_widen", True),
    )
    if type(content.may_widen) is not bool:
        raise Damaged(f"may_widen is {content.may_widen!r}")
    if type(ridge) is not float or check_ridge(ridge) != content.certificate.ridge:
        raise Damaged(
            f"ridge is {ridge!r}, but its certificate states {content.certificate.ridge!r}"
        )
    if type(drift) is not float or not 0 <= drift < np.inf:
        raise Damaged(f"its drift is {drift!r}")
    numbers = [v for v in header["certificate"].values() if type(v) is float]
    if any(np.isnan(v) or v < 0 for v in numbers):
        raise Damaged(f"its certificate is {content.certificate}")
    if not content.loss.own and content.loss.name not in CLOSED_FORMS:
        raise Damaged(f"it names an unknown loss, {content.loss.name!r}")
    how = content.operator
    if how.form not in FORMS or how.precision not in (None, *Precision.__members__):
        raise Damaged(f"its kernel is {how}")
    _check_arrays(content)
    return content


def _form(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Form | None:
    """How rows of features unpack, if the features were a tree of arrays."""
    if "form" not in header:
        return None
    try:
        form = Form.from_plain(header["form"])
    except (TypeError, ValueError, KeyError) as error:
        raise Damaged(f"the form of its features is {header['form']!r}") from error
    if not form.holds(arrays["x"]):
        raise Damaged(f"x has shape {arrays['x'].shape}, not {form.size} bytes for each point")
    return form


def _check_arrays(content: Content) -> None:
    arrays = content.arrays
    leaves = {name for name in arrays if LEAF.fullmatch(name)}
    names, trained = set(arrays) - leaves, "reference_alpha" in arrays
    if not REQUIRED <= names <= REQUIRED | OPTIONAL or (leaves and not trained):
        raise Damaged(f"it holds {sorted(arrays)}")
    if arrays["alpha"].ndim != 2 or not arrays["alpha"].size:
        raise Damaged(f"alpha has shape {arrays['alpha'].shape}")
    n, c = content.shape
    shapes: dict[str, tuple[int, ...]] = {
        "k_alpha": (n, c),
        "offset": (n, c),
        "kernel_diagonal": (n, c),
        "sample_weights": (n,),
        "kernel": _kernel_shape(content),
        **dict.fromkeys(WITNESSES, (n, 32)),
    }
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise Damaged(f"{name} has shape {arrays[name].shape}, not {shape}")
    starts = {"x": (n,), "targets": (n,), "preconditioner": (n, c)}
    for name, start in starts.items():
        if name in arrays and arrays[name].shape[: len(start)] != start:
            raise Damaged(f"{name} has shape {arrays[name].shape} for {n} points")
    if "preconditioner" in arrays and arrays["preconditioner"].ndim != 3:
        raise Damaged(f"preconditioner has shape {arrays['preconditioner'].shape}")
    _check_values(content)


def _kernel_shape(content: Content) -> tuple[int, int]:
    n, c = content.shape
    return (n, n) if content.operator.kronecker else (n * c, n * c)


def _check_values(content: Content) -> None:
    arrays, (n, c) = content.arrays, content.shape
    dtype = arrays["alpha"].dtype
    for name in ("alpha", "k_alpha", "offset"):
        if dtype.kind != "f" or arrays[name].dtype != dtype:
            raise Damaged(f"{name} has dtype {arrays[name].dtype}, alpha has {dtype}")
    for name in set(arrays) & (REQUIRED | OPTIONAL):
        check_finite(name, arrays[name])
    for name in set(arrays) - REQUIRED - OPTIONAL:  # parameters: masks may be infinite
        if jnp.issubdtype(arrays[name].dtype, jnp.inexact) and np.isnan(arrays[name]).any():
            raise Damaged(f"{name} is not a number")
    if jnp.dtype(content.operator.dtype).kind != "f":
        raise Damaged(f"its kernel has dtype {content.operator.dtype}")
    weights = arrays["sample_weights"]
    with np.errstate(over="ignore"):
        total = weights.sum()
    if weights.dtype != np.float64 or (weights < 0).any() or not 0 < total < np.inf:
        raise Damaged("sample weights must be non-negative with a positive sum")
    if "kernel" in arrays:
        diagonal = np.diagonal(arrays["kernel"]).reshape(n, -1)
        if not np.array_equal(np.broadcast_to(diagonal, (n, c)), arrays["kernel_diagonal"]):
            raise Damaged("the diagonal of its kernel is not the one it lists")
    if "reference_alpha" in arrays:
        rows = arrays["reference_alpha"].shape
        if len(rows) != 2 or rows[0] > n or rows[1] != c:
            raise Damaged(f"reference_alpha has shape {rows}")
    ref = content.reference
    if (ref is None) is ("reference_alpha" in arrays):
        raise Damaged("of its reference and the array reference_alpha, one is missing")
    if ref is not None and (ref.tangent not in ("initial", "trained") or not ref.gap >= 0):
        raise Damaged(f"its reference is {ref}")
    if "purged" in arrays:
        purged = arrays["purged"]
        inside = purged.ndim == 1 and purged.dtype.kind == "i" and np.isin(purged, range(n)).all()
        if not inside or weights[purged].any():
            raise Damaged("its purged points are not points of weight zero")


def _check_targets(loss: AbstractLoss, content: Content) -> None:
    """Targets were prepared before they were saved: preparing them again changes nothing."""
    stored = content.arrays["targets"]
    again = loss.prepare_targets(stored, content.shape[1], content.arrays["alpha"].dtype)
    if again.shape != stored.shape or not np.array_equal(again, stored):
        raise Damaged("its targets are not valid for this loss")


def _state(content: Content) -> State:
    alpha, k_alpha = (jnp.asarray(content.arrays[name]) for name in ("alpha", "k_alpha"))
    return State(alpha, k_alpha, np.asarray(content.drift, alpha.dtype))


def _training_set(content: Content) -> TrainingSet:
    arrays = content.arrays
    x, targets = jnp.asarray(arrays["x"]), jnp.asarray(arrays["targets"])
    return TrainingSet(x, targets, arrays["sample_weights"], arrays.get("purged"), content.form)


def _loss(content: Content, given: AbstractLoss | None) -> AbstractLoss:
    name, own = content.loss
    if own and given is None:
        raise ValueError(
            f"load: the file was fitted with a loss of your own named {name!r}; pass it as "
            f"loss=Convex(fn, name={name!r}), or the original object if it has its own class."
        )
    if given is not None and name_of(given) != name:
        raise ValueError(
            f"load: the file was fitted with the loss {name!r}, but loss= is named "
            f"{name_of(given)!r}."
        )
    return CLOSED_FORMS[name] if given is None else given


def _reference(source: AbstractSource, content: Content) -> Reference | None:
    if content.reference is None:
        return None
    if source.network is None:
        raise ValueError("load: the file holds a trained network; model must come from linearize.")
    params = _parameters(source.network.params, content, "reference")
    alpha = jnp.asarray(content.arrays["reference_alpha"])
    return Reference(params, alpha, *content.reference)


def _at_tangent(
    source: AbstractSource, content: Content, reference: Reference | None
) -> AbstractSource:
    """The source with `J` at the same parameters as before: those of the model, or the trained
    parameters."""
    if reference is None or reference.tangent != "trained":
        return source
    params = reference.params
    if any(name.startswith("tangent_") for name in content.arrays):
        assert source.network is not None  # or there would be no reference
        params = _parameters(source.network.params, content, "tangent")
    return source.at_params(params)


def _parameters(own: PyTree, content: Content, kind: str) -> PyTree:
    """Stored leaves in the tree of the model's parameters; leaves that are not numbers come from the
    model."""
    leaves, treedef = jax.tree.flatten(own)
    wanted = {f"{kind}_{i}": leaf for i, leaf in enumerate(leaves) if is_stored(leaf)}
    found = {n: a for n, a in content.arrays.items() if n.startswith(kind) and LEAF.fullmatch(n)}
    if set(found) != set(wanted) or any(found[n].shape != np.shape(v) for n, v in wanted.items()):
        raise ValueError(
            "load: the stored parameters do not have the tree structure and shapes of the model's."
        )
    stored = {name: jnp.asarray(array) for name, array in found.items()}
    both = [stored.get(f"{kind}_{i}", leaf) for i, leaf in enumerate(leaves)]
    params = jax.tree.unflatten(treedef, both)
    if isinstance(own, Shifted):
        _check_scale(own, params)
    return params


def _check_scale(own: Shifted, stored: Shifted) -> None:
    pairs = zip(jax.tree.leaves(own.roots), jax.tree.leaves(stored.roots), strict=True)
    if not all(np.array_equal(a, b) for a, b in pairs):
        raise ValueError(
            "load: this model is not the one that was saved: it has another scale. Give "
            "linearize the same scale."
        )


def _operator(
    source: AbstractSource,
    content: Content,
    given: AbstractKernelOperator | None,
    progress: bool | ProgressFn,
) -> AbstractKernelOperator:
    arrays, how, (n, c) = content.arrays, content.operator, content.shape
    x = jnp.asarray(arrays["x"])
    _check_entries(source, x, content)
    if given is not None:
        check_given("load", source, x, c, given)
        op = given
    elif "kernel" in arrays:
        kind = KroneckerOperator if how.kronecker else DenseOperator
        op = kind(jnp.asarray(arrays["kernel"]), c)
    else:
        form, _ = choose_form(source, how.form, n, c, jnp.dtype(how.dtype))
        op = source.operator(x, c, form=form, progress=progress)
    if how.precision is not None and op.product_precision is not None:
        op = op.with_precision(Precision[how.precision])
    return widen(op) if how.refined and op.dtype != arrays["alpha"].dtype else op


def _check_entries(source: AbstractSource, x: Inputs, content: Content) -> None:
    """The kernel's diagonal, and its entries if they are stored, must be the model's at a few points."""
    (n, c), arrays = content.shape, content.arrays
    where = _some(np.arange(n))
    try:
        few = source.operator(x[where], c, form="auto", progress=False)
        own = np.asarray(few.dense(), np.float64).reshape(len(where), c, len(where), c)
    except Exception as error:
        raise ValueError(
            f"load: this model is not the one that was saved: it cannot take the stored points, of "
            f"shape {tuple(x.shape)} and dtype {x.dtype} ({type(error).__name__}). Build it as before."
        ) from error
    apart = _diagonal_of(own) - arrays["kernel_diagonal"][where]
    if "kernel" in arrays:
        K = arrays["kernel"]
        if content.operator.kronecker:
            K = np.kron(K[np.ix_(where, where)], np.eye(c)).reshape(own.shape)
        else:
            K = K.reshape(n, c, n, c)[where][:, :, where]
        apart = own - K
    slack = _slack(content, DIAGONAL_SLACK) * float(np.abs(arrays["kernel_diagonal"]).max())
    worst = float(np.abs(apart).max())
    if not worst <= slack:
        raise ValueError(
            f"load: this model is not the one that was saved: its kernel at {len(where)} points "
            f"differs by {worst:.3g}. Build it from the same parameters."
        )


def _some(points: np.ndarray) -> np.ndarray:
    """A few points at random, so that a forger of a file does not know which."""
    return np.sort(np.random.default_rng().permutation(points)[:PROBES])


def _diagonal_of(K: np.ndarray) -> np.ndarray:
    """`(m, c)` of entries `(m, c, m, c)`."""
    m, c = K.shape[:2]
    return np.diagonal(K.reshape(m * c, m * c)).reshape(m, c)


def _check_outputs(fitted: Fitted, slack: float) -> None:
    """`offset + Kα` as stored must be what the model predicts at a few training points."""
    ref = fitted.reference
    if ref is not None and not ref.linearised and fitted.data.purged is not None:
        return  # a purge moved the reference: the network there is not its linearisation
    present = np.flatnonzero(fitted.data.sample_weights)
    where = _some(present)
    want, got = fitted.outputs[where], fitted.predict(fitted.data.x[where])
    diagonal = jnp.maximum(fitted.kernel_diagonal, 0)
    reach = jnp.sqrt(jnp.max(diagonal) * jnp.sum(diagonal * fitted.alpha**2))
    size = float(jnp.max(jnp.abs(want)) + reach)
    worst = float(jnp.max(jnp.abs(got - want)))
    if not worst <= slack * size:
        raise ValueError(
            f"load: this model is not the one that was saved: its outputs at {where.size} training "
            f"points differ from the stored ones by {worst:.3g}. Build it from the same parameters."
        )


def _slack(content: Content, units: float) -> float:
    """Relative difference that rounding explains: more for a `K` in half precision or TF32."""
    how = content.operator
    if how.on_disk or how.precision not in (None, "HIGHEST"):
        return KERNEL_SLACK
    return units * float(jnp.finfo(how.dtype).eps)
