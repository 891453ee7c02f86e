"""Every compared method, by name: those of the kit and those of the paper."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ...fitted._fitted import Fitted
from ...problem._edits import Remove
from ..compare._methods import MAKERS, Method, TrainedCase, in_data_space, read_out
from ..compare._names import (
    COMPARED,
    FULL_HESSIAN,
    HELD,
    PAPER,
    PAPER_RELEASED,
    PARAMETER_RELEASED,
    SHARDED,
)
from ._forms import PaperCG
from ._full_data import FullDataHessian
from ._released import released_dual, released_parameter_space
from ._remove import remove

HELD_BYTES = 4 * 2**30
"""The largest Jacobian that is stored for read-outs; one twice as large would leave no room for `K` on
small GPUs."""

RELEASED_PRECISION = "default"
"""The authors' code leaves the precision of matrix products to JAX: TF32 on recent GPUs."""


def in_paper_form(trained: TrainedCase, mesh: Mesh | None = None) -> Method:
    """A removal by the paper's eq. 12 under conjugate gradients, parameters included."""
    settings = trained.settings
    form = PaperCG(settings.cg_steps, settings.cg_rtol, mesh)

    def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        return read_out(remove(trained.base, Remove(gone), form=form, on_failure="report"))

    return method


def with_full_hessian(trained: TrainedCase) -> Method:
    """A removal with the Hessian of all points, parameters included."""
    settings = trained.settings
    form = FullDataHessian(settings.cg_steps, settings.cg_rtol)

    def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        return read_out(remove(trained.base, Remove(gone), form=form, on_failure="report"))

    return method


ALL_MAKERS: dict[str, Callable[[TrainedCase], Method]] = MAKERS | {
    PAPER: in_paper_form,
    FULL_HESSIAN: with_full_hessian,
    SHARDED: lambda trained: in_paper_form(trained, device_mesh()),
}


def make_methods(trained: TrainedCase, names: Iterable[str] = COMPARED) -> dict[str, Method]:
    """The methods called `names` for a trained model."""
    return {name: ALL_MAKERS[name](trained) for name in names}


def make_held(base: Fitted) -> dict[str, Method]:
    """Our single step with `J` in memory, if it is not too large; `J` is made here, once."""
    rows = base.data.num_points * base.num_outputs
    size = rows * base.network.num_params * jnp.dtype(base.network.dtype).itemsize
    return {HELD: in_data_space(base.with_jacobian())} if size <= HELD_BYTES else {}


def make_released(trained: TrainedCase) -> dict[str, Method]:
    """The two published methods, run as their authors do, with matrix products at JAX's default."""
    base, params, _, settings = trained

    def wrap(solve: Callable[..., PyTree]) -> Method:
        def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
            with jax.default_matmul_precision(RELEASED_PRECISION):
                return solve(base, params, gone, settings.cg_steps, settings.cg_rtol), {}

        return method

    return {PARAMETER_RELEASED: wrap(released_parameter_space), PAPER_RELEASED: wrap(released_dual)}


def device_mesh() -> Mesh:
    """All devices in one row."""
    return Mesh(np.asarray(jax.devices()), ("rows",))
