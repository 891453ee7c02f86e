"""The interface of every layer, and the static description of shapes."""

import abc
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, PyTree

Band = tuple[int, int] | None
"""Largest pixel displacement per axis that is needed; `None`: all pairs of pixels."""


@dataclass(frozen=True)
class Spec:
    """Facts about the activations between two layers.

    - `shape`: `(H, W)` for images, `()` for vectors.
    - `channels`: finite number of channels, 0 if the description does not give it.
    - `gaussian`: whether each channel is Gaussian in the limit (so that an activation may follow).
    - `fresh`: whether new weights made it independent of the other branches of a sum.
    """

    shape: tuple[int, ...]
    channels: int
    gaussian: bool = False
    fresh: bool = False

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 2


Records = PyTree
"""What the pass of points with themselves keeps for pairs: arrays of a layer, or records of its layers."""


AnyPairs = Any
"""`VectorPairs` or `ImagePairs`, of the next module, which are made of this module's types."""


class AbstractLayer(abc.ABC):
    """A layer: its kernel transform in the infinite limit and its finite version.

    The per-point pass (`self_pass`) computes the kernel of each sample with itself and records the
    values that pairs need: the variances of its output and, for some layers, more. The pair pass
    (`cross_pass`) uses the records of both samples. Both run the same transform, `pairs`.
    """

    @abc.abstractmethod
    def out_spec(self, spec: Spec) -> Spec:
        """Shapes after the layer; raises `ValueError` if the layer does not fit."""

    def need(self, band: Band, spec: Spec) -> Band:
        """Pixel displacements needed before the layer (`spec`) for `band` after it."""
        return band

    @abc.abstractmethod
    def record(self, state: AnyPairs, band: Band) -> tuple[Array, ...]:
        """Per-point facts after the layer from the self kernel before it; variances first."""

    @abc.abstractmethod
    def pairs(self, state: AnyPairs, rec1: Records, rec2: Records, band: Band) -> AnyPairs:
        """The pair kernel after the layer."""

    def self_pass(self, state: AnyPairs, band: Band) -> tuple[AnyPairs, Records]:
        rec = self.record(state, band)
        return self.pairs(state, rec, rec, band), rec

    def cross_pass(self, state: AnyPairs, rec1: Records, rec2: Records, band: Band) -> AnyPairs:
        return self.pairs(state, rec1, rec2, band)

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        """Parameters of the finite layer and the shapes after it."""
        return (), self.out_spec(spec)

    @abc.abstractmethod
    def apply(self, params: PyTree, x: Array) -> Array:
        """The finite layer on a batch `(n, ..., channels)`."""

    @property
    def note(self) -> str:
        """How the kernel is computed, for `describe`."""
        return "closed form"


def split_keys(key: Array, num: int) -> list[Array]:
    return list(jax.random.split(key, num)) if num else []
