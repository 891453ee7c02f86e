"""Layers with weights: Dense and Conv."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from ._gap import add_joints, joint_from_minus
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import ImagePairs, Pairs, VectorPairs, pixel_distances, settle
from ._windows import (
    at_first,
    at_second,
    inside,
    pad_pairs,
    pad_pixels,
    pads_and_sizes,
    sum_matched,
    sum_pixels,
)

Parameterization = Literal["ntk", "standard"]
Padding = Literal["SAME", "VALID", "CIRCULAR"]


def _new_ntk(
    layer: "Dense | Conv", cov_in: Array, cov_out: Array, ntk: Array | None, fan_in: int
) -> Array:
    r"""$\Theta' = K' + W^2\Theta$; standard: $(d/s_0)K + W^2\Theta + 1$."""
    if layer.parameterization == "ntk":
        own = cov_out
    else:
        own = (fan_in / layer.s[0]) * cov_in + (0.0 if layer.b_std is None else 1.0)
    return own if ntk is None else own + layer.W_std**2 * ntk


def _fan_in(layer: "Dense | Conv", spec: Spec) -> int:
    if layer.parameterization == "ntk":
        return 0
    if spec.channels == 0:
        raise ValueError(
            f"{layer}: the standard parameterization needs the finite width of the layer below. "
            "Give `width=` to every Dense and Conv, or use parameterization='ntk'."
        )
    return spec.channels


def _check_weights(layer: "Dense | Conv") -> None:
    name = type(layer).__name__
    if layer.parameterization not in ("ntk", "standard"):
        raise ValueError(
            f"{name}: parameterization must be 'ntk' or 'standard', got {layer.parameterization!r}."
        )
    if layer.W_std < 0 or (layer.b_std is not None and layer.b_std < 0):
        raise ValueError(
            f"{name}: W_std and b_std are standard deviations and cannot be negative, "
            f"got {layer.W_std} and {layer.b_std}."
        )


def _init_weights(
    layer: "Dense | Conv", key: Array, shape: tuple[int, ...], bias: tuple[int, ...]
) -> dict[str, Array]:
    key_w, key_b = jax.random.split(key)
    W = jax.random.normal(key_w, shape)
    b = jax.random.normal(key_b, bias)
    if layer.parameterization == "standard":
        W = W * (layer.W_std * math.sqrt(layer.s[0] / math.prod(shape[:-1])))
        b = b * (layer.b_std or 0.0)
    return {"W": W} if layer.b_std is None else {"W": W, "b": b}


def _scales(layer: "Dense | Conv", fan_in: int) -> tuple[float, float]:
    if layer.parameterization == "standard":
        return 1 / math.sqrt(layer.s[0]), 1.0
    return layer.W_std / math.sqrt(fan_in), layer.b_std or 0.0


def _out_width(layer: "Dense | Conv", width: int) -> int:
    return (width if layer.width is None else layer.width) * layer.s[1]


def _per_channel(b: Array, y: Array) -> Array:
    """Biases in the rank of outputs, which JAX may be told to ask for."""
    return b.reshape((1,) * (y.ndim - 1) + b.shape)


@dataclass(frozen=True, kw_only=True)
class Dense(AbstractLayer):
    r"""A fully connected layer on the channels; on images, the same at every pixel.

    $K' = W^2 K + b^2$, $\Theta' = K' + W^2\Theta$.

    **Arguments:**

    - `W_std`, `b_std`: standard deviations of weights and biases; `b_std=None`: no bias.
    - `width`: number of outputs of the finite layer. It matters to the kernel only in the
      standard parameterization, where gradients grow with the width.
    - `parameterization`: `"ntk"` or `"standard"`.
    - `s`: width scalings of input and output in the standard parameterization.
    """

    W_std: float = 1.0
    b_std: float | None = None
    width: int | None = None
    parameterization: Parameterization = "ntk"
    s: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        _check_weights(self)

    def out_spec(self, spec: Spec) -> Spec:
        _fan_in(self, spec)
        return Spec(spec.shape, _out_width(self, 0), gaussian=True, fresh=True)

    def record(self, state: VectorPairs | ImagePairs, band: Band) -> tuple[Array, ...]:
        q = state.q1 if isinstance(state, ImagePairs) else state.joint.q1
        return (self.W_std**2 * q + (self.b_std or 0.0) ** 2,)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        fan_in, spec = _fan_in(self, state.spec), self.out_spec(state.spec)
        if isinstance(state, ImagePairs):
            new = replace(
                state,
                q1=rec1[0],
                q2=rec2[0],
                distance=self.W_std**2 * state.distance,
                spec=spec,
                pixels=None,
            )
            return replace(new, ntk=_new_ntk(self, state.cov, new.cov, state.ntk, fan_in))
        old, w2 = state.joint, self.W_std**2
        scaled = joint_from_minus(w2 * old.q1, w2 * old.q2, w2 * old.minus)
        scaled = scaled._replace(cov=w2 * old.cov, gap=w2 * old.gap)
        b2 = jnp.full_like(old.q1, (self.b_std or 0.0) ** 2)
        bias = joint_from_minus(b2, b2, jnp.zeros_like(b2))
        joint = add_joints(scaled, bias, rec1[0], rec2[0])
        ntk = _new_ntk(self, old.cov, joint.cov, state.ntk, fan_in)
        return VectorPairs(joint, ntk, spec, state.is_self)

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        out = _out_width(self, width)
        params = _init_weights(self, key, (spec.channels, out), (out,))
        return params, replace(self.out_spec(spec), channels=out)

    def apply(self, params: PyTree, x: Array) -> Array:
        w, b = _scales(self, x.shape[-1])
        y = w * (x @ params["W"])
        return y + _per_channel(b * params["b"], y) if "b" in params else y


@dataclass(frozen=True)
class Conv(AbstractLayer):
    r"""A convolution over height and width (NHWC).

    With the mean over the taps $t$ of the filter,
    $K'(p,q) = W^2\,\mathrm{mean}_t K(ps+t, qs+t) + b^2$; padding counts as zeros in the mean.

    **Arguments:** as of `Dense`, and

    - `filter_shape`, `strides`: per axis.
    - `padding`: `"SAME"` and `"VALID"` as in XLA, `"CIRCULAR"` pads as much as
      `"SAME"`, with the pixels of the other side.
    """

    filter_shape: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "SAME"
    W_std: float = 1.0
    b_std: float | None = None
    width: int | None = None
    parameterization: Parameterization = "ntk"
    s: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        _check_weights(self)
        check_window(self, self.filter_shape, self.strides, self.padding)

    def out_spec(self, spec: Spec) -> Spec:
        check_window_fits(self, spec, self.filter_shape, self.padding)
        _fan_in(self, spec)
        _, sizes = pads_and_sizes(spec.shape, self.filter_shape, self.strides, self.padding)
        return Spec(sizes, _out_width(self, 0), gaussian=True, fresh=True)

    def need(self, band: Band, spec: Spec) -> Band:
        return need_window(band, spec, self.strides, (0, 0), self.padding)

    def _mean_pixels(self, q: Array) -> Array:
        shape = (q.shape[0], q.shape[1])
        pads, _ = pads_and_sizes(shape, self.filter_shape, self.strides, self.padding)
        q = pad_pixels(q, pads, self.padding == "CIRCULAR")
        return sum_pixels(q, self.filter_shape, self.strides) / math.prod(self.filter_shape)

    def record(self, state: ImagePairs, band: Band) -> tuple[Array, ...]:
        return (self.W_std**2 * self._mean_pixels(state.q1) + (self.b_std or 0.0) ** 2,)

    def pairs(self, state: ImagePairs, rec1: Records, rec2: Records, band: Band) -> ImagePairs:
        fan_in = _fan_in(self, state.spec) * math.prod(self.filter_shape)
        distance, ntk = padded(state, self.filter_shape, self.strides, self.padding)
        taps = math.prod(self.filter_shape)
        args = (self.filter_shape, self.strides, state.band, band)
        distance = sum_matched(distance, *args) / taps
        ntk = None if ntk is None else sum_matched(ntk, *args) / taps
        spec = self.out_spec(state.spec)
        new = ImagePairs(rec1[0], rec2[0], self.W_std**2 * distance, ntk, band, spec, state.is_self)
        first = at_first(self._mean_pixels(state.q1))
        second = at_second(self._mean_pixels(state.q2), band)
        cov_in = (first + second - distance) / 2
        if ntk is None and self.parameterization == "ntk":
            new = settle(new)  # the NTK is the covariance, which is cheaper read than stored
            return replace(new, ntk=new.cov)
        return settle(replace(new, ntk=_new_ntk(self, cov_in, new.cov, ntk, fan_in)))

    def init(self, key: Array, spec: Spec, width: int) -> tuple[PyTree, Spec]:
        out = _out_width(self, width)
        params = _init_weights(self, key, (*self.filter_shape, spec.channels, out), (out,))
        return params, replace(self.out_spec(spec), channels=out)

    def apply(self, params: PyTree, x: Array) -> Array:
        w, b = _scales(self, math.prod(self.filter_shape) * x.shape[-1])
        shape = (x.shape[1], x.shape[2])
        pads, _ = pads_and_sizes(shape, self.filter_shape, self.strides, self.padding)
        if self.padding == "CIRCULAR":
            x, pads = jnp.pad(x, ((0, 0), *pads, (0, 0)), mode="wrap"), ((0, 0), (0, 0))
        y = w * lax.conv_general_dilated(
            x, params["W"], self.strides, pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + _per_channel(b * params["b"], y) if "b" in params else y


def padded(
    state: ImagePairs, window: tuple[int, int], strides: tuple[int, int], padding: str
) -> tuple[Array, Array | None]:
    """Distances and NTK on the padded image: a padded pixel is the constant 0."""
    pads, _ = pads_and_sizes(state.spec.shape, window, strides, padding)
    wrap = padding == "CIRCULAR"
    if state.pixels is not None and not wrap:
        first, second = (jax.vmap(lambda x: pad_pixels(x, pads, False))(x) for x in state.pixels)
        return pixel_distances(first, second, state.band), None
    distance = pad_pairs(state.distance, pads, state.band, wrap)
    ntk = None if state.ntk is None else pad_pairs(state.ntk, pads, state.band, wrap)
    if wrap:
        return distance, ntk
    mask = inside(state.spec.shape, pads, state.band)
    if mask.all():
        return distance, ntk
    first = at_first(pad_pixels(state.q1, pads, wrap))
    second = at_second(pad_pixels(state.q2, pads, wrap), state.band)
    distance = jnp.where(mask, distance, first + second)
    return distance, None if ntk is None else jnp.where(mask, ntk, 0)


def need_window(
    band: Band, spec: Spec, strides: tuple[int, int], reach: tuple[int, int], padding: str
) -> Band:
    """The pixel displacements needed before a window with `strides`, if the two pixels of a pair can
    differ by up to `reach`."""
    if band is None:
        return None
    need = (band[0] * strides[0] + reach[0], band[1] * strides[1] + reach[1])
    # Around the torus a displacement is not a difference of positions: keep all pairs.
    return None if padding == "CIRCULAR" and need != (0, 0) else need


def check_window(
    layer: AbstractLayer, window: tuple[int, ...], strides: tuple[int, ...], padding: str
) -> None:
    """Raise unless the window is made of two positive integers and the padding is known."""
    name = type(layer).__name__
    if padding not in ("SAME", "VALID", "CIRCULAR"):
        raise ValueError(f"{name}: padding must be 'SAME', 'VALID' or 'CIRCULAR', got {padding!r}.")
    for what, value in (("window", window), ("strides", strides)):
        if len(value) != 2 or min(value) < 1:
            raise ValueError(f"{name}: {what} must be two positive integers, got {value}.")


def check_window_fits(
    layer: AbstractLayer, spec: Spec, window: tuple[int, int], padding: str
) -> None:
    """Raise unless the window can be laid on the image."""
    name = type(layer).__name__
    if not spec.is_image:
        raise ValueError(
            f"{name}: expected images (n, height, width, channels), got vectors. "
            "Put it before Flatten or GlobalAvgPool, or reshape the inputs."
        )
    too_large = any(k > n for k, n in zip(window, spec.shape, strict=True))
    if too_large and (padding == "VALID" or padding == "CIRCULAR"):
        raise ValueError(
            f"{name}: the window {window} is larger than the image {spec.shape} with "
            f"padding={padding!r}. Use a smaller window, padding='SAME', or fewer layers that "
            "shrink the image."
        )
