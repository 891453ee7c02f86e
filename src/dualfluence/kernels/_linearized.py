"""A network linearised at θ₀: outputs, Jacobian products and tangent kernel."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, PyTree

from .._support.compile import PRECISION, widened
from .._support.memory import BATCH_BYTES, GRADIENT_BYTES, even_size
from .._support.options import ProgressFn, check_choice, check_count, check_function, maybe
from .._support.points import Form, common_dtype, count_points, is_tree, tree_norm
from .._support.types import AnyLeaf, Inputs, KernelArray, Leaves
from ._along import kernel_along
from ._apart import Apart
from ._empirical import empirical_kernel, kernel_block, kernel_rows
from ._params import (
    InScale,
    Reading,
    Scales,
    Shifted,
    check_scale,
    enter_params,
    opened,
    shifted,
    split_leaves,
    split_params,
    weighted,
)
from ._prepare import check_outputs
from ._products import map_rows, pull_rows, push_rows
from ._program import largest_activation
from ._snapshot import (
    ChangedError,
    Kept,
    Snapshot,
    Widened,
    dtypes_of,
    take_snapshot,
    widened_fn,
    widening_of,
)

ApplyFn = Callable[[Any, Any], Array]
"""`apply_fn(params, x) -> (n, c)`, batched over the points on axis 0 of `x`."""


MAX_BATCH = 2048


_GUARDS = Kept[Apart](64)
"""Results of checks of networks and points, so that they are not repeated at each request."""


class Linearized(eqx.Module):
    r"""`f(x) = f(x; θ₀) + J(x)(θ − θ₀)`, with `J` the Jacobian at `params`.

    Made by `linearize`. All products run in batches of points, so they need memory for one batch and
    one parameter vector.

    `scale` is the `P` of `linearize`: for each trainable leaf a number, an array of the leaf's shape, or
    `None`, which means 1. If it is 1 for every leaf, `scale` itself is `None`. Kernels include `P`; `jvp`,
    `vjp` and
    `jacobian` are products with `J` itself.
    """

    apply_fn: ApplyFn = eqx.field(static=True)
    params: PyTree
    trainable: tuple[bool, ...] = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    anchor: str = eqx.field(static=True, default="params")
    held: tuple[str, ...] = eqx.field(static=True, default=())
    scale: tuple[Array | None, ...] | None = None
    form: Form | None = eqx.field(static=True, default=None)

    def bound(self, x: Inputs) -> "Linearized":
        """The model with the present values of everything that `apply_fn` closes over, for points like
        those of `x`.

        Objects that keep a model or its compiled programs keep a bound model; see `Snapshot`. A bound
        model is returned unchanged. If `apply_fn` fails, this model fails too, and `apply_shape`
        reports it. A model with a scale is returned `in_scale`.
        """
        if self.scale is not None:
            return self.in_scale().bound(x)
        if isinstance(self.apply_fn, Snapshot) or x is None or isinstance(x, Tracer):
            return self
        try:  # x as it came: what is no array is refused later, by name
            shape = jax.tree.map(_shape, x) if is_tree(x) else _shape(x)
            if not all(leaf.shape for leaf in jax.tree.leaves(shape)):
                return self
            now = self._snapshot(shape)
        except Exception:  # user code may raise anything
            return self
        return replace(self, apply_fn=now)

    def _snapshot(self, x: Inputs) -> Snapshot:
        """A snapshot for points like those of `x`: the model's own, or a new one."""
        fn = self.apply_fn
        if isinstance(fn, Snapshot) and fn.fits(x):
            return fn
        return take_snapshot(fn, self.params, x)

    def in_scale(self) -> "Linearized":
        """The same network as a function of `φ` in `θ = θ₀ + P^{1/2}φ`, with a plain ridge.

        Its parameters are a `Shifted` (`kernels._params`), which holds `φ`; `enter` turns `θ` into one,
        and `leave` turns it back. `fit` and all
        later code work on it, so no other code handles scales.
        """
        if self.scale is None:
            return self
        params = shifted(self.params, self.trainable, self.scale)
        fn = InScale(_without(self.apply_fn, Snapshot))
        return replace(self, apply_fn=fn, params=params, trainable=params.mask, scale=None)

    def reading(self, form: Form | None) -> "Linearized":
        """The network `in_scale` on points that are packed: rows of bytes instead of trees of arrays."""
        own = self.in_scale()
        if form is None or form == own.form:
            return own
        fn = _without(own.apply_fn, Snapshot, Reading)
        return replace(own, apply_fn=Reading(fn, form), form=form)

    def as_given(self) -> "Linearized":
        """The network as `linearize` made it: takes `θ` and trees; undoes `in_scale` and `reading`."""
        own, wide = self.params, self.widening
        if not isinstance(own, Shifted) and self.form is None and wide is None:
            return self
        fn = _without(self.apply_fn, Snapshot, Reading, InScale, Widened)
        plain = replace(self, apply_fn=fn, form=None)
        if not isinstance(own, Shifted):
            return plain if wide is None else replace(plain, params=wide.narrow(own))
        scale = tuple(None if root is None else root**2 for root in own.roots)
        return replace(plain, params=self.leave(own), trainable=own.trainable, scale=scale)

    @property
    def widening(self) -> Widened | None:
        """The wrapper that computes this network in float64, if the user gave float32."""
        return widening_of(self.apply_fn)

    def widened(self) -> "Linearized":
        """The same network computed in float64 from the same numbers; call it inside `with double():`
        (`_support.compile`), which switches JAX's 64-bit types on.

        Points stay unchanged, and parameters that it returns (`leave`) have the dtypes of the user.
        """
        own = self.params
        given = dtypes_of(own.base if isinstance(own, Shifted) else own)
        fn = widened_fn(self.apply_fn, given)
        return replace(self, apply_fn=fn, params=widened(own), scale=widened(self.scale))

    def plain(self, x: Inputs) -> "Linearized":
        """The network without any scale, bound. Properties of `f` itself are tested on it."""
        if self.scale is None and not isinstance(self.params, Shifted):
            return self
        return replace(self.as_given(), scale=None).reading(self.form).bound(x)

    def enter(self, params: PyTree) -> PyTree:
        """Parameters `θ` in the form that this model uses."""
        params = params if self.widening is None else widened(params)
        return self.params.at(params) if isinstance(self.params, Shifted) else params

    def leave(self, params: PyTree) -> PyTree:
        """`θ` in the dtypes that the user gave, from parameters in the form that this model uses."""
        theta, wide = params.params() if isinstance(params, Shifted) else params, self.widening
        return theta if wide is None else wide.narrow(theta)

    def leave_step(self, step: PyTree) -> PyTree:
        """`Δθ` with `None` for the other leaves, from a step of the trainable leaves."""
        return self.params.spread(step.move) if isinstance(self.params, Shifted) else step

    def norm(self, step: PyTree) -> Float[Array, ""]:
        """`‖Δθ‖` of a step of the trainable leaves, in the norm `P⁻¹` of certificates.

        `split(params)[0]` has such leaves. Without a scale this is the usual norm.
        """
        return tree_norm(step if self.scale is None else weighted(step, self.scale))

    @property
    def size(self) -> Float[Array, ""]:
        """`‖θ‖` of the trainable leaves, in the norm `P⁻¹` of certificates."""
        own = self.params
        if isinstance(own, Shifted):
            return own.size()
        return self.norm(self.split(own)[0])

    def distance(self, params_a: PyTree, params_b: PyTree) -> float:
        """`‖θ_a − θ_b‖` over the trainable leaves, in the norm `P⁻¹` of certificates."""
        a, b = self.split(params_a)[0], self.split(params_b)[0]
        return float(self.norm(jax.tree.map(jnp.subtract, a, b)))

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Trainable leaves and the rest, each with `None` for the leaves of the other."""
        return split_leaves(params, self.trainable)

    def batch(self, x: Inputs) -> int:
        """Points per batch, in batches of equal size so that there is little padding.

        By default the largest activation takes at most `BATCH_BYTES`. Larger batches of images gain
        nothing and take longer to compile on a GPU, whose compiler tries each convolution in many ways.
        """
        size = self.batch_size
        if size is None:
            point = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), x)
            each = largest_activation(lambda v: self.apply_fn(self.params, v), point)
            size = min(MAX_BATCH, max(1, BATCH_BYTES // each))
        return even_size(count_points(x), size)

    def __call__(self, params: PyTree, x: Inputs) -> Float[Array, "n c"]:
        """The network itself, not linearised, at any parameters."""
        with jax.default_matmul_precision(PRECISION):
            return map_rows(lambda xb: self.apply_fn(params, xb), x, self.batch(x))

    def base_outputs(self, x: Inputs) -> Float[Array, "n c"]:
        """`f(x; θ₀)`."""
        return self(self.params, x)

    def linearised(self, params: PyTree, x: Inputs) -> Float[Array, "n c"]:
        """`f(x; θ₀) + J(x)(θ − θ₀)` at any parameters `θ`."""
        theta, theta_0 = self.split(params)[0], self.split(self.params)[0]
        return self.base_outputs(x) + self.jvp(x, jax.tree.map(jnp.subtract, theta, theta_0))

    def jvp(self, x: Inputs, tangent: PyTree) -> Float[Array, "n c"]:
        """`J(x) t` for a tangent with the structure of the trainable leaves."""
        self.apply_shape(x)
        theta, outputs = self._outputs()
        with jax.default_matmul_precision(PRECISION):
            return push_rows(outputs, theta, x, tangent, self.batch(x))

    def vjp(self, x: Inputs, v: Float[Array, "n c"]) -> PyTree:
        """`J(x)ᵀ v`, summed over points, as a pytree of the trainable leaves."""
        self.apply_shape(x)
        theta, outputs = self._outputs()
        with jax.default_matmul_precision(PRECISION):
            return pull_rows(outputs, theta, x, v, self.batch(x))

    def _outputs(self) -> tuple[PyTree, Callable[[PyTree, Inputs], Array]]:
        """The trainable leaves, and the network as a function of them."""
        theta, frozen = self.split(self.params)
        return theta, lambda t, x: self.apply_fn(eqx.combine(t, frozen), x)

    def kernel(
        self,
        x1: Inputs,
        x2: Inputs | None = None,
        *,
        progress: bool | ProgressFn = True,
        **options: Any,
    ) -> Float[KernelArray, "..."]:
        """`J(x1) P J(x2)ᵀ` of shape `(n1, c, n2, c)`, in tiles; `x2=None` is `x1` at half the work.

        `options` are those of `kernels.empirical_kernel`, e.g. `flat=True` for `(n1·c, n2·c)`.
        """
        model = self.bound(x1)
        with jax.default_matmul_precision(PRECISION):
            return empirical_kernel(
                model.apply_fn,
                model.params,
                x1,
                x2,
                trainable=model._mask(),
                progress=progress,
                **options,
            ).value

    def kernel_rows(self, x: Inputs, size: int) -> Iterator[tuple[int, Float[Array, "rows c n c"]]]:
        """`J(x) P J(x)ᵀ` in blocks of `size` rows. Each block comes with the number of its first row. The
        blocks together are symmetric: a point's `J` is rounded alike for its row and for its column."""
        model = self.bound(x)
        return kernel_rows(model.apply_fn, model.params, x, size, trainable=model._mask())

    def kernel_along(
        self, x1: Inputs, v: Float[Array, "n1 c"], x2: Inputs
    ) -> Float[Array, "n1 n2 c"]:
        """`v_iᵀ J(x1_i) P J(x2)ᵀ`: the kernel along one direction of outputs for each point of `x1`."""
        model = self.bound(x1)
        with jax.default_matmul_precision(PRECISION):
            return kernel_along(model.apply_fn, model.params, x1, v, x2, trainable=model._mask())

    def kernel_block(self, x1: Inputs, x2: Inputs) -> Float[Array, "n1 c n2 c"]:
        """`J(x1) P J(x2)ᵀ` in one piece, for use inside other compiled functions."""
        own = self.in_scale()
        with jax.default_matmul_precision(PRECISION):
            return kernel_block(own.apply_fn, own.params, x1, x2, trainable=own._mask())

    def _mask(self) -> PyTree:
        """`trainable` in the tree of the parameters."""
        return jax.tree.unflatten(jax.tree.structure(self.params), self.trainable)

    def kernel_diagonal(self, x: Inputs) -> Float[Array, "n c"]:
        """`‖P^{1/2} ∂f_a(x_i)/∂θ‖²`: `c` backward passes over the data."""
        model = self.bound(x)
        model.apply_shape(x)
        return _diagonal(model, x)

    def jacobian(self, x: Inputs) -> PyTree:
        """`J(x)`: for every trainable leaf an array of shape `(n, c, *leaf.shape)`."""
        return self._per_point(x, lambda grads: grads)

    def _per_point(self, x: Inputs, use: Callable[[PyTree], PyTree]) -> PyTree:
        """`use` of every point's gradients, each leaf `(c, *leaf.shape)`."""
        c = self.apply_shape(x)[1]
        theta, outputs = self._outputs()

        def point(xi: Inputs) -> PyTree:
            alone = jax.tree.map(lambda a: a[None], xi)
            f, back = jax.vjp(lambda t: outputs(t, alone)[0], theta)
            return use(jax.vmap(back)(jnp.eye(c, dtype=f.dtype))[0])

        with jax.default_matmul_precision(PRECISION):
            size = min(self._points_at_once(c), count_points(x))
            return jax.lax.map(point, x, batch_size=size)

    def _points_at_once(self, c: int) -> int:
        """Points whose gradients fit in `GRADIENT_BYTES`."""
        return max(1, GRADIENT_BYTES // (8 * c * max(self.num_params, 1)))

    def apply_shape(self, x: Inputs) -> tuple[int, int]:
        """`(n, c)`, or an error if `apply_fn` returns anything else or mixes points."""
        known = isinstance(self.apply_fn, Snapshot) and self.apply_fn.fits(x)
        n, c = (count_points(x), self._columns()) if known else self._traced_shape(x)
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
            self._guard(x)
        return n, c

    def _columns(self) -> int:
        assert isinstance(self.apply_fn, Snapshot)
        points = self.apply_fn.args[1]
        return check_outputs("linearize", self.apply_fn.outputs, count_points(points))

    def _traced_shape(self, x: Inputs) -> tuple[int, int]:
        try:
            out = eqx.filter_eval_shape(lambda p, v: self.apply_fn(p, v), self.params, x)
        except ChangedError:
            raise
        except Exception as error:  # user code may raise anything
            given = x if self.form is None else jax.eval_shape(self.form.unpack, x)
            raise ValueError(
                f"linearize: apply_fn(params, x) fails for x of {_described(given)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return count_points(x), check_outputs("linearize", out, count_points(x))

    def _guard(self, x: Inputs) -> None:
        """Raise if the output at a point depends on other points: by a proof for any parameters or, if
        there is none, by a probe for these."""
        now = self._snapshot(x)
        apart = _GUARDS.get((now, self.trainable))
        if apart is not None and apart.proven:
            return
        split, leaves, rest = split_params(self.params, self._mask())
        with jax.default_matmul_precision(PRECISION):
            if apart is None:

                def outputs(leaves: Leaves, rest: Leaves, x: Inputs) -> PyTree:
                    return now(split.merge(leaves, rest), x)

                apart = _GUARDS.put((now, self.trainable), Apart(outputs, leaves, rest, x))
            apart.check(leaves, rest, x)

    @property
    def arithmetic_eps(self) -> float:
        """The rounding unit of the network. Once the network is bound, it is the unit of its least
        precise step.

        Half-precision layers or TF32 products inside a float32 network make it larger than the rounding
        unit of float32.
        """
        own = float(jnp.finfo(self.dtype).eps)
        fn = self.apply_fn
        return max(own, fn.arithmetic.eps) if isinstance(fn, Snapshot) else own

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on this model for `stats.notes`."""
        notes: tuple[str, ...] = ()
        if self.held:
            notes += (f"statistics held fixed, not trained: {', '.join(self.held)}",)
        if isinstance(self.params, Shifted):
            notes += self.params.notes
        fn, eps = self.apply_fn, self.arithmetic_eps
        if isinstance(fn, Snapshot) and eps > float(jnp.finfo(self.dtype).eps):
            name, own = fn.arithmetic.name, jnp.dtype(self.dtype).name
            notes += (f"narrow arithmetic: {name} inside a {own} network, rounding unit {eps:.1e}",)
        return notes

    @property
    def num_params(self) -> int:
        """Number of trainable parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.split(self.params)[0]))

    @property
    def dtype(self) -> np.dtype:
        """Common dtype of the trainable parameters."""
        return common_dtype(*jax.tree.leaves(self.split(self.params)[0]))


def _shape(x: Inputs) -> jax.ShapeDtypeStruct:
    dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype))


def _described(x: Inputs) -> str:
    """Shape and dtype of one array, or of the arrays of a tree."""
    if not is_tree(x):
        return f"shape {x.shape} and dtype {x.dtype}"
    leaves = jax.tree.leaves_with_path(x)
    return ", ".join(f"{jax.tree_util.keystr(k)}: shape {v.shape}, {v.dtype}" for k, v in leaves)


def _without(fn: ApplyFn, *layers: type[Snapshot | Reading | InScale | Widened]) -> ApplyFn:
    """A function without wrappers of these types."""
    while isinstance(fn, layers):
        fn = fn.fn
    return fn


def as_network(model: object) -> Any:
    """The linearised network inside an adapted model; anything else unchanged."""
    own = getattr(model, "linearized", None)
    return own if isinstance(own, Linearized) else model


@eqx.filter_jit
def _diagonal(model: Linearized, x: Inputs) -> Float[Array, "n c"]:
    def square(grads: PyTree) -> Array:
        parts = [jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
        return sum(parts[1:], start=parts[0])

    return model._per_point(x, square)


def linearize(
    apply_fn: ApplyFn,
    params: PyTree,
    *,
    anchor: str = "params",
    trainable: Callable[[KeyPath, AnyLeaf], bool] | None = None,
    batch_size: int | None = None,
    scale: Scales = None,
) -> Linearized:
    r"""Linearise any JAX function of a parameter pytree at `params`.

    The ridge of `fit` then pulls towards `params`: $\frac{\lambda}{2}\|\theta-\theta_0\|^2$.
    For a model that is linear in its parameters, `anchor="zero"` gives the usual
    $\frac{\lambda}{2}\|\theta\|^2$ instead (paper, section 3.4); `fit` checks that it is linear.

    With a `scale`, the diagonal matrix $P$, the ridge is $\frac{\lambda}{2}\sum_k(\theta-\theta_0)_k^2/P_k$:
    the ridge hardly pulls a parameter with a large scale. The kernel is then $JPJ^\top$, parameters are
    $\theta_0+PJ^\top\alpha$, and all norms and distances of parameters in fits, edits and certificates
    are taken with $P^{-1}$.

    **Arguments:**

    - `apply_fn`: `apply_fn(params, x) -> (n, c)`; `x` is an array or a tree of arrays with the points on
      axis 0, and the outputs at one point must not depend on other points. Each call of `fit`,
      `from_trained` or `kernel` reads everything else that the function uses (closed-over arrays,
      attributes, globals). The results keep these values and raise an error if they change later. For a
      model of `adapters`, its function and its trainable parameters are used.
    - `params`: a pytree, such as nested dicts or a module; floating-point arrays in it are trainable;
      all else (integers, Python numbers, functions, …) is kept unchanged. Statistics are kept unchanged
      too: a collection such as `batch_stats` beside `params`, and variables of NNX that are not
      `Param`.
    - `anchor`: where to linearise, `"params"` or `"zero"`.
    - `trainable`: `(path, leaf) -> bool` selects the trainable leaves, e.g. the last layer. It also
      decides whether statistics are trained.
    - `batch_size`: points per batch in Jacobian products; by default from the size of activations.
    - `scale`: `P`: a prefix of the tree of `params` with `None` (1), a positive number, `"free"` (1e7,
      hardly pulled at all) or an array like the leaf. It can also be a rule `(path, leaf)` that returns
      one of these. With one number for a leaf the kernel stays as fast as without; with an array the
      kernel has to form the Jacobian of this leaf.
    """
    apply_fn, trainable = opened("linearize", apply_fn, trainable)
    check_function("linearize: apply_fn", apply_fn, "of (params, x)")
    check_choice("linearize: anchor", anchor, ("params", "zero"))
    batch_size = maybe(check_count, "linearize: batch_size", batch_size)
    if trainable is not None:
        check_function("linearize: trainable", trainable, "of (path, leaf)")
    params, mask, held = enter_params(params, trainable, at_zero=anchor == "zero")
    scales = check_scale(scale, params, mask)
    return Linearized(apply_fn, params, mask, batch_size, anchor, held, scales)
