"""Read-outs from dual variables: parameters, predictions, changes."""

import abc
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.checks import OVERFLOW, check_finite
from .._support.compile import double, in_own_precision
from .._support.options import check_flag
from ..kernels._linearized import Linearized
from ..models._passes import outputs_at
from ..models._sources import AbstractSource
from ..operators._layout import Layout, whole
from ..problem._edits import TrainingSet
from ..problem._objective import State


class Reference(eqx.Module):
    """Parameters and dual variables of a network trained by the user; `θ = θ_ref + Jᵀ(α − α_ref)`.

    - `linearised`: outputs at `θ_ref` are those of the linearisation, not of the network.
    - `tangent`: `J` is taken at `θ₀` (`"initial"`) or at `θ_ref` (`"trained"`).
    - `gap`: `‖θ − θ₀ − Jᵀα‖`. It is the same at `θ_ref` and after every edit, which moves `θ` by `JᵀΔα`.
    - `certified`: whether the model is linear in its parameters, so that certificates hold.
    - `claimed`: whether `gap` and `certified` are a file's word, as the points they came from were purged.
    - `proven`: whether that is known for all parameters, and not only found at those tried.
    """

    params: PyTree
    alpha: Float[Array, "n c"]
    linearised: bool = eqx.field(static=True)
    tangent: str = eqx.field(static=True, default="initial")
    gap: float = eqx.field(static=True, default=0.0)
    certified: bool = eqx.field(static=True, default=False)
    claimed: bool = eqx.field(static=True, default=False)
    proven: bool = eqx.field(static=True, default=False)


@dataclass(frozen=True, eq=False)
class DualModel(abc.ABC):
    """A model as dual variables over training points. The common part of fits and updates. It is a
    plain record and not a pytree, because compiled functions never take it and building a pytree would
    slow down requests.
    """

    source: AbstractSource
    data: TrainingSet
    state: State
    reference: Reference | None

    @property
    def x(self) -> Any:
        """Training features in the form in which they were given, one row per point; rows of removed
        points stay."""
        return self.data.features

    @property
    def is_wide(self) -> bool:
        """Whether dual variables and outputs are in float64, even if the caller uses float32."""
        return self.state.alpha.dtype == np.float64

    def precision(self) -> AbstractContextManager[Any]:
        """A scope for computing with raw fields (`state`, `kernel_op`, …) in the precision of the model.

        It switches 64-bit types on for a model that keeps its dual variables in float64. You do not
        need it for `alpha`, `params()`, `predict` and similar calls.
        """
        return double(self.is_wide)

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Which rows of `state` are training points, and on which devices they are."""

    @property
    @in_own_precision
    def alpha(self) -> Float[Array, "n c"]:
        """Dual variables, one row per training point."""
        return self.layout.points(self.state.alpha)

    @property
    def network(self) -> Linearized:
        """The linearised network with its parameters `θ`, or an error for a kernel without any."""
        return self._network.as_given()

    @property
    def _network(self) -> Linearized:
        """The network as the kernel sees it, in the scale of the ridge."""
        if self.source.network is None:
            raise TypeError(
                "params: this model is a kernel without parameters (infinitely wide, or your own "
                "kernel). Read out predictions instead, or use linearize for a finite network."
            )
        return self.source.network

    def _reference_alpha(self) -> Float[Array, "n c"] | None:
        """`α_ref` of a network trained by the user, with zero rows for points added since."""
        if self.reference is None:
            return None
        return self._read_layout.grow(self.reference.alpha, self._read_layout.num_rows)

    @property
    def _read_layout(self) -> Layout:
        """Rows that read-outs go over: spare ones too, because their number seldom changes."""
        return self.layout if self.layout.sharding is None else whole(self.data.num_points)

    @cached_property
    def _x_rows(self) -> Array:
        return self._read_layout.place(self.data.x, "last")

    def _read_rows(self, values: Float[Array, "n c"]) -> Float[Array, "m c"]:
        return values if self.layout.sharding is None else self.layout.points(values)

    def _cross_mv(self, xq: Array, values: Float[Array, "n c"]) -> Float[Array, "q c"]:
        """`K(xq, x) v` for values by row of `state`."""
        return self.source.cross_mv(xq, self._x_rows, self._read_rows(values))

    @in_own_precision
    def params(self) -> PyTree:
        """`θ₀ + Jᵀα` (with a scale `θ₀ + PJᵀα`), a pytree like the one given to `linearize`."""
        base = self._network.params if self.reference is None else self.reference.params
        alpha = self._read_rows(self.state.alpha)
        return self.source.moved_params(base, self._x_rows, alpha, self._reference_alpha())

    def _entered_params(self) -> PyTree:
        """`params()` in the form that the network of the kernel takes."""
        return self._network.enter(self.params())

    @in_own_precision
    def predict(self, xq: Any, *, linearised: bool = True) -> Float[Array, "q c"]:
        """Outputs at query points.

        **Arguments:**

        - `xq`: queries, like the training features.
        - `linearised`: `False` evaluates the network itself at `params()` instead.
        """
        xq = self.data.queries(xq)
        outputs = self._outputs_at(xq, check_flag("predict: linearised", linearised))
        check_finite("predict", outputs, hint=OVERFLOW)
        return outputs

    def _outputs_at(self, xq: Array, linearised: bool) -> Float[Array, "q c"]:
        if not linearised:
            return outputs_at(self._network, self._entered_params(), xq, linearised=False)
        since, alpha = self._reference_alpha(), self._read_rows(self.state.alpha)
        alpha = alpha if since is None else alpha - since
        move = self.source.cross_mv(xq, self._x_rows, alpha)
        if self.reference is not None:
            ref = self.reference
            return move + outputs_at(self._network, ref.params, xq, ref.linearised)
        base = self.source.base_outputs(xq, move.shape[1])
        return move if base is None else move + base
