"""A network linearised at θ₀: outputs, Jacobian products and tangent kernel."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Shaped

from .._support.checks import all_finite, check_concrete, check_numbers
from .._support.memory import BATCH_BYTES, GRADIENT_BYTES
from .._support.options import check_choice, check_count, check_function, maybe
from .._support.progress import ProgressFn
from . import empirical_kernel, kernel_block
from ._program import largest_activation

ApplyFn = Callable[[Any, Any], Array]
"""`apply_fn(params, x) -> (n, c)`, batched over the points on axis 0 of `x`."""

MAX_BATCH = 2048

PRECISION = "highest"
"""Matrix products inside `apply_fn` keep the full precision of their dtype, also on a GPU."""


class Linearized(eqx.Module):
    r"""`f(x) = f(x; θ₀) + J(x)(θ − θ₀)`, with `J` the Jacobian at `params`.

    Made by `linearize`. All products run in batches of points, so that memory is that of one batch
    and one parameter vector.
    """

    apply_fn: ApplyFn = eqx.field(static=True)
    params: PyTree
    trainable: tuple[bool, ...] = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    anchor: str = eqx.field(static=True, default="params")

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Trainable leaves and the rest, each with `None` in the other's places."""
        treedef = jax.tree.structure(params)
        return eqx.partition(params, jax.tree.unflatten(treedef, self.trainable))

    def batch(self, x: Shaped[Array, "n ..."]) -> int:
        """Points per batch, equal in size so that little is padding.

        By default as many as keep the largest activation within `BATCH_BYTES`: larger batches of
        images gain nothing, and a GPU's compiler runs each convolution in many ways to choose one.
        """
        size = self.batch_size
        if size is None:
            point = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            each = largest_activation(lambda v: self.apply_fn(self.params, v), point)
            size = min(MAX_BATCH, max(1, BATCH_BYTES // each))
        return math.ceil(x.shape[0] / math.ceil(x.shape[0] / size))

    def __call__(self, params: PyTree, x: Shaped[Array, "n ..."]) -> Float[Array, "n c"]:
        """The network itself, not linearised, at any parameters."""
        with jax.default_matmul_precision(PRECISION):
            return _batched(lambda xb: self.apply_fn(params, xb), x, self.batch(x))

    def base_outputs(self, x: Shaped[Array, "n ..."]) -> Float[Array, "n c"]:
        """`f(x; θ₀)`."""
        return self(self.params, x)

    def linearised(self, params: PyTree, x: Shaped[Array, "n ..."]) -> Float[Array, "n c"]:
        """`f(x; θ₀) + J(x)(θ − θ₀)` at any parameters `θ`."""
        theta, theta_0 = self.split(params)[0], self.split(self.params)[0]
        return self.base_outputs(x) + self.jvp(x, jax.tree.map(jnp.subtract, theta, theta_0))

    def jvp(self, x: Shaped[Array, "n ..."], tangent: PyTree) -> Float[Array, "n c"]:
        """`J(x) t` for a tangent with the structure of the trainable leaves."""
        theta, frozen = self.split(self.params)

        def push(xb: Array) -> Array:
            def apply(t: PyTree) -> Array:
                return self.apply_fn(eqx.combine(t, frozen), xb)

            return jax.jvp(apply, (theta,), (tangent,))[1]

        with jax.default_matmul_precision(PRECISION):
            return _batched(push, x, self.batch(x))

    def vjp(self, x: Shaped[Array, "n ..."], v: Float[Array, "n c"]) -> PyTree:
        """`J(x)ᵀ v`, summed over points, as a pytree of the trainable leaves."""
        theta, frozen = self.split(self.params)

        def pull(xb: Array, vb: Array) -> PyTree:
            f, back = jax.vjp(lambda t: self.apply_fn(eqx.combine(t, frozen), xb), theta)
            # Dual variables of a refined fit are wider than the network.
            return back(vb.astype(f.dtype))[0]

        def add(total: PyTree, batch: tuple[Array, Array]) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, pull(*batch)), None

        with jax.default_matmul_precision(PRECISION):
            size = self.batch(x)
            if x.shape[0] <= size:
                return pull(x, v)
            xs, vs = _batches(x, size), _batches(v, size, zeros=True)
            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, theta), (xs, vs))[0]

    def kernel(
        self,
        x1: Shaped[Array, "n1 ..."],
        x2: Shaped[Array, "n2 ..."] | None = None,
        *,
        progress: bool | ProgressFn = True,
        **options: Any,
    ) -> Float[Array, "n1 c n2 c"]:
        """`J(x1) J(x2)ᵀ`, in tiles; `x2=None` computes half of the symmetric kernel."""
        mask = jax.tree.unflatten(jax.tree.structure(self.params), self.trainable)
        with jax.default_matmul_precision(PRECISION):
            return empirical_kernel(
                self.apply_fn, self.params, x1, x2, trainable=mask, progress=progress, **options
            ).value

    def kernel_block(self, x1: Array, x2: Array) -> Float[Array, "n1 c n2 c"]:
        """`J(x1) J(x2)ᵀ` in one piece, for use inside other compiled functions."""
        mask = jax.tree.unflatten(jax.tree.structure(self.params), self.trainable)
        with jax.default_matmul_precision(PRECISION):
            return kernel_block(self.apply_fn, self.params, x1, x2, trainable=mask)

    @eqx.filter_jit
    def kernel_diagonal(self, x: Shaped[Array, "n ..."]) -> Float[Array, "n c"]:
        """`‖∂f_a(x_i)/∂θ‖²`: `c` backward passes over the data."""
        theta, frozen = self.split(self.params)
        c = self.apply_shape(x)[1]

        def point(xi: Array) -> Array:
            _, back = jax.vjp(lambda t: self.apply_fn(eqx.combine(t, frozen), xi[None])[0], theta)
            grads = jax.vmap(back)(jnp.eye(c, dtype=self.dtype))[0]
            squares = [jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
            return sum(squares[1:], start=squares[0])

        return jax.lax.map(point, x, batch_size=min(self._points_at_once(c), x.shape[0]))

    def jacobian(self, x: Shaped[Array, "n ..."]) -> PyTree:
        """`J(x)`: for every trainable leaf an array of shape `(n, c, *leaf.shape)`."""
        theta, frozen = self.split(self.params)
        c = self.apply_shape(x)[1]

        def point(xi: Array) -> PyTree:
            _, back = jax.vjp(lambda t: self.apply_fn(eqx.combine(t, frozen), xi[None])[0], theta)
            return jax.vmap(back)(jnp.eye(c, dtype=self.dtype))[0]

        with jax.default_matmul_precision(PRECISION):
            return jax.lax.map(point, x, batch_size=min(self._points_at_once(c), x.shape[0]))

    def _points_at_once(self, c: int) -> int:
        """Points whose gradients fit in `GRADIENT_BYTES`."""
        return max(1, GRADIENT_BYTES // (8 * c * max(self.num_params, 1)))

    def apply_shape(self, x: Shaped[Array, "n ..."]) -> tuple[int, int]:
        """`(n, c)`, or an error if `apply_fn` returns anything else."""
        try:
            out = eqx.filter_eval_shape(lambda p, v: self.apply_fn(p, v), self.params, x)
        except Exception as error:  # the user's function may raise anything
            raise ValueError(
                f"linearize: apply_fn(params, x) fails for x of shape {x.shape} and dtype {x.dtype}: "
                f"{type(error).__name__}: {error}"
            ) from error
        shape = getattr(out, "shape", None)
        if shape is None or len(shape) != 2 or shape[0] != x.shape[0] or shape[1] == 0:
            raise ValueError(
                f"linearize: apply_fn(params, x) must return an array of shape (n, c) = "
                f"({x.shape[0]}, c), got {out if shape is None else tuple(shape)}. A scalar "
                "output still needs its axis: return f[:, None]."
            )
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(
                f"linearize: apply_fn(params, x) must return real floating-point numbers, got "
                f"{out.dtype}. Return scores before any argmax, rounding or comparison."
            )
        return shape[0], shape[1]

    @property
    def num_params(self) -> int:
        """Number of trainable parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.split(self.params)[0]))

    @property
    def dtype(self) -> Any:
        """Common dtype of the trainable parameters."""
        return jnp.result_type(*jax.tree.leaves(self.split(self.params)[0]))


def linearize(
    apply_fn: ApplyFn,
    params: PyTree,
    *,
    anchor: str = "params",
    trainable: Callable[[tuple[Any, ...], Any], bool] | None = None,
    batch_size: int | None = None,
) -> Linearized:
    r"""Linearise any JAX function of a parameter pytree at `params`.

    The ridge of `fit` then pulls towards `params`: $\frac{\lambda}{2}\|\theta-\theta_0\|^2$.
    For a model that is linear in its parameters, `anchor="zero"` gives the usual
    $\frac{\lambda}{2}\|\theta\|^2$ instead (paper, section 3.4); `fit` checks that it is linear.

    **Arguments:**

    - `apply_fn`: `apply_fn(params, x) -> (n, c)`; points on axis 0 must not see each other.
    - `params`: a pytree, such as nested dicts or a module; floating-point arrays in it are trainable,
      all else (integers, Python numbers, functions, …) is kept as it is.
    - `anchor`: where to linearise, `"params"` or `"zero"`.
    - `trainable`: `(path, leaf) -> bool` picks the leaves that count, e.g. the last layer.
    - `batch_size`: points per batch in Jacobian products; by default from the size of activations.
    """
    check_function("linearize: apply_fn", apply_fn, "of (params, x)")
    check_choice("linearize: anchor", anchor, ("params", "zero"))
    batch_size = maybe(check_count, "linearize: batch_size", batch_size)
    if trainable is not None:
        check_function("linearize: trainable", trainable, "of (path, leaf)")
    leaves, treedef = jax.tree.flatten(params)
    for leaf in leaves:
        check_concrete("linearize: params", leaf)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    mask = tuple(
        bool(_is_floating(leaf) and (trainable is None or trainable(path, leaf)))
        for path, leaf in zip(paths, leaves, strict=True)
    )
    if not any(mask):
        raise ValueError(
            f"linearize: no trainable parameter among {len(leaves)} leaves. Floating-point arrays "
            "are trainable unless `trainable` rejects them; make Python numbers arrays by jnp.asarray."
        )
    for path, leaf, used in zip(paths, leaves, mask, strict=True):
        name = f"linearize: params{jax.tree_util.keystr(path)}"
        if used:
            check_numbers(name, leaf)
        if used and not all_finite(name, jnp.asarray(leaf)):
            raise ValueError(f"{name} has NaN or inf.")
    arrays = [
        jnp.asarray(leaf) if used or isinstance(leaf, np.ndarray) else leaf
        for leaf, used in zip(leaves, mask, strict=True)
    ]
    if anchor == "zero":
        arrays = [jnp.zeros_like(a) if used else a for a, used in zip(arrays, mask, strict=True)]
    return Linearized(apply_fn, jax.tree.unflatten(treedef, arrays), mask, batch_size, anchor)


def _is_floating(leaf: Any) -> bool:
    array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return array and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _batches(x: Array, size: int, *, zeros: bool = False) -> Array:
    """`x` as `(num_batches, size, ...)`, padded with its last row or with zeros."""
    missing = -x.shape[0] % size
    if missing:
        tail = jnp.zeros_like(x[:1]) if zeros else x[-1:]
        x = jnp.concatenate([x, jnp.repeat(tail, missing, axis=0)])
    return x.reshape(-1, size, *x.shape[1:])


def _batched(fn: Callable[[Array], Array], x: Array, size: int) -> Array:
    if x.shape[0] <= size:
        return fn(x)
    out = jax.lax.map(fn, _batches(x, size))
    return out.reshape(-1, *out.shape[2:])[: x.shape[0]]
