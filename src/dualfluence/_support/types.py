"""Types that signatures share: parameters, inputs, and what users hand in.

A type checker sees what a call expects. Where users may hand in anything, the name stands for `object` at
run time: the checks of `checks` and `options` refuse what does not fit, and say what to try.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    KernelArray = Array
    """A kernel on the device, or in an array of NumPy where the call asks for that."""

    Numbers = ArrayLike
    """Numbers of a user: an array of JAX or NumPy, a table, a list, or one number."""

    AnyPath = str | os.PathLike[str]
    """The name of a file or folder."""
else:
    KernelArray = Array | np.ndarray
    Numbers = AnyPath = object

AnyArray = jax.Array | np.ndarray
"""An array on a device or on the host."""

AnyLeaf = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
"""An array, or the shape of one."""

Leaves = Sequence[AnyLeaf]
"""Arrays in the order of the tree that they come from: trainable parameters, or the fixed ones."""

Inputs = PyTree
"""Inputs of a network: an array with the points on axis 0, or a tree of such arrays. Users give lists too."""

ApplyFn = Callable[[PyTree, Inputs], Array]
"""`apply_fn(params, x) -> (n, c)`, batched over the points on axis 0 of `x`."""

Trainable = Callable[..., bool] | PyTree | None
"""Which leaves are trained: a rule of their paths, a tree of flags, or what the library chooses."""

Json = dict[str, Any]
"""An object of a JSON text: a header, a record, a line of a ledger. Only its reader knows the types."""
