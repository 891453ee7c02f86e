"""The exact empirical NTK of any JAX function, in tiles."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array

from .._support.memory import tile_budget
from .._support.options import check_count
from .._support.points import count_points
from .._support.precision import HIGHEST, PRECISION
from .._support.progress import ProgressFn
from .._support.tiles import fill_kernel
from ._prepare import as_inputs, prepare_kernel
from ._recipe import Method
from ._report import KernelReport
from ._schedule import FeatureStore, choose_tiles


@dataclass(frozen=True)
class EmpiricalKernel:
    """`value`, the kernel, `(n1, c, n2, c)`, and `report`, the rule used for every parameter."""

    value: Any
    report: KernelReport


def empirical_kernel(
    apply_fn: Callable[..., Any],
    params: Any,
    x1: Any,
    x2: Any | None = None,
    *,
    trainable: Any = None,
    method: Method = "auto",
    tile_bytes: int | None = None,
    precision: Any = HIGHEST,
    flat: bool = False,
    out: Literal["device", "host"] = "device",
    progress: bool | ProgressFn = True,
) -> EmpiricalKernel:
    r"""The exact empirical NTK of `apply_fn` at `params`.

    $$K_{ia,jb} = \Big\langle \frac{\partial f_a(x_i)}{\partial\theta},
    \frac{\partial f_b(x_j)}{\partial\theta} \Big\rangle$$

    Works on any function that JAX differentiates. The backward pass is traced and cut one step before
    the gradient of each parameter. There the gradient is a product $A \otimes G$; then $\langle
    A_i\otimes G_{ia}, A_j\otimes G_{jb}\rangle = (A_i\cdot A_j)(G_{ia}\cdot G_{jb})$ takes two small
    products instead of a Jacobian. For parameters without such a product (inside a scan, used
    nonlinearly) the whole Jacobian is formed; `report` names them. Both are exact. Memory is
    `tile_bytes` plus the result. Half-precision parameters and inputs are converted to float32.
    `apply_fn` is traced once per input shape, and again if anything it closes over changes (closure
    variables, globals, attributes of `self`).

    **Arguments:**

    - `apply_fn`: `apply_fn(params, x) -> (n, c)`, each point's outputs independent of the others.
    - `params`: any pytree. Integer leaves and leaves that are not arrays are held fixed.
    - `x1`, `x2`: inputs, points on axis 0; `x2=None` is `x1` again, at about half the work.
    - `trainable`: the leaves to differentiate: a function of a leaf's path, such as
      `lambda path: path.startswith("head/")`, or a pytree (or prefix) of bools.
    - `method`: `"auto"` takes the cheaper form for each parameter; `"structured"` takes factors
      wherever there are any; `"jacobian"`, never.
    - `tile_bytes`: working memory; by default 256 MiB, on an accelerator up to an eighth of the kernel.
    - `precision`: of matrix products; `HIGHEST` is true float32 on every device.
    - `flat`: return `(n1·c, n2·c)`, rows point by point, without holding the kernel twice.
    - `out`: `"device"` or `"host"` (a NumPy array, for kernels larger than device memory).
    - `progress`: `True`, `False`, or a function called as `progress(done, total, label)`.

    **Returns:** `EmpiricalKernel` with `value`, shape `(n1, c, n2, c)`, and `report`.
    """
    options = {"trainable": trainable, "method": method, "precision": precision}
    run = {"tile_bytes": tile_bytes, "flat": flat, "out": out, "progress": progress}
    return _kernel(apply_fn, params, x1, x2, options, run, traced=False)


def traced_kernel(
    apply_fn: Callable[..., Any],
    params: Any,
    x1: Any,
    x2: Any | None = None,
    *,
    trainable: Any = None,
    method: Method = "auto",
    tile_bytes: int | None = None,
    precision: Any = HIGHEST,
    out: Literal["device", "host"] = "device",
    progress: bool | ProgressFn = True,
) -> Any:
    r"""The mean over outputs $\Sigma_{ij} = \frac1c \sum_a K_{ia,ja}$ of the empirical NTK.

    $\Sigma \otimes I_c$ is the nearest kernel of that form to $K$ (in the Frobenius norm), exact in the
    limit of infinite width. Compared with the whole kernel, the products cost a factor $c$ less and the
    result takes $c^2$ times less memory. Arguments as for `empirical_kernel`.

    **Returns:** the traced kernel, shape `(n1, n2)`.
    """
    options = {"trainable": trainable, "method": method, "precision": precision}
    run = {"tile_bytes": tile_bytes, "out": out, "progress": progress}
    return _kernel(apply_fn, params, x1, x2, options, run, traced=True).value


def kernel_block(
    apply_fn: Callable[..., Any],
    params: Any,
    x1: Any,
    x2: Any,
    *,
    trainable: Any = None,
    method: Method = "auto",
    precision: Any = HIGHEST,
) -> Array:
    """One block of the empirical NTK as a pure function, for use inside `jax.jit`.

    It computes the same as `empirical_kernel`, without tiles, progress or checks of values. Memory
    grows with the block, and non-finite derivatives are returned without an error. Differentiable in
    `params`. Inside `jax.shard_map` use `check_vma=False`: the traced operations carry no mesh-axis
    types.

    **Returns:** the block, shape `(n1, c, n2, c)`.
    """
    x1, x2 = as_inputs(x1, x2)
    prepared, leaves, rest = prepare_kernel(apply_fn, params, x1, trainable, method, precision)
    prepared.check_apart(leaves, rest, x1)
    f1 = prepared.features(leaves, rest, x1, count_points(x1))
    f2 = prepared.features(leaves, rest, x2, count_points(x2))
    return prepared.tile(f1, f2, traced=False)


def kernel_rows(
    apply_fn: Callable[..., Any],
    params: Any,
    x: Any,
    size: int,
    *,
    trainable: Any = None,
    method: Method = "auto",
    precision: Any = HIGHEST,
) -> Iterator[tuple[int, Array]]:
    """Blocks of `size` rows of the kernel of `x` with itself, `(size, c, n, c)`. Each comes after the
    number of its first row.

    A ReLU whose input is zero up to rounding may be on in a batch of one size and off in another. Here
    a point has the same derivatives in its row and in its column. Therefore the blocks together are
    symmetric and have no negative eigenvalue beyond rounding. The last block starts early instead of
    being short; with fewer points than `size` there is one block of all points.
    """
    x, _ = as_inputs(x, None)
    size = min(check_count("kernel_rows: size", size), count_points(x))
    # Not around a `yield`: it would hold for the caller too.
    highest = partial(jax.default_matmul_precision, PRECISION)
    with highest():
        prepared, leaves, rest = prepare_kernel(apply_fn, params, x, trainable, method, precision)
        prepared.check_apart(leaves, rest, x)
        n, c, dtype = count_points(x), prepared.recipe.num_outputs, prepared.recipe.dtype
        budget = tile_budget(size * n * c**2 * np.dtype(dtype).itemsize)
        tiles = choose_tiles(prepared, n, None, budget=budget, traced=False)
        store = FeatureStore(prepared, leaves, rest, x, x, tiles, traced=False)
    rows, columns = min(tiles.shape[0], size), tiles.shape[1]
    # Features that are made again for every tile are made in batches of one size.
    tile = (rows, columns if tiles.keep else rows)
    run = {"tail": (c,), "dtype": dtype, "tile": tile, "progress": False}
    for i in range(0, n, size):
        start = min(i, n - size)
        here = np.arange(start, start + size)
        with highest():
            block: Any = fill_kernel(store.block, here, store.index1, **run)
        yield start, block
    store.check_finite()


def kernel_report(
    apply_fn: Callable[..., Any],
    params: Any,
    x: Any,
    *,
    trainable: Any = None,
    method: Method = "auto",
) -> KernelReport:
    """How every parameter of `apply_fn` enters its kernel; `print` it.

    Only shapes are computed: `params` and `x` may be `jax.ShapeDtypeStruct`s.
    """
    x, _ = as_inputs(x, None)
    return prepare_kernel(apply_fn, params, x, trainable, method, HIGHEST)[0].report


def _kernel(
    apply_fn: Any, params: Any, x1: Any, x2: Any, options: Any, run: Any, *, traced: bool
) -> EmpiricalKernel:
    x1, x2 = as_inputs(x1, x2)
    prepared, leaves, rest = prepare_kernel(apply_fn, params, x1, **options)
    prepared.check_apart(leaves, rest, x1)
    sizes = (count_points(x1), None if x2 is None else count_points(x2))
    entries = sizes[0] * (sizes[1] or sizes[0]) * (1 if traced else prepared.recipe.num_outputs**2)
    budget = run["tile_bytes"] or tile_budget(entries * np.dtype(prepared.recipe.dtype).itemsize)
    tiles = choose_tiles(prepared, *sizes, budget=budget, traced=traced)
    store = FeatureStore(prepared, leaves, rest, x1, x2, tiles, traced=traced)
    value = fill_kernel(
        store.block,
        store.index1,
        store.index2,
        tail=() if traced else (prepared.recipe.num_outputs,),
        dtype=prepared.recipe.dtype,
        tile=tiles.shape,
        flat=run.get("flat", False),
        out=run["out"],
        progress=run["progress"],
    )
    store.check_finite()
    return EmpiricalKernel(value, prepared.report)
