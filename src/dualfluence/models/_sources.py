"""The kinds of models that `fit` accepts: a linearised network, a kernel function, or a kernel matrix."""

import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.checks import as_jax, check_finite, check_range
from .._support.compile import jit, widened
from .._support.options import ProgressFn
from .._support.points import Form, common_dtype, count_points, form_of
from .._support.types import Inputs
from ..kernels._linearized import Linearized, as_network
from ..operators import (
    AbstractKernelOperator,
    DenseOperator,
    KroneckerOperator,
    MatrixFreeOperator,
    UnsupportedStructure,
    grow,
)
from ..operators._base import Layout, every_row
from ._kernel import is_symmetric
from ._passes import (
    base_outputs,
    cross_mv,
    held_moved_params,
    held_pull_back,
    make_jacobian,
    moved,
    moved_params,
    pull_back,
    push,
)


class AbstractSource(eqx.Module):
    """A source of `K`: base outputs, the operator on training points, products with queries.

    To add a source, write a subclass with the three abstract methods. The other methods have a default
    that is right for any source, or that raises an error.
    """

    @property
    def network(self) -> Linearized | None:
        """The linearised network of the kernel, if there is one, in the scale of its ridge."""
        return None

    @property
    def num_positions(self) -> int | None:
        """Points of a precomputed kernel; `None` if features are not positions."""
        return None

    @property
    def form(self) -> Form | None:
        """The form in which rows of features unpack, for a network whose inputs are a tree of arrays."""
        return None if self.network is None else self.network.form

    @property
    def narrow_eps(self) -> float | None:
        """Rounding unit of a network that computes with less precision than its dtype has, else `None`."""
        if self.network is None:
            return None
        eps = self.network.arithmetic_eps
        return eps if eps > float(jnp.finfo(self.network.dtype).eps) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the network for `stats.notes`."""
        return () if self.network is None else self.network.notes

    def block(self, x1: Inputs, x2: Inputs | None, progress: bool | ProgressFn) -> Array:
        """`K(x1, x2)`, of shape `(n1, n2)` or `(n1, c, n2, c)`."""
        self._lacks("block", "It has no kernel entries; fit the network or the kernel itself.")

    def along(self, x1: Inputs, v: Float[Array, "n1 c"], x2: Inputs) -> Float[Array, "n1 n2 c"]:
        """`v_iᵀ K(x1_i, x2)`: the kernel along one direction of outputs for each point of `x1`."""
        return fold_block(self.block(x1, x2, False), v)

    def rows_block(self, x: Array, xq: Array, num_outputs: int, layout: Layout) -> Array:
        """`K(x, xq)` as a matrix, with the rows of `x` on the devices of `layout`."""
        self._lacks("rows_block", "Fit with mesh=....")

    def rows_along(
        self, x: Array, xq: Array, v: Float[Array, "q c"], layout: Layout
    ) -> Float[Array, "n q c"]:
        """`v_qᵀ K(xq, x)`, with the rows of `x` on the devices of `layout`."""
        self._lacks("rows_along", "Fit with mesh=....")

    def layout(self, x: Array) -> Layout:
        """The devices of the rows of a kernel of these points."""
        return every_row(x.shape[0])

    @property
    def num_devices(self) -> int:
        """Devices that share the rows."""
        return 1

    def placing(self, other: "AbstractSource") -> "AbstractSource":
        """`other`, with its rows on the devices of this source."""
        return other

    @property
    def has_features(self) -> bool:
        """Whether `K(x1, x2) = φ(x1) φ(x2)ᵀ` with the `φ` of `features`."""
        return False

    def features(self, x: Array) -> Float[Array, "n c r"]:
        """`φ(x)`."""
        self._lacks("features", "low_rank makes a model with features.")

    def with_jacobian(self, x: Array) -> "AbstractSource":
        """The same source with `J` of its training points in memory."""
        self._lacks(
            "with_jacobian",
            "Its parameters are not θ₀ + Jᵀα, so that J would give others. Fit the network itself, "
            "from linearize.",
        )

    def without_jacobian(self) -> "AbstractSource":
        """The same source without `J` in memory."""
        return self

    def at_params(self, params: PyTree) -> "AbstractSource":
        """The same network with `J` taken at `params`."""
        self._lacks("at_params", "It has no parameters; the model must come from linearize.")

    @property
    def can_widen(self) -> bool:
        """Whether `widened` gives the same model in float64."""
        return False

    def widened(self, x: Array) -> "AbstractSource":
        """The same model of the points `x`, computed in float64; call it in a `double` scope."""
        self._lacks("widened", "Give it numbers in float64 when you make it.")

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> "AbstractSource":
        """The source without any data of the points of `x` that are not `kept`.

        The points `stand_ins` take their rows.
        """
        self._lacks("purged", "It may hold removed points. Fit again without them.")

    def _lacks(self, call: str, instead: str) -> NoReturn:
        raise UnsupportedStructure(f"model: a {type(self).__name__} has no {call}. {instead}")

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        """`J(x)ᵀ v`, for a network."""
        assert self.network is not None
        return pull_back(self.network, x, v)

    def moved_params(
        self, params: PyTree, x: Array, v: Float[Array, "n c"], since: Float[Array, "n c"] | None
    ) -> PyTree:
        """`params + J(x)ᵀ(v − since)` as `θ` for the user; frozen leaves do not change."""
        assert self.network is not None
        step = self.pull_back(x, v if since is None else v - since)
        return moved(self.network, params, step)

    @abc.abstractmethod
    def base_outputs(self, x: Array, num_outputs: int | None) -> Float[Array, "n c"] | None:
        """`f₀(x)`, or `None` for zero outputs, whose number follows from the targets."""

    @abc.abstractmethod
    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        """`K(x, x)`."""

    @abc.abstractmethod
    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        """`K(xq, x) v`."""

    def extend(
        self,
        op: AbstractKernelOperator,
        x: Array,
        start: int,
        stop: int,
        progress: bool | ProgressFn,
    ) -> AbstractKernelOperator:
        """`op` extended by the points `start:stop` of `x`, without computing its other entries again.

        `x` has a row for every row of the result. Rows after `stop` are spare: they may be any points
        and get no weight.
        """
        if op.follows_points:
            return op.at_points(x, self.layout(x))
        new = self.block(x, take_rows(x, start, stop), progress)
        return grow(op, new, start, stop)


class NetworkSource(AbstractSource):
    """A linearised network; queries go through `J(x_q)(Jᵀv)`, so no cross kernel is ever formed."""

    model: Linearized = eqx.field(converter=Linearized.in_scale)

    @property
    def network(self) -> Linearized:
        return self.model

    def moved_params(
        self, params: PyTree, x: Array, v: Float[Array, "n c"], since: Float[Array, "n c"] | None
    ) -> PyTree:
        return moved_params(self.model, params, x, v, since)

    def block(self, x1: Inputs, x2: Inputs | None, progress: bool | ProgressFn) -> Array:
        return self.model.kernel(x1, x2, progress=progress)

    def along(self, x1: Inputs, v: Float[Array, "n1 c"], x2: Inputs) -> Float[Array, "n1 n2 c"]:
        return self.model.kernel_along(x1, v, x2)

    def base_outputs(self, x: Array, num_outputs: int | None) -> Float[Array, "n c"]:
        self.model.apply_shape(x)
        return base_outputs(self.model, x)

    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        if form == "matrix-free":
            return MatrixFreeOperator(self.model, x, num_outputs)
        kernel = self.model.kernel(x, progress=progress, flat=True)
        return DenseOperator(kernel, num_outputs)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        return cross_mv(self.model, xq, x, v)

    def with_jacobian(self, x: Array) -> "JacobianSource":
        return JacobianSource(self.model, make_jacobian(self.model, x))

    def at_params(self, params: PyTree) -> "NetworkSource":
        return NetworkSource(replace(self.model, params=params))

    @property
    def can_widen(self) -> bool:
        return self.model.dtype == jnp.float32

    def widened(self, x: Array) -> "NetworkSource":
        return NetworkSource(self.model.widened().bound(x))

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> AbstractSource:
        return self


class JacobianSource(NetworkSource):
    """A network with `J` of its training points in memory: a read-out is one pass over `J`.

    `jacobian` has one array of shape `(n, c, *leaf.shape)` per trainable leaf. Points that edits
    append come after these `n` and go through the network.
    """

    jacobian: PyTree

    def without_jacobian(self) -> NetworkSource:
        return NetworkSource(self.model)

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> AbstractSource:
        return self.with_jacobian(stand_ins)

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        return held_pull_back(self.model, self.jacobian, x, v)

    def moved_params(
        self, params: PyTree, x: Array, v: Float[Array, "n c"], since: Float[Array, "n c"] | None
    ) -> PyTree:
        return held_moved_params(self.model, self.jacobian, params, x, v, since)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        return push(self.model, xq, self.pull_back(x, v))


class KernelSource(AbstractSource):
    """A kernel function `k(x1, x2)` of shape `(n1, n2)` or `(n1, c, n2, c)`, outputs start at 0."""

    kernel: Any
    takes_none: bool = eqx.field(static=True)

    @property
    def num_positions(self) -> int | None:
        pool = getattr(self.kernel, "__self__", None)
        return pool.matrix.shape[0] if isinstance(pool, PrecomputedKernel) else None

    def block(self, x1: Inputs, x2: Inputs | None, progress: bool | ProgressFn) -> Array:
        if self.takes_none:
            return self.kernel(x1, x2, progress=progress)
        return jnp.asarray(self.kernel(x1, x1 if x2 is None else x2))

    def base_outputs(self, x: Array, num_outputs: int | None) -> None:
        return None

    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        if form == "matrix-free":
            raise ValueError(
                "kernel: form 'matrix-free' needs a network made by linearize; a kernel "
                "function gives only entries. Use 'auto'."
            )
        return operator_from_array(self.block(x, None, progress), x.shape[0], num_outputs)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        block = self.block(xq, x, progress)
        if block.ndim == 2:
            return jnp.dot(block, v, precision="highest")
        return jnp.einsum("qanb,nb->qa", block, v, precision="highest")

    @property
    def can_widen(self) -> bool:
        return True

    def widened(self, x: Array) -> "KernelSource":
        holder: Any = getattr(self.kernel, "__self__", None)
        if isinstance(holder, PrecomputedKernel):
            return replace(self, kernel=PrecomputedKernel(widened(holder.matrix)).kernel)
        return replace(self, kernel=WideKernel(self.kernel))

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> AbstractSource:
        # A bound method holds its object: a kernel with points in it says how it loses them.
        holder: Any = getattr(self.kernel, "__self__", None)
        if not hasattr(holder, "purged"):
            return self
        return replace(self, kernel=holder.purged(x, kept, stand_ins).kernel)


class WideKernel(eqx.Module):
    """A kernel function on points cast to float64."""

    fn: Any

    def __call__(self, x1: Inputs, x2: Inputs, **options: Any) -> Array:
        with jax.numpy_dtype_promotion("standard"):
            return self.fn(widened(x1), widened(x2), **options)


class GivenKernel(eqx.Module):
    """A kernel function of the user, with its errors and results checked."""

    fn: Any

    def __call__(self, x1: Inputs, x2: Inputs) -> Array:
        try:
            value = self.fn(x1, x2)
        except Exception as error:
            raise ValueError(
                f"kernel: the function fails for points of shapes {np.shape(x1)} and "
                f"{np.shape(x2)}: {type(error).__name__}: {error}. It must take two batches of "
                "points; a network needs linearize first."
            ) from error
        return _check_block(as_kernel(value), len(x1), len(x2))


def _check_block(K: Array, n1: int, n2: int) -> Array:
    each = K.shape[1:2] if K.ndim == 4 else ()
    flat = K.ndim == 2 and n1 == n2 and K.shape[0] == K.shape[1] and K.shape[0] % n1 == 0
    if K.shape != (n1, *each, n2, *each) and not flat:
        raise ValueError(
            f"kernel: for {n1} and {n2} points expected shape ({n1}, {n2}) or ({n1}, c, {n2}, c), "
            f"got {tuple(K.shape)}."
        )
    return K


def as_kernel(value: Any) -> Array:
    """Entries of a kernel in a dtype that solvers take: integers and half precision are widened."""
    K = as_jax("kernel", value)
    if jnp.issubdtype(K.dtype, jnp.floating):
        return K.astype(common_dtype(K.dtype, jnp.float32))
    return K.astype(jnp.result_type(float))


class PrecomputedKernel(eqx.Module):
    """A kernel matrix over a pool of points; "features" are integer positions in that pool.

    `fit(matrix, None, y)` uses all positions as training points. Put queries into the same pool:
    `fit(PrecomputedKernel(K), np.arange(n), y)`, then `fitted.predict(np.arange(n, n + q))`.
    """

    matrix: Array

    def __init__(self, matrix: Any) -> None:
        self.matrix = as_kernel(matrix)
        check_finite("kernel", self.matrix)

    def __check_init__(self) -> None:
        half = self.matrix.ndim // 2
        square = self.matrix.ndim in (2, 4) and self.matrix.shape[:half] == self.matrix.shape[half:]
        if not square:
            raise ValueError(
                f"kernel: expected shape (n, n) or (n, c, n, c), got {tuple(self.matrix.shape)}."
            )
        if self.matrix.size == 0:
            raise ValueError("kernel: expected at least one point, got none.")

    def kernel(self, x1: Inputs, x2: Inputs) -> Array:
        rows, cols = as_jax("x", x1), as_jax("x", x2)
        half = self.matrix.ndim // 2
        for index in (rows, cols):
            if not jnp.issubdtype(index.dtype, jnp.integer) or index.ndim != 1:
                raise TypeError(
                    "kernel: with a precomputed matrix, x are integer positions in it, got dtype "
                    f"{index.dtype} and shape {index.shape}."
                )
            check_range("kernel", np.asarray(index), self.matrix.shape[0])
        every = np.arange(self.matrix.shape[0])
        if np.array_equal(rows, every) and np.array_equal(cols, every):
            return self.matrix  # as it is: a copy would be a second K
        return jnp.take(jnp.take(self.matrix, rows, axis=0), cols, axis=half)

    def purged(self, x: Array, kept: np.ndarray, stand_ins: Array) -> "PrecomputedKernel":
        """The same pool; the positions `x` that are not `kept` are overwritten by `stand_ins`."""
        positions, own = np.arange(self.matrix.shape[0]), np.asarray(x)
        positions[own] = np.asarray(stand_ins)
        positions[own[kept]] = own[kept]  # a position that a remaining point uses as well stays
        return PrecomputedKernel(self.kernel(positions, positions))


def as_source(model: Any, x: Inputs | None = None) -> AbstractSource:
    """Wrap the user's model: `Linearized`, `.kernel(x1, x2)`, a function, or a matrix.

    With points `x`, a network is bound to the present values of the variables it closes over.
    """
    model = as_network(model)
    form = form_of("x", x)
    if isinstance(model, Linearized):
        return NetworkSource(bound_network(model, x))
    if isinstance(model, AbstractSource) and model.form == form:
        return model
    if form is not None:
        raise TypeError(
            "fit: features that are a tree of arrays need a network made by linearize; a kernel "
            "takes one array. A low-rank model takes such trees if low_rank was given one."
        )
    if isinstance(model, AbstractSource):
        return model
    if isinstance(model, (jax.Array, np.ndarray)):
        return KernelSource(PrecomputedKernel(model).kernel, False)
    method: Callable[..., Any] | None = getattr(model, "kernel", None)
    if callable(method) and not isinstance(model, type):
        symmetric = is_symmetric(method)
        own = symmetric or isinstance(model, PrecomputedKernel)
        return KernelSource(method if own else GivenKernel(method), symmetric)
    if callable(model) and not isinstance(model, type):
        return KernelSource(GivenKernel(model), False)
    name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TypeError(
        "fit: model must come from linearize or dualfluence.infinite, have a method "
        f"kernel(x1, x2), be such a function, or be a kernel matrix; got {name}."
    )


def bound_network(model: Linearized, x: Inputs) -> Linearized:
    """The network in the scale of its ridge, bound, and reading packed rows if `x` is a tree of arrays."""
    form = form_of("x", x)
    return model.reading(form).bound(x if form is None else form.struct(count_points(x)))


def operator_from_array(array: Any, n: int, num_outputs: int) -> AbstractKernelOperator:
    """Dense or Kronecker operator from an `(n, n)`, `(n·c, n·c)` or `(n, c, n, c)` array."""
    K = jnp.asarray(array)
    c = num_outputs
    if K.shape == (n, n):
        return KroneckerOperator(K, c)
    if K.shape in ((n, c, n, c), (n * c, n * c)):
        return DenseOperator(K.reshape(n * c, n * c), c)
    raise ValueError(
        f"kernel: for {n} points and {c} outputs expected shape ({n}, {n}) or ({n}, {c}, {n}, {c}),"
        f" got {tuple(K.shape)}."
    )


@partial(jit, donate_argnums=0)
def flatten_block(block: Float[Array, "n1 c n2 d"]) -> Float[Array, "rows cols"]:
    """`(n1, c, n2, c)` as a matrix, in place: a plain reshape would need memory for two kernels."""
    return block.reshape(block.shape[0] * block.shape[1], -1)


@jit
def fold_block(block: Float[Array, "..."], v: Float[Array, "n1 c"]) -> Float[Array, "n1 n2 c"]:
    """`v_iᵀ K_ij` of a block, with or without axes for the outputs."""
    if block.ndim == 2:
        return block[:, :, None] * v[:, None, :]
    return jnp.einsum("qa,qanb->qnb", v, block, precision="highest")


def take_rows(x: Array, start: int, stop: int) -> Array:
    """`x[start:stop]`, sliced on the host, because on the device every position would compile another
    program."""
    return jax.device_put(np.asarray(x)[start:stop])
