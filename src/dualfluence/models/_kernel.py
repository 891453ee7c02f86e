"""The interface of a model that is a kernel and not a network."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from jaxtyping import Array

from .._support.options import ProgressFn
from .._support.types import Inputs


class Kernel(Protocol):
    """A kernel of your own: `fit`, `low_rank` and `store.build` accept any object with this method.

    It must be symmetric, `k(x1, x2) = k(x2, x1)ᵀ`, and positive semidefinite, which `fit` checks.
    """

    def kernel(self, x1: Inputs, x2: Inputs, /) -> Array:
        """`K(x1, x2)` for two batches of points, `(n1, n2)` or `(n1, c, n2, c)`.

        `(n1, n2)` means that every output has this kernel and that outputs do not interact.
        """
        ...


class SymmetricKernel(Protocol):
    """A kernel that saves work if both batches are the same, and may report its progress.

    It is recognised by its signature: `x2` is `None` by default, and there is an option `progress`.
    """

    def kernel(
        self, x1: Inputs, x2: Inputs | None = None, /, *, progress: bool | ProgressFn = True
    ) -> Array:
        """`K(x1, x2)`, or `K(x1, x1)` for `x2 = None`; shapes as in `Kernel`."""
        ...


def is_symmetric(method: Callable[..., Any]) -> bool:
    """Whether a method has the signature of `SymmetricKernel`."""
    try:
        options = inspect.signature(method).parameters
    except (TypeError, ValueError):  # some builtins have none
        return False
    second = list(options.values())[1:2]
    return "progress" in options and bool(second) and second[0].default is None
