r"""Storage of pixel-pair kernels and the sums over windows of it.

A pair kernel has axes `(H, A, W, B, n1, n2)`. Stored in full, `A = H` and `B = W` index the second
pixel $q$. Stored as a band, they index the displacement $q - p\in[-b, b]$, so that a network
that needs few displacements never touches the other pairs. Samples come last: every window sum
is then an addition of contiguous slices.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._spec import Band

Pads = tuple[tuple[int, int], tuple[int, int]]


def pads_and_sizes(
    shape: tuple[int, ...], window: tuple[int, int], strides: tuple[int, int], padding: str
) -> tuple[Pads, tuple[int, int]]:
    """Pixels added before and after each axis, and the size after the window."""
    pads, sizes = [], []
    for n, k, s in zip(shape, window, strides, strict=True):
        if padding == "VALID":
            pads.append((0, 0))
            sizes.append((n - k) // s + 1)
        else:
            out = -(-n // s)
            total = max((out - 1) * s + k - n, 0)
            pads.append((total // 2, total - total // 2))
            sizes.append(out)
    return (pads[0], pads[1]), (sizes[0], sizes[1])


def at_first(q: Array) -> Array:
    """Per-pixel values of the first sample, `(H, W, ...)`, placed on the pair axes."""
    return q[:, None, :, None]


def at_second(q: Array, band: Band) -> Array:
    """Per-pixel values of the second sample on the pair axes; 0 outside the image."""
    if band is None:
        return q[None, :, None, :]
    return _shifted(_shifted(q, 0, band[0]), 2, band[1])


def _shifted(q: Array, axis: int, b: int) -> Array:
    if b == 0:
        return jnp.expand_dims(q, axis + 1)
    n = q.shape[axis]
    width = [(0, 0)] * q.ndim
    width[axis] = (b, b)
    padded = jnp.pad(q, width)
    return jnp.stack(
        [lax.slice_in_dim(padded, i, i + n, axis=axis) for i in range(2 * b + 1)], axis=axis + 1
    )


def _inside(n: int, pad: tuple[int, int], b: int | None) -> np.ndarray:
    """Which (pixel, second pixel or displacement) lie in the image, on the padded axis."""
    p = np.arange(-pad[0], n + pad[1])
    first = (p >= 0) & (p < n)
    if b is None:
        return first[:, None] & first[None, :]
    q = p[:, None] + np.arange(-b, b + 1)[None, :]
    return first[:, None] & (q >= 0) & (q < n)


def inside(shape: tuple[int, ...], pads: Pads, band: Band) -> np.ndarray:
    """Mask over the padded pair axes `(H, A, W, B, 1, 1)`: both pixels are in the image."""
    bands = (None, None) if band is None else band
    rows, cols = (_inside(n, p, b) for n, p, b in zip(shape, pads, bands, strict=True))
    return rows[:, :, None, None, None, None] & cols[None, None, :, :, None, None]


def same_pixel(shape: tuple[int, ...], band: Band) -> np.ndarray:
    """Mask over the pair axes: both pixels are the same one."""
    if band is None:
        rows, cols = np.eye(shape[0], dtype=bool), np.eye(shape[1], dtype=bool)
    else:
        rows, cols = (
            np.tile(np.arange(-b, b + 1) == 0, (n, 1)) for n, b in zip(shape, band, strict=True)
        )
    return rows[:, :, None, None, None, None] & cols[None, None, :, :, None, None]


def take_diagonal(pairs: Array, band: Band) -> Array:
    """Values at equal pixels, `(H, W, n1, n2)`."""
    if band is not None:
        return pairs[:, band[0], :, band[1]]
    rows = jnp.moveaxis(jnp.diagonal(pairs, axis1=0, axis2=1), -1, 0)
    return jnp.moveaxis(jnp.diagonal(rows, axis1=1, axis2=2), -1, 1)


def crop(pairs: Array, have: Band, want: Band) -> Array:
    """Drop displacements that are no longer needed."""
    if have is None or want is None or have == want:
        return pairs
    lo = [h - w for h, w in zip(have, want, strict=True)]
    return pairs[:, lo[0] : lo[0] + 2 * want[0] + 1, :, lo[1] : lo[1] + 2 * want[1] + 1]


def pad_pixels(q: Array, pads: Pads, wrap: bool) -> Array:
    """Pad per-pixel values `(H, W, ...)`, with zeros or around the torus."""
    width = [*pads, *[(0, 0)] * (q.ndim - 2)]
    return jnp.pad(q, width, mode="wrap") if wrap else jnp.pad(q, width)


def pad_pairs(pairs: Array, pads: Pads, band: Band, wrap: bool) -> Array:
    """Pad the pixel axes of a pair kernel, with zeros or around the torus."""
    rows, cols = pads
    none = (0, 0)
    second = (rows, cols) if band is None else (none, none)
    width = [rows, second[0], cols, second[1], none, none]
    if all(w == none for w in width):
        return pairs
    return jnp.pad(pairs, width, mode="wrap") if wrap else jnp.pad(pairs, width)


def _slice(x: Array, axis: int, start: int, size: int, stride: int) -> Array:
    return lax.slice_in_dim(x, start, start + (size - 1) * stride + 1, stride, axis)


def sum_pixels(q: Array, window: tuple[int, int], strides: tuple[int, int]) -> Array:
    """Window sums of per-pixel values `(H, W, ...)`, already padded."""
    for axis, (k, s) in enumerate(zip(window, strides, strict=True)):
        size = (q.shape[axis] - k) // s + 1
        q = sum((_slice(q, axis, t, size, s) for t in range(1, k)), _slice(q, axis, 0, size, s))
    return q


def sum_matched(
    pairs: Array, window: tuple[int, int], strides: tuple[int, int], have: Band, want: Band
) -> Array:
    r"""$\sum_t A(ps+t, qs+t)$: both pixels move together (convolution); already padded."""
    for i, (k, s) in enumerate(zip(window, strides, strict=True)):
        axis = 2 * i
        size = (pairs.shape[axis] - k) // s + 1
        if have is None or want is None:
            shifted = [
                _slice(_slice(pairs, axis, t, size, s), axis + 1, t, size, s) for t in range(k)
            ]
        else:
            start, count = have[i] - want[i] * s, 2 * want[i] + 1
            kept = _slice(pairs, axis + 1, start, count, s)
            shifted = [_slice(kept, axis, t, size, s) for t in range(k)]
        pairs = sum(shifted[1:], shifted[0])
    return pairs


def sum_crossed(
    pairs: Array, window: tuple[int, int], strides: tuple[int, int], have: Band, want: Band
) -> Array:
    r"""$\sum_{a,b} A(ps+a, qs+b)$: the pixels move apart (pooling); already padded."""
    for i, (k, s) in enumerate(zip(window, strides, strict=True)):
        axis = 2 * i
        size = (pairs.shape[axis] - k) // s + 1
        if have is None or want is None:
            for a in (axis, axis + 1):
                shifted = [_slice(pairs, a, t, size, s) for t in range(k)]
                pairs = sum(shifted[1:], shifted[0])
            continue
        start, count = have[i] - want[i] * s, 2 * want[i] + 1
        shifted = [
            _slice(_slice(pairs, axis, a, size, s), axis + 1, start + b - a, count, s)
            for a in range(k)
            for b in range(k)
        ]
        pairs = sum(shifted[1:], shifted[0])
    return pairs
