"""How the library's programs are compiled.

By default XLA's GPU compiler tries out Triton kernels for every matrix product, which for float32
products at full precision costs seconds per program and wins nothing. On one H200 (jax 0.11, n = 2000,
c = 10, 784-1024³-10) a first removal with its parameters took 20.2 s with that search and 1.8 s
without, the first kernel 28 s and 6.4 s; repeated calls took the same time.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Generic, ParamSpec, TypeVar

import equinox as eqx
import jax
from jax.core import Tracer

P = ParamSpec("P")
T = TypeVar("T")

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class Compiled(Generic[P, T]):
    """A function compiled on its first call, when the backend is known.

    JAX takes compiler options at the outermost `jit` only, so a call from inside another traced
    function goes without.
    """

    def __init__(self, fn: Callable[P, T], transform: Callable[..., Any]) -> None:
        self._fn, self._transform = fn, transform
        self.__name__, self.__doc__ = getattr(fn, "__name__", "compiled"), fn.__doc__
        self.__wrapped__ = fn

    @cached_property
    def _inner(self) -> Callable[P, T]:
        return self._transform(self._fn)

    @cached_property
    def outermost(self) -> Any:
        """The compiled function that calls from outside go to."""
        if jax.default_backend() != "gpu":
            return self._inner
        return self._transform(self._fn, compiler_options=GPU_OPTIONS)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        target = self.outermost
        if target is not self._inner and _traced((args, kwargs)):
            target = self._inner
        return target(*args, **kwargs)


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def filter_jit(fn: Callable[P, T]) -> Compiled[P, T]:
    """`equinox.filter_jit` with the library's compiler options."""
    return Compiled(fn, eqx.filter_jit)


def jit(fn: Callable[P, T], **options: Any) -> Compiled[P, T]:
    """`jax.jit` with the library's compiler options."""
    return Compiled(fn, partial(jax.jit, **options))
