"""How the library's programs are compiled, and the precision in which they compute.

By default XLA's GPU compiler tries out Triton kernels for every matrix product. For float32 products at
full precision this costs seconds per program and gains nothing. On one H200 (jax 0.11, n = 2000, c =
10, 784-1024³-10) a first removal with its parameters took 20.2 s with that search and 1.8 s without,
the first kernel 28 s and 6.4 s; repeated calls took the same time.

Products are in full precision, where an accelerator's default is not enough. TF32 and bfloat16 have three
digits: conjugate gradients stall, and factors of a matrix that is positive definite do not exist.

If float32 is not accurate enough for a model, the model keeps its dual variables and outputs in
float64. Its methods run in a local scope that switches 64-bit types on, and return float32 if the
caller has them off.
"""

import importlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

HIGHEST = jax.lax.Precision.HIGHEST
"""For one product."""

PRECISION = "highest"
"""The same for `jax.default_matmul_precision`, which takes a name."""


P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class NotFinite(FloatingPointError, ValueError):
    """The result overflows. The message says where, and what to try."""


Options = dict[str, bool | int | str]


GPU_OPTIONS: Options = {"xla_gpu_enable_triton_gemm": False}

FLOAT64_OPTIONS = {"xla_disable_hlo_passes": "cudnn-fused-convolution-rewriter"}
"""Passes that are switched off with 64-bit types on. One moves the factor of a convolution (the
`W_std/√fan_in` of an NTK parameterisation) into cuDNN's call, which rounds it to float32. A float64
network and its kernel came out 2e-8 off. Without the pass the factor is a separate multiplication."""


UNTUNED_OPTIONS = {"xla_gpu_autotune_level": 0}
"""Option for no trial runs of matrix products. Trials use copies of the operands, so the first product
with a kernel of 40 GB held another 40 GB. The peak of a fit on one H200 was 2.01 kernels with trials
and 1.08 without."""

UNTUNED_BYTES = 2 * 2**30
"""A program whose arguments are larger than this is compiled without trial runs. With twice this value,
kernels of up to 4 GiB may be held twice while their first program compiles."""


def gpu_options() -> Options:
    """Compiler options on a GPU."""
    return GPU_OPTIONS | (FLOAT64_OPTIONS if jax.config.read("jax_enable_x64") else {})


ARRAYS = (jax.Array, np.ndarray, np.generic)


class Compiled(Generic[P, T]):
    """A function compiled on its first call, when the backend is known.

    JAX takes compiler options at the outermost `jit` only, so a call from inside another traced
    function is compiled without them.
    """

    def __init__(self, fn: Callable[P, T], transform: Callable[..., Any]) -> None:
        self._fn, self._transform = fn, transform
        self._made: dict[Hashable, Callable[P, T]] = {}
        self.__name__, self.__doc__ = getattr(fn, "__name__", "compiled"), fn.__doc__
        self.__wrapped__ = fn

    @cached_property
    def _inner(self) -> Callable[P, T]:
        return self._transform(self._fn)

    @property
    def outermost(self) -> Any:
        """The compiled function for calls from outside of other compiled functions."""
        return self._with(gpu_options()) if self._on_gpu else self._inner

    def _with(self, options: Options) -> Callable[P, T]:
        """The function under these options: those of float64 differ, and a process may use both."""
        key = tuple(sorted(options.items()))
        if key not in self._made:
            self._made[key] = self._transform(self._fn, compiler_options=options)
        return self._made[key]

    @cached_property
    def _on_gpu(self) -> bool:
        return jax.default_backend() == "gpu"

    @property
    def untuned(self) -> Callable[P, T]:
        """The same for arguments so large that trial runs on copies of them would not fit."""
        return self._with(gpu_options() | UNTUNED_OPTIONS)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        leaves = jax.tree.leaves((args, kwargs))
        inside = any(isinstance(leaf, Tracer) for leaf in leaves)
        return self._pick(leaves, inside)(*args, **kwargs)

    def _pick(self, leaves: list[object], inside: bool) -> Callable[P, T]:
        if inside:
            return self._inner
        if self._on_gpu and holds_much(leaves):
            return self.untuned
        return self.outermost


def holds_much(leaves: list[object]) -> bool:
    """Whether the arrays among the leaves take more than `UNTUNED_BYTES`."""
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, ARRAYS)) > UNTUNED_BYTES


class Filtered(Compiled[P, T]):
    """`equinox.filter_jit`, or plain `jax.jit` where every leaf is an array.

    Both then do the same, but separating arrays from other leaves costs 0.2 ms at each call, as much as
    a small request.
    """

    def __init__(self, fn: Callable[P, T]) -> None:
        super().__init__(fn, eqx.filter_jit)
        self._arrays_only = Compiled(fn, jax.jit)

    def _pick(self, leaves: list[object], inside: bool) -> Callable[P, T]:
        if all(isinstance(leaf, ARRAYS) for leaf in leaves):
            return self._arrays_only._pick(leaves, inside)
        return super()._pick(leaves, inside)


def filter_jit(fn: Callable[P, T]) -> Compiled[P, T]:
    """`equinox.filter_jit` with the library's compiler options."""
    return Filtered(fn)


def jit(fn: Callable[P, T], **options: Any) -> Compiled[P, T]:
    """`jax.jit` with the library's compiler options."""
    return Compiled(fn, partial(jax.jit, **options))


def has_float64() -> bool:
    """Whether 64-bit types are on here, switched on by the caller or by a `double` scope."""
    return jnp.dtype(jax.dtypes.canonicalize_dtype(float)) == jnp.float64


def double(wanted: bool = True) -> AbstractContextManager[object]:
    """A scope with 64-bit types, in this thread only. It does nothing if they are on or not wanted."""
    return nullcontext() if not wanted or has_float64() else _switched(True)


def _switched(on: bool) -> AbstractContextManager[object]:
    own: Any = getattr(jax, "enable_x64", None)
    if own is None:  # the name that it has in JAX 0.6 and 0.7
        own = importlib.import_module("jax.experimental").enable_x64
    return own(on)


def types_of_64_bits(on: bool) -> AbstractContextManager[object]:
    """A scope with 64-bit types, or without them."""
    return double() if on else _switched(False)


def widened(tree: PyTree) -> PyTree:
    """Floating-point arrays as float64; everything else as it is."""
    return jax.tree.map(_wider, tree)


def narrowed(tree: PyTree) -> PyTree:
    """Arrays in float64 become float32, a record with a rule of its own (`_in_float32`) follows that
    rule, and everything else stays as it is."""
    own = getattr(tree, "_in_float32", None)
    return own() if own is not None else jax.tree.map(_narrower, tree)


def in_own_precision(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """A method of an object with `is_wide`: computed in float64, returned in float32.

    Inside a scope with 64-bit types the method runs as it is, because callers that opened such a scope
    want all digits.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if has_float64() or not getattr(self, "is_wide", False):
            return method(self, *args, **kwargs)
        with double():
            return narrowed(method(self, *args, **kwargs))

    return call


def _wider(leaf: PyTree) -> PyTree:
    return leaf.astype(jnp.float64) if _is_float_array(leaf) else leaf


def _narrower(leaf: PyTree) -> PyTree:
    if not (isinstance(leaf, jax.Array) and leaf.dtype == jnp.float64):
        return leaf
    narrow = leaf.astype(jnp.float32)
    if bool((jnp.isfinite(leaf) & ~jnp.isfinite(narrow)).any()):
        raise NotFinite(
            "a result overflows float32, the dtype in which it is returned: "
            f"{float(jnp.max(jnp.abs(leaf))):.3g}. Scale features and targets, or call "
            "jax.config.update('jax_enable_x64', True) first."
        )
    return narrow


def _is_float_array(leaf: PyTree) -> bool:
    return hasattr(leaf, "astype") and jnp.issubdtype(leaf.dtype, jnp.floating)
