"""The paper's networks: NTK parameterisation, `W_std = 2`, `b_std = 0.1`; finite or infinitely wide."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jaxtyping import Array

from ...infinite import AvgPool, Conv, Dense, Flatten, Network, Relu, serial
from ...kernels._linearized import Linearized, linearize

W_STD, B_STD = 2.0, 0.1
"""Standard deviations of weights and biases in the paper's experiments."""

dense = partial(Dense, W_std=W_STD, b_std=B_STD)
conv = partial(Conv, (3, 3), padding="SAME", W_std=W_STD, b_std=B_STD)


@dataclass(frozen=True)
class Architecture:
    """One of the paper's networks.

    - `kind`: `"fcnn"`, fully connected, or `"cnn"`, blocks of convolution, ReLU and average pooling.
    - `depth`: hidden layers or blocks.
    - `width`: units or channels of each; `None` for an infinitely wide network.
    """

    kind: Literal["fcnn", "cnn"]
    depth: int
    width: int | None


def make_network(spec: Architecture) -> Network:
    """The network of `spec`."""
    if spec.kind == "fcnn":
        return fully_connected_network([spec.width] * spec.depth)
    hidden = [conv(width=spec.width), Relu(), AvgPool((2, 2), strides=(2, 2))]
    return serial(*hidden * spec.depth, Flatten(), dense())


def fully_connected_network(hidden: Sequence[int | None]) -> Network:
    """Dense layers of these widths with a ReLU after each, and a dense output layer."""
    layers: list[Any] = []
    for width in hidden:
        layers += [dense(width=width), Relu()]
    return serial(*layers, dense())


def fully_connected(widths: tuple[int, ...], seed: int) -> Linearized:
    """A fully connected network of these widths, inputs and outputs included, linearised at a draw."""
    net = fully_connected_network(widths[1:-1])
    params = net.init(jax.random.key(seed), (widths[0],), outputs=widths[-1])
    return linearize(net.apply, params)


def fully_connected_from_zero(widths: tuple[int, ...], seed: int) -> Linearized:
    """The same network minus its outputs at the draw, which would be noise for the learned function."""
    net = fully_connected_network(widths[1:-1])
    start = net.init(jax.random.key(seed), (widths[0],), outputs=widths[-1])

    def apply_fn(params: Any, x: Array) -> Array:
        return net.apply(params, x) - net.apply(start, x)

    return linearize(apply_fn, start)
