r"""Scores of the literature that solve no system in parameter space: gradient products and TRAK.

All return an `Attribution`, like the rest of the library: positive if leaving the point out raises the
measured quantity. Methods that solve in parameter space are in `dualfluence.primal`.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.checks import check_finite, check_queries, check_rows
from .._support.compile import PRECISION, jit
from .._support.memory import GRADIENT_BYTES
from .._support.points import Form, enter_points, form_of, shown
from .._support.show import Shown
from .._support.types import ApplyFn, Inputs, Numbers, Trainable
from ..kernels import empirical_kernel
from ..kernels._linearized import Linearized, linearize
from ..kernels._params import opened
from ..losses import AbstractLoss, SoftmaxCrossEntropy, TokenCrossEntropy
from ..models._low_rank import RandomFeatureSource
from ..models._passes import gradient_norms
from ..models._sources import NetworkSource
from ..problem._quantity import Quantity, as_quantity
from ._attribution import Attribution
from ._terms import Folded, local_terms
from ._token_runs import as_sequences
from ._tokens import sequence_products

DAMPINGS = (1e-3, 1e-2, 1e-1)
"""Ridges of TRAK that are tried, over the mean diagonal of its kernel."""

Measure = str | Callable[[Array, Array], Array]


class _Data(NamedTuple):
    """Checked arrays of a request at one network."""

    x: Array
    targets: Array
    xq: Array
    quantity: Quantity
    loss: AbstractLoss
    form: Form | None


@dataclass(frozen=True, eq=False, repr=False)
class _Scores(Shown):
    """Gradients of training points against gradients of queries."""

    apply_fn: ApplyFn

    def attribute(
        self,
        x: Inputs,
        y: Numbers,
        xq: Inputs,
        yq: Numbers | None = None,
        *,
        loss: AbstractLoss | None = None,
        of: Measure = "loss",
    ) -> Attribution:
        """Scores `(q, n)`.

        Inputs, targets and the default of `loss` are as in `Trajectory.attribute`: `x` may be a dict of
        arrays, and a network of sequences returns `(n, T, V)`.
        """
        start = time.perf_counter()
        (scores,), loss = as_sequences([self], lambda: self._params(0), x, y, xq, yq, loss)
        models = scores._models()
        first = next(models)
        data = _check(first, x, y, xq, yq, loss, of)
        every = (model.reading(data.form) for model in itertools.chain([first], models))
        values, note = scores._values(every, data)
        return _result(values, data, yq, (note,), start)

    def _unwrap(self, trainable: Trainable) -> None:
        """A model of `adapters` or `linearize` says itself which parameters count."""
        apply_fn, trainable = opened(type(self).__name__, self.apply_fn, trainable)
        object.__setattr__(self, "apply_fn", apply_fn)
        object.__setattr__(self, "trainable", trainable)

    def _params(self, k: int) -> PyTree:
        """The k-th parameters."""
        raise NotImplementedError

    def _models(self) -> Iterator[Linearized]:
        """The network at each checkpoint, at least one."""
        raise NotImplementedError

    def _values(self, models: Iterator[Linearized], data: _Data) -> tuple[np.ndarray, str]:
        """Scores, and what to call them."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class _Products(_Scores):
    """Gradients of one checkpoint against each other."""

    params: PyTree
    trainable: Trainable = None

    def __post_init__(self) -> None:
        self._unwrap(self.trainable)

    def _params(self, k: int) -> PyTree:
        return self.params

    def _models(self) -> Iterator[Linearized]:
        yield linearize(self.apply_fn, self.params, trainable=self.trainable)


@dataclass(frozen=True, eq=False, repr=False)
class GradDot(_Products):
    r"""$w_i\,\nabla m_q\cdot\nabla\ell_i$ at one checkpoint: influence with the identity in place of the
    Hessian. `m_q` is what is measured at query `q`, such as its loss.

    **Fields:** `apply_fn`, in inference mode, or a model of `adapters`; `params`; `trainable`, as in
    `linearize`.
    """

    def _values(self, models: Iterator[Linearized], data: _Data) -> tuple[np.ndarray, str]:
        return _dot(next(models), data)[0], "gradient dot product"


@dataclass(frozen=True, eq=False, repr=False)
class GradCos(_Products):
    """The cosine between the two gradients: `GradDot` without their lengths.

    A zero gradient has the cosine zero with all others. Fields as for `GradDot`.
    """

    def _values(self, models: Iterator[Linearized], data: _Data) -> tuple[np.ndarray, str]:
        values, sizes = _dot(next(models), data, norms=True)
        for axis, size in enumerate(sizes):
            size = np.expand_dims(size, axis)
            values = np.where(size > 0, values / np.where(size > 0, size, 1), 0)
        return values, "gradient cosine"


@dataclass(frozen=True, eq=False, repr=False)
class TracIn(_Scores):
    r"""$\sum_t \eta_t\,w_i\,\nabla m_q(\theta_t)\cdot\nabla\ell_i(\theta_t)$ (Pruthi et al. 2020).

    **Fields:**

    - `apply_fn`, `trainable`: as for `GradDot`.
    - `checkpoints`: parameter pytrees of one run, or a function that loads the k-th.
    - `learning_rate`: `η_t`, one number or one per checkpoint. If `checkpoints` is a function, the
      number of rates is the number of checkpoints.
    """

    checkpoints: Sequence[PyTree] | Callable[[int], PyTree]
    learning_rate: Numbers = 1.0
    trainable: Trainable = None

    def __post_init__(self) -> None:
        self._unwrap(self.trainable)
        rates = np.asarray(self.learning_rate, float)
        if callable(self.checkpoints):
            if rates.ndim != 1:
                raise ValueError(
                    "TracIn: checkpoints are a function, so learning_rate must have one number per "
                    f"checkpoint, got shape {rates.shape}."
                )
        elif rates.shape not in ((), (len(self.checkpoints),)):
            raise ValueError(
                f"TracIn: learning_rate must be one number or {len(self.checkpoints)}, one per "
                f"checkpoint, got shape {rates.shape}."
            )
        if not self._rates().size:
            raise ValueError("TracIn: give at least one checkpoint.")
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise ValueError(f"TracIn: learning rates must be positive, got {self.learning_rate}.")

    def _rates(self) -> np.ndarray:
        rates = np.asarray(self.learning_rate, float)
        return (
            rates if callable(self.checkpoints) else np.broadcast_to(rates, len(self.checkpoints))
        )

    def _params(self, k: int) -> PyTree:
        return self.checkpoints(k) if callable(self.checkpoints) else self.checkpoints[k]

    def _models(self) -> Iterator[Linearized]:
        for k in range(self._rates().size):
            yield linearize(self.apply_fn, self._params(k), trainable=self.trainable)

    def _values(self, models: Iterator[Linearized], data: _Data) -> tuple[np.ndarray, str]:
        rates = self._rates()
        each = (rate * _dot(m, data)[0] for rate, m in zip(rates, models, strict=True))
        return sum(each, start=np.zeros(())), f"TracIn over {len(rates)} checkpoints"


@dataclass(frozen=True, eq=False, repr=False)
class TRAK(Shown):
    r"""$\bar{[\phi_q\Phi^\top(\Phi\Phi^\top+\rho I)^{-1}]}\,\bar{(1-p_i)}$ (Park et al. 2023).

    `φ` is the gradient of the margin; both bars are means over models, taken before the product. It
    supports only class labels and softmax cross-entropy.

    **Fields:**

    - `apply_fn`: in inference mode, or a model of `adapters`.
    - `models`: parameters of one or more models; in the original method they are trained on random halves.
    - `projection`: random directions that gradients are projected on, as in the original; `None` takes
      the exact kernel instead, the limit of the projected one.
    - `damping`: `ρ` divided by the mean diagonal of `ΦΦᵀ`. The original method has no damping and relies on
      `projection < n`.
    - `seed`: seed of the projections; model `t` uses `seed + t`.
    - `trainable`: as in `linearize`.
    """

    apply_fn: ApplyFn
    models: Sequence[PyTree]
    projection: int | None = None
    damping: float = 1e-2
    seed: int = 0
    trainable: Trainable = None

    def __post_init__(self) -> None:
        if not len(self.models):
            raise ValueError("TRAK: give at least one model.")
        if self.projection is not None and self.projection < 1:
            raise ValueError(f"TRAK: projection must be at least 1, got {self.projection}.")
        if not (np.isfinite(self.damping) and self.damping > 0):
            raise ValueError(f"TRAK: damping must be a positive number, got {self.damping}.")

        apply_fn, trainable = opened("TRAK", self.apply_fn, self.trainable)
        object.__setattr__(self, "apply_fn", apply_fn)
        object.__setattr__(self, "trainable", trainable)

    def attribute(self, x: Inputs, y: Numbers, xq: Inputs, yq: Numbers | None) -> Attribution:
        """Scores `(q, n)` for the loss of each query; `y`, `yq` are class labels."""
        start = time.perf_counter()
        model = linearize(self.apply_fn, self.models[0], trainable=self.trainable)
        data = _check(model, x, y, xq, yq, None, "loss")
        check_labels(y, yq)
        total: Any = 0.0
        missing: Any = 0.0
        for t, params in enumerate(self.models):
            (solved,), short = trak_terms(
                self.apply_fn, params, x, y, xq, yq,
                dampings=(self.damping,), projection=self.projection, seed=self.seed + t,
                trainable=self.trainable,
            )  # fmt: skip
            total, missing = total + solved, missing + short
        values = total * missing / len(self.models) ** 2
        kernel = "exact kernel" if self.projection is None else f"{self.projection} directions"
        note = f"TRAK, {kernel}, {len(self.models)} model(s), damping {self.damping:g}"
        return _result(values, data, yq, (note,), start)


def gradient_dot(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None,
    *,
    loss: AbstractLoss | None = None,
) -> np.ndarray:
    """`GradDot` as an array, `(q, n)`."""
    return GradDot(apply_fn, params).attribute(x, y, xq, yq, loss=loss).values


def trak_terms(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None,
    *,
    dampings: Sequence[float] = DAMPINGS,
    projection: int | None = None,
    seed: int = 0,
    trainable: Trainable = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """One model's `φ_qΦᵀ(ΦΦᵀ + ρI)⁻¹` for each damping, `(q, n)`, and its `1 − p_i`, `(n,)`."""
    form = form_of("x", x)
    features, queries = enter_points("x", x, form), enter_points("xq", xq, form)
    model = linearize(apply_fn, params, trainable=trainable).reading(form)
    u, short = _margin_direction(model.apply_fn(params, features), jnp.asarray(y))
    u_q, _ = _margin_direction(model.apply_fn(params, queries), jnp.asarray(yq))
    if projection is None:
        mask = _mask(model)
        own, both = ((features, u), None), ((queries, u_q), (features, u))
        K, K_q = (
            _folded_kernel(model.apply_fn, params, *pairs, trainable=mask)[:, 0, :, 0]
            for pairs in (own, both)
        )
        solved = [_ridge_solve(K, K_q, jnp.asarray(d, K.dtype)) for d in dampings]
    else:
        phi = _projected(model, features, u, projection, seed)
        phi_q = _projected(model, queries, u_q, projection, seed)
        solved = [_feature_solve(phi, phi_q, jnp.asarray(d, phi.dtype)) for d in dampings]
    for d, scores in zip(dampings, solved, strict=True):
        check_finite(f"TRAK, damping {d:g}", scores, hint="Raise the damping, or use float64.")
    return [np.asarray(s) for s in solved], np.asarray(short)


def check_labels(y: Numbers, yq: Numbers | None) -> None:
    """Raise unless both are class labels."""
    for name, labels in (("y", y), ("yq", yq)):
        array = np.asarray(labels)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"TRAK: {name} must be class labels, integers (n,), got {array.dtype} of shape "
                f"{array.shape}."
            )


def _check(
    model: Linearized,
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None,
    loss: AbstractLoss | None,
    of: Measure,
) -> _Data:
    loss = SoftmaxCrossEntropy() if loss is None else loss
    form = form_of("x", x)
    features = enter_points("x", x, form)
    queries = check_queries(xq, features, form=form)
    model = model.reading(form)
    c = model.apply_shape(features[:1])[1]
    targets = loss.prepare_targets(y, c, model.dtype)
    check_rows("y", targets, features.shape[0], "point of x")
    quantity = as_quantity(of, loss, yq, queries.shape[0], c, model.dtype)
    return _Data(features, targets, queries, quantity, loss, form)


def _dot(
    model: Linearized, data: _Data, norms: bool = False
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """`w_i ∇m_q·∇ℓ_i` for all pairs, and on request the lengths of the gradients of points and of queries.

    Two small products per layer replace gradients. Outputs of sequences are too many for this: their
    gradients are made block by block.
    """
    if isinstance(data.loss, TokenCrossEntropy):
        return sequence_products(model, data)
    local = local_terms(model, data.x, data.targets, data.xq, data.quantity, data.loss)
    own, other = (data.x, local.g), (data.xq, local.v)
    block = _folded_kernel(model.apply_fn, model.params, other, own, trainable=_mask(model))
    pairs = (own, other) if norms else ()
    sizes = tuple(np.asarray(gradient_norms(model, *pair)) for pair in pairs)
    return np.asarray(block[:, 0, :, 0]), sizes


def _mask(model: Linearized) -> PyTree:
    """Which leaves count, as a tree."""
    return jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)


def _result(
    values: np.ndarray, data: _Data, yq: Numbers | None, notes: tuple[str, ...], start: float
) -> Attribution:
    check_finite(
        "attribution",
        values,
        hint="Do parameters hold NaN or inf, or inputs token numbers beyond the vocabulary?",
    )
    return Attribution(
        values=values,
        of=data.quantity.name,
        direction=data.quantity.direction,
        unit=None,
        notes=(*notes, "scores rank and compare training points, and have no unit"),
        stats={"seconds": time.perf_counter() - start, "method": notes[0]},
        x=shown(data.x, data.form),
        y=np.asarray(data.targets),
        xq=shown(data.xq, data.form),
        yq=None if yq is None else np.asarray(yq),
    )


Folding = tuple[Inputs, Array]
"""Points, and for each a direction of outputs."""


def _folded_kernel(
    apply_fn: ApplyFn,
    params: PyTree,
    a: Folding | None,
    b: Folding | None,
    trainable: Trainable = None,
) -> Array:
    """The kernel along one direction of outputs for each point, `(x, u)`."""
    a, b = (pair and (pair[0], pair[1][:, :, None]) for pair in (a, b))
    with jax.default_matmul_precision(PRECISION):
        return empirical_kernel(
            Folded(apply_fn), params, a, b, trainable=trainable, progress=False
        ).value


def _projected(
    model: Linearized, x: Array, u: Float[Array, "n c"], directions: int, seed: int
) -> Float[Array, "n k"]:
    """`u_iᵀJ(x_i)P` with `E[PPᵀ] = I`, in pieces of points."""
    source = RandomFeatureSource(NetworkSource(model), jax.random.key(seed), directions)
    size = max(1, GRADIENT_BYTES // (8 * u.shape[1] * directions))
    parts = []
    for i in range(0, x.shape[0], size):
        rows = slice(i, i + size)
        parts.append(jnp.einsum("ncr,nc->nr", source.features(x[rows]), u[rows]))
    return jnp.concatenate(parts)


@jit
def _margin_direction(
    outputs: Float[Array, "n c"], labels: Array
) -> tuple[Float[Array, "n c"], Float[Array, " n"]]:
    """Gradient of the margin in the outputs, and `1 − p` of the label."""
    own = jax.nn.one_hot(labels, outputs.shape[1], dtype=outputs.dtype)
    others = jax.nn.softmax(jnp.where(own > 0, -jnp.inf, outputs), axis=1)
    return own - others, 1 - jnp.sum(jax.nn.softmax(outputs, axis=1) * own, axis=1)


@jit
def _ridge_solve(K: Array, K_q: Array, damping: Array) -> Array:
    ridge = damping * jnp.mean(jnp.diagonal(K))
    chol = jax.scipy.linalg.cho_factor(K + ridge * jnp.eye(K.shape[0], dtype=K.dtype), lower=True)
    return jax.scipy.linalg.cho_solve(chol, K_q.T).T


@jit
def _feature_solve(phi: Array, phi_q: Array, damping: Array) -> Array:
    """`φ_q(ΦᵀΦ + ρI)⁻¹Φᵀ`: the same as with `ΦΦᵀ`, on the side of the directions."""
    with jax.default_matmul_precision(PRECISION):
        ridge = damping * jnp.mean(jnp.sum(phi**2, axis=1))
        gram = phi.T @ phi + ridge * jnp.eye(phi.shape[1], dtype=phi.dtype)
        chol = jax.scipy.linalg.cho_factor(gram, lower=True)
        return jax.scipy.linalg.cho_solve(chol, phi_q.T).T @ phi.T
