r"""Split a parameter pytree into the leaves to differentiate and the rest, and scale their ridges.

With $P$ diagonal, the ridge $\frac\lambda2(\theta-\theta_0)^\top P^{-1}(\theta-\theta_0)$ is the plain
one of $\phi$ in $\theta = \theta_0 + P^{1/2}\phi$. As a function of $\phi$ the network has the Jacobian
$JP^{1/2}$. Therefore kernels are $JPJ^\top$, gradients $P^{1/2}J^\top v$ and norms those of $P^{-1}$,
and no other rule is needed. With one number for a leaf, the kernel keeps its rule for the leaf. With
one number for every parameter of the leaf, the kernel must form its whole Jacobian.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from .._support.checks import all_finite, as_array, check_concrete, check_numbers
from .._support.points import Form, is_array, is_floating, tree_norm
from .._support.types import AnyLeaf, ApplyFn, Inputs, Numbers, Trainable

STATISTICS = frozenset({"batch_stats", "cache", "intermediates", "state", "stats"})
"""Collections that stand beside "params" in the variables of a model and are not trained."""


@dataclass(frozen=True)
class Split:
    """The role of each leaf of a parameter pytree.

    - `roles`: per leaf, `"trainable"`, `"fixed"` (an array) or `"static"` (anything else).
    - `static`: the static leaves, in order.
    - `paths`: readable name of every leaf.
    """

    treedef: Any
    roles: tuple[str, ...]
    static: tuple[object, ...]
    paths: tuple[str, ...]

    def merge(self, leaves: Iterable[AnyLeaf], rest: Iterable[AnyLeaf]) -> PyTree:
        """Put the pytree together again."""
        parts = {"trainable": iter(leaves), "fixed": iter(rest), "static": iter(self.static)}
        return jax.tree.unflatten(self.treedef, [next(parts[role]) for role in self.roles])


def statistics(params: PyTree) -> tuple[bool, ...]:
    """For every leaf, whether it is a statistic (a running mean, a cache) rather than a parameter.

    Flax NNX (every `Variable` that is not a `Param`) and Equinox (its `State`) are recognised by type,
    the collections of Flax Linen and Haiku (`STATISTICS`) by name.
    """
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_state)[0]
    named = _collections(params)
    flags: list[bool] = []
    for path, node in nodes:
        held = _is_state(node) or (bool(path) and getattr(path[0], "key", None) in named)
        flags += [held] * len(jax.tree.leaves(node))
    return tuple(flags)


def enter_params(
    params: PyTree, trainable: Callable[[KeyPath, AnyLeaf], bool] | None, at_zero: bool
) -> tuple[PyTree, tuple[bool, ...], tuple[str, ...]]:
    """What `linearize` is given, checked: parameters with trainable leaves as arrays, which leaves are
    trainable, and the names of statistics among the others.

    `at_zero` puts zeros in place of the trainable leaves.
    """
    leaves, treedef = jax.tree.flatten(params)
    for leaf in leaves:
        check_concrete("linearize: params", leaf)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    stats = statistics(params)
    mask = tuple(
        bool(is_floating(leaf) and (not stat if trainable is None else trainable(path, leaf)))
        for path, leaf, stat in zip(paths, leaves, stats, strict=True)
    )
    held = tuple(
        leaf_name(path)
        for path, leaf, stat, used in zip(paths, leaves, stats, mask, strict=True)
        if stat and is_floating(leaf) and not used
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
    if at_zero:
        arrays = [jnp.zeros_like(a) if used else a for a, used in zip(arrays, mask, strict=True)]
    return jax.tree.unflatten(treedef, arrays), mask, held


def _is_state(node: object) -> bool:
    if isinstance(node, eqx.nn.State | eqx.nn.StateIndex):
        return True
    flax = {c.__name__ for c in type(node).__mro__ if c.__module__.startswith("flax.")}
    return "Variable" in flax and "Param" not in flax


def _collections(params: PyTree) -> frozenset[str]:
    if not isinstance(params, Mapping):
        return frozenset()
    return STATISTICS if "params" in params else frozenset({"batch_stats"})


def opened(what: str, given: Any, trainable: Trainable) -> tuple[ApplyFn, Trainable]:
    """`apply_fn` and its trainable leaves, from a function or from a network that holds both.

    A network of `linearize` or `adapters` is recognised by its attributes, because the modules of both
    come after this one.
    """
    network = getattr(given, "linearized", given)
    if not hasattr(network, "as_given"):
        _check_function(what, given)
        return given, trainable
    network = network.as_given()
    if network.scale is not None:
        raise ValueError(
            f"{what}: the model has a scale of its ridge, which this call does not support. Give "
            "the model without it; model.kernel(x1, x2) is the kernel with the scale."
        )
    if trainable is not None:
        return network.apply_fn, trainable
    rows = zip(jax.tree.leaves_with_path(network.params), network.trainable, strict=True)
    names = frozenset(leaf_name(path) for (path, _), used in rows if used)

    def own_choice(path: KeyPath | str, leaf: object = None) -> bool:
        """`trainable` in two forms: with keys and leaf as in `linearize`, and by name as in kernels."""
        return (path if isinstance(path, str) else leaf_name(path)) in names

    return network.apply_fn, own_choice


DOORS = {"torch.nn.": "from_torch", "flax.nnx.": "from_nnx"}
"""Where the class `Module` of a framework lives, and the adapter for it. Its models hold their parameters."""


def _check_function(what: str, given: Any) -> None:
    """Raise if a model of a framework came in place of a function of parameters."""
    for kind in type(given).__mro__:
        for home, door in DOORS.items():
            if kind.__name__ == "Module" and f"{kind.__module__}.".startswith(home):
                raise TypeError(
                    f"{what}: expected apply_fn(params, x), got the module {type(given).__name__}. Give "
                    f"dualfluence.adapters.{door}(model): a copy in evaluation mode, with its parameters."
                )


def split_params(
    params: PyTree, trainable: Trainable = None
) -> tuple[Split, list[AnyLeaf], list[AnyLeaf]]:
    """Split `params`; returns the split, the trainable leaves and the fixed arrays.

    Integer leaves and leaves that are not arrays are never trainable, `statistics` only if `trainable`
    selects them. Half-precision arrays are converted to float32. The kernel is that of the same values,
    without further rounding.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = tuple(leaf_name(path) for path, _ in flat)
    chosen = _choose(params, paths, trainable)
    roles = tuple(_role(leaf, wanted) for (_, leaf), wanted in zip(flat, chosen, strict=True))
    by_role: dict[str, list[Any]] = {"trainable": [], "fixed": [], "static": []}
    for (_, leaf), role in zip(flat, roles, strict=True):
        by_role[role].append(leaf if role == "static" else widen_half(leaf))
    if not by_role["trainable"]:
        raise ValueError(
            f"empirical kernel: no trainable parameters among {len(flat)} leaves "
            f"({', '.join(paths[:8]) or 'none'}). Expected at least one floating-point array "
            "that `trainable` selects; integer leaves and leaves that are not arrays cannot be "
            "selected."
        )
    for path, leaf, role in zip(paths, [leaf for _, leaf in flat], roles, strict=True):
        if role == "trainable" and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"empirical kernel: parameter {path} is {leaf.dtype}, expected real floating point."
                " Split it into real and imaginary parts."
            )
    split = Split(treedef, roles, tuple(by_role["static"]), paths)
    return split, by_role["trainable"], by_role["fixed"]


def widen_half(x: AnyLeaf) -> jax.Array | jax.ShapeDtypeStruct:
    """Half precision to float32, NumPy to JAX, everything else unchanged."""
    if isinstance(x, np.ndarray | np.generic):
        x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jnp.asarray(x, jnp.float32)
    return x


def leaf_name(path: KeyPath) -> str:
    """The path of keys to a leaf, such as `dense/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _role(leaf: object, wanted: bool) -> str:
    if not is_array(leaf):
        return "static"
    return "trainable" if wanted and is_floating(leaf) else "fixed"


def _choose(params: PyTree, paths: tuple[str, ...], trainable: Trainable) -> list[bool]:
    if trainable is None:
        return [not held for held in statistics(params)]
    # A pytree of bools may itself be callable (an Equinox module), a predicate is never a pytree.
    if callable(trainable) and jax.tree_util.all_leaves([trainable]):
        return [bool(trainable(path)) for path in paths]
    spread = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), trainable, params)
    flags = jax.tree.leaves(spread)
    wrong = [flag for flag in flags if not isinstance(flag, bool | np.bool_)]
    if wrong or len(flags) != len(paths):
        raise TypeError(
            "empirical kernel: `trainable` must be a function of a leaf's path or a pytree of"
            f" bools (or a prefix of one), got {wrong[0] if wrong else trainable!r}."
        )
    return [bool(flag) for flag in flags]


FREE = "free"
"""The word for a leaf that the ridge should not pull."""

FREE_SCALE = 1e7
"""The scale of a free leaf. The effect of the remaining ridge on the leaf is inversely proportional to
the scale, but the rounding of outputs grows with it. A scale ten times larger costs a digit of every
output, one ten times smaller costs a digit of the leaf. It needs float64, in which `fit` computes such
a model."""


class Shifted(eqx.Module):
    r"""$\theta = \theta_0 + P^{1/2}\phi$ as a pytree: parameters in units of their scale.

    - `base`: the parameters with `θ₀` in the trainable leaves.
    - `roots`: `√P` for each trainable leaf, a number or an array like the leaf; `None` is 1.
    - `move`: `φ`, the tree of the parameters with `None` for the other leaves.
    """

    base: PyTree
    roots: tuple[Array | None, ...]
    move: PyTree
    trainable: tuple[bool, ...] = eqx.field(static=True)

    def params(self) -> PyTree:
        """`θ`."""
        frozen = self._split(self.base)[1]
        moved = jax.tree.map(jnp.add, self._split(self.base)[0], self.spread(self.move))
        return eqx.combine(moved, frozen)

    def at(self, params: PyTree) -> "Shifted":
        """The same `θ₀` and scale, at `params`."""
        (theta, frozen), theta_0 = self._split(params), self._split(self.base)[0]
        change = jax.tree.map(jnp.subtract, theta, theta_0)
        move = _map(_over, change, self.roots)
        return Shifted(eqx.combine(theta_0, frozen), self.roots, move, self.trainable)

    def size(self) -> Array:
        """`‖P^{-1/2} θ‖`."""
        return tree_norm(_map(_over, self._split(self.params())[0], self.roots))

    def spread(self, move: PyTree) -> PyTree:
        """`P^{1/2}` of a move."""
        return _map(_times, move, self.roots)

    def _split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        return split_leaves(params, self.trainable)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on this scale for `stats.notes`."""
        rows = jax.tree.leaves_with_path(self.base)
        paths = [path for (path, _), used in zip(rows, self.trainable, strict=True) if used]
        each = [
            leaf_name(path)
            for path, root in zip(paths, self.roots, strict=True)
            if root is not None and root.ndim
        ]
        ends = [1.0 if r is None else float(f(r)) for r in self.roots for f in (jnp.min, jnp.max)]
        low, high = min(ends) ** 2, max(ends) ** 2
        notes = (f"scale of the ridge from {low:.3g} to {high:.3g}: distances are in its norm",)
        if each:
            notes += (f"a scale for every parameter, so a whole Jacobian in K: {', '.join(each)}",)
        return notes

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which leaves of this tree are trained: only the leaves of `move`."""
        base, roots = len(jax.tree.leaves(self.base)), len(jax.tree.leaves(self.roots))
        return (*[False] * (base + roots), *[True] * len(jax.tree.leaves(self.move)))


@dataclass(frozen=True)
class InScale:
    """`apply_fn` as a function of `Shifted` parameters."""

    fn: ApplyFn

    def __call__(self, params: Shifted, x: Inputs) -> PyTree:
        return self.fn(params.params(), x)


@dataclass(frozen=True)
class Reading:
    """`apply_fn` as a function of packed points, see `points`."""

    fn: ApplyFn
    form: Form

    def __call__(self, params: PyTree, x: Inputs) -> PyTree:
        return self.fn(params, self.form.unpack(x))


def shifted(
    params: PyTree, trainable: tuple[bool, ...], scale: tuple[Array | None, ...]
) -> Shifted:
    """The parameters as `θ₀`, with `scale` for each trainable leaf."""
    still = jax.tree.map(jnp.zeros_like, split_leaves(params, trainable)[0])
    return Shifted(params, _roots(scale), still, trainable)


def split_leaves(params: PyTree, trainable: tuple[bool, ...]) -> tuple[PyTree, PyTree]:
    """Trainable leaves and the rest, each with `None` for the leaves of the other."""
    return eqx.partition(params, jax.tree.unflatten(jax.tree.structure(params), trainable))


def weighted(step: PyTree, scale: tuple[Array | None, ...]) -> PyTree:
    """`P^{-1/2}` times a step. The norm of a step with respect to `P⁻¹` is the root of the sum of
    squares of this result."""
    return _map(_over, step, _roots(scale))


def _roots(scale: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
    return tuple(None if p is None else jnp.sqrt(p) for p in scale)


def _map(fn: Callable[..., Array], step: PyTree, roots: Sequence[Array | None]) -> PyTree:
    """`fn` of each leaf and its root."""
    leaves, treedef = jax.tree.flatten(step)
    return jax.tree.unflatten(treedef, [fn(a, r) for a, r in zip(leaves, roots, strict=True)])


def _times(leaf: Array, root: Array | None) -> Array:
    return leaf if root is None else root * leaf


def _over(leaf: Array, root: Array | None) -> Array:
    return leaf if root is None else leaf / root


Scales = Callable[[KeyPath, AnyLeaf], Numbers | None] | PyTree | None
"""Scales as a user gives them: a prefix of the tree of parameters, or a rule of `(path, leaf)`."""


def check_scale(
    scale: Scales, params: PyTree, trainable: tuple[bool, ...]
) -> tuple[Array | None, ...] | None:
    """One entry per trainable leaf from what the user gave; `None` if every scale is 1.

    `scale` is a prefix of `params` or a function of `(path, leaf)`.
    """
    if scale is None:
        return None
    rows = jax.tree.leaves_with_path(params)
    spread = _spread(scale, params, rows)
    found = tuple(
        _entry(f"linearize: scale of {leaf_name(path) or 'params'}", given, leaf)
        for (path, leaf), given, used in zip(rows, spread, trainable, strict=True)
        if used
    )
    return None if all(p is None for p in found) else found


def _spread(scale: Scales, params: PyTree, rows: Sequence[tuple[KeyPath, AnyLeaf]]) -> list[Any]:
    """The given scales, one for each leaf of `params`."""
    # As for `trainable`: a tree of scales may itself be callable, a rule is never a tree.
    if callable(scale) and jax.tree_util.all_leaves([scale]):
        return [scale(path, leaf) for path, leaf in rows]
    found: list[Any] = []

    def add(given: Numbers | None, part: PyTree) -> None:
        found.extend([given] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(add, scale, params, is_leaf=lambda v: v is None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "linearize: scale must be a prefix of the parameters' tree, "
            f"{jax.tree.structure(params)}: None, a positive number or 'free' for a leaf or a branch, "
            f"or an array like the leaf; or a function of (path, leaf). JAX says: {error}"
        ) from error
    return found


def _entry(name: str, given: Numbers | None, leaf: AnyLeaf) -> Array | None:
    """One leaf's scale in its dtype, checked."""
    if given is None or (isinstance(given, float | int) and given == 1):
        return None
    dtype = jnp.asarray(leaf).dtype
    if isinstance(given, str):
        return _free(name, given, dtype)
    value = np.asarray(as_array(name, given), np.float64)
    if value.shape not in ((), np.shape(leaf)):
        raise ValueError(
            f"{name} must be a number or an array of the leaf's shape {np.shape(leaf)}, got "
            f"{value.shape}."
        )
    limits = jnp.finfo(dtype)
    if not ((value >= float(limits.tiny)) & (value <= float(limits.max))).all():
        raise ValueError(
            f"{name} must be positive and finite in {dtype}, got {_worst(value)}. For a "
            "parameter that the ridge should not pull, use scale='free', a large finite scale. "
            "To hold a parameter fixed, exclude it with trainable."
        )
    return jnp.asarray(value, dtype)


def _free(name: str, given: str, dtype: DTypeLike) -> Array:
    if given != FREE or jnp.dtype(dtype).name not in ("float32", "float64"):
        raise ValueError(
            f"{name} must be a positive number, 'free' for parameters in float32 or float64, or None "
            f"for 1; got {given!r} for {dtype}."
        )
    return jnp.asarray(FREE_SCALE, dtype)


def _worst(value: np.ndarray) -> float:
    bad = value.reshape(-1)[~((value > 0) & np.isfinite(value)).reshape(-1)]
    return float(bad[0]) if bad.size else float(value.reshape(-1)[0])
