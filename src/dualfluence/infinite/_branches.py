"""Layers one after another, and branches side by side that are summed."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, PyTree

from ._gap import add_joints
from ._norm import Identity
from ._spec import AbstractLayer, Band, Records, Spec, split_keys
from ._states import ImagePairs, Pairs, VectorPairs
from ._windows import crop


@dataclass(frozen=True)
class Serial(AbstractLayer):
    """Layers one after another."""

    layers: tuple[AbstractLayer, ...]

    def specs(self, spec: Spec) -> list[Spec]:
        """Shapes before the first layer and after every layer."""
        specs = [spec]
        for layer in self.layers:
            specs.append(layer.out_spec(specs[-1]))
        return specs

    def bands(self, band: Band, spec: Spec) -> list[Band]:
        """Displacements needed before the first layer and after every layer."""
        bands = [band]
        for layer, before in zip(self.layers[::-1], self.specs(spec)[-2::-1], strict=True):
            bands.append(layer.need(bands[-1], before))
        return bands[::-1]

    def out_spec(self, spec: Spec) -> Spec:
        return self.specs(spec)[-1]

    def need(self, band: Band, spec: Spec) -> Band:
        return self.bands(band, spec)[0]

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        return self.self_pass(state, band)[1]

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        return self.cross_pass(state, rec1, rec2, band)

    def _plan(self, state: Pairs, band: Band) -> list[Band]:
        if isinstance(state, ImagePairs) and state.band is None:
            return [None] * len(self.layers)
        return self.bands(band, state.spec)[1:]

    def self_pass(self, state: Pairs, band: Band) -> tuple[Pairs, Records]:
        records = []
        for layer, after in zip(self.layers, self._plan(state, band), strict=True):
            state, rec = layer.self_pass(state, after)
            records.append(rec)
        return state, tuple(records)

    def cross_pass(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        plan = self._plan(state, band)
        for layer, r1, r2, after in zip(self.layers, rec1, rec2, plan, strict=True):
            state = layer.cross_pass(state, r1, r2, after)
        return state

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        params = []
        for layer, k in zip(self.layers, split_keys(key, len(self.layers)), strict=True):
            own, spec = layer.init(k, spec, width)
            params.append(own)
        return tuple(params), spec

    def apply(self, params: PyTree, x: Array) -> Array:
        for layer, own in zip(self.layers, params, strict=True):
            x = layer.apply(own, x)
        return x

    def __repr__(self) -> str:
        return f"serial({', '.join(map(repr, self.layers))})"


@dataclass(frozen=True)
class Sum(AbstractLayer):
    r"""Branches with the same input, summed: kernels add, $K' = \sum_i K_i$.

    Exact when the branches are independent given the input, that is when all but one end in layers with
    weights. Anything else raises an error.
    """

    branches: tuple[Serial, ...]

    def _start(self, spec: Spec) -> Spec:
        return replace(spec, fresh=False)

    def out_spec(self, spec: Spec) -> Spec:
        ends = [b.out_spec(self._start(spec)) for b in self.branches]
        if len({e.shape for e in ends}) > 1:
            raise ValueError(
                f"Sum: branches must end with the same shape, got {[e.shape for e in ends]}. "
                "Check strides and padding, or put a 1x1 Conv with the stride on the skip."
            )
        if sum(not e.fresh for e in ends) > 1:
            raise ValueError(
                "Sum: at most one branch may end without weights (Dense, Conv): otherwise the "
                "branches are correlated and their kernels do not add."
            )
        channels = {e.channels for e in ends} - {0}
        if len(channels) > 1:
            raise ValueError(f"Sum: branches end with different widths, {sorted(channels)}.")
        return Spec(
            ends[0].shape,
            channels.pop() if channels else 0,
            gaussian=all(e.gaussian for e in ends),
            fresh=all(e.fresh for e in ends),
        )

    def need(self, band: Band, spec: Spec) -> Band:
        needs = [b.need(band, self._start(spec)) for b in self.branches]
        bands = [n for n in needs if n is not None]
        if len(bands) < len(needs):
            return None
        return (max(b[0] for b in bands), max(b[1] for b in bands))

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        return self.self_pass(state, band)[1]

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        return self.cross_pass(state, rec1, rec2, band)

    def self_pass(self, state: Pairs, band: Band) -> tuple[Pairs, Records]:
        start = replace(state, spec=self._start(state.spec))
        ends = [b.self_pass(_cropped(start, b, band), band) for b in self.branches]
        return self._total([e[0] for e in ends], state, band), tuple(e[1] for e in ends)

    def cross_pass(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        start = replace(state, spec=self._start(state.spec))
        ends = [
            b.cross_pass(_cropped(start, b, band), r1, r2, band)
            for b, r1, r2 in zip(self.branches, rec1, rec2, strict=True)
        ]
        return self._total(ends, state, band)

    def _total(self, ends: list[Pairs], state: Pairs, band: Band) -> Pairs:
        total, spec = ends[0], self.out_spec(state.spec)
        for end in ends[1:]:
            total = _add(total, end)
        return replace(total, spec=spec)

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        keys = split_keys(key, len(self.branches))
        ends = [b.init(k, spec, width) for b, k in zip(self.branches, keys, strict=True)]
        return tuple(e[0] for e in ends), ends[0][1]

    def apply(self, params: PyTree, x: Array) -> Array:
        ends = [b.apply(own, x) for b, own in zip(self.branches, params, strict=True)]
        return sum(ends[1:], ends[0])

    def __repr__(self) -> str:
        return f"add({', '.join(map(repr, self.branches))})"

    @property
    def note(self) -> str:
        return "closed form (independent branches)"


def _cropped(state: Pairs, branch: Serial, band: Band) -> Pairs:
    if not isinstance(state, ImagePairs) or state.band is None:
        return state
    want = branch.need(band, state.spec)
    ntk = None if state.ntk is None else crop(state.ntk, state.band, want)
    return replace(state, distance=crop(state.distance, state.band, want), ntk=ntk, band=want)


def _add(left: Pairs, right: Any) -> Pairs:
    if left.ntk is None or right.ntk is None:
        ntk = right.ntk if left.ntk is None else left.ntk
    else:
        ntk = left.ntk + right.ntk
    if isinstance(left, ImagePairs):
        q1, q2 = left.q1 + right.q1, left.q2 + right.q2
        return replace(
            left, q1=q1, q2=q2, distance=left.distance + right.distance, ntk=ntk, pixels=None
        )
    a, b = left.joint, right.joint
    joint = add_joints(a, b, a.q1 + b.q1, a.q2 + b.q2)
    return VectorPairs(joint, ntk, left.spec, left.is_self)


def _serial(branch: AbstractLayer) -> Serial:
    return Serial(branch.layers) if isinstance(branch, Serial) else Serial((branch,))


def add(*branches: AbstractLayer) -> Sum:
    """Branches with the same input, summed."""
    if not branches:
        raise ValueError("add: expected at least one branch, got none.")
    return Sum(tuple(_serial(b) for b in branches))


def residual(branch: AbstractLayer, skip: AbstractLayer | None = None) -> Sum:
    """`branch(x) + skip(x)`; by default the skip is the identity."""
    return add(branch, Identity() if skip is None else skip)
