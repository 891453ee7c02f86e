r"""Leave points out one after another, each by a small solve with the anchor's inverse.

With the sums of weights as they were at the anchor, removing a point of share `m` drops its term and lowers
the ridge by $\lambda m$. A step is what a force `x` on the dual variables does (see the page on theory):

$$K\Delta\alpha = Nx,\qquad \Delta\alpha = \tfrac1\lambda\left(x - W_0K\Delta\alpha\right).$$

The force is $\lambda m\alpha$ at the points that are left. At the set `S` of eliminated points it is
whatever makes $\Delta\alpha_i = -\alpha_i$ at the new point and zero at the others. Eliminating point
`i` changes the inverse by rank `c`:

$$N \leftarrow N + YCY^\top,\quad Y = N_{\cdot i},\quad
  C = (I - W_iN_{ii})^{-1}W_i = R_i(I - R_i^\top N_{ii}R_i)^{-1}R_i^\top .$$

No column of a changed inverse is ever formed, because these columns are combinations `T` of columns of
the anchor's inverse. Only `T`, `C` and the anchor's rows are held: the changed inverse is
$N + N_{\cdot S}T^\top CTN_{S\cdot}$, with one block of `C` for each point and `T` triangular. A step
then reads the eliminated rows of the anchor's `N` once, with one vector.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.types import AnyArray
from ._anchor import Anchor
from ._anchor_mesh import Places


class Eliminated(NamedTuple):
    """The eliminated points in the form that a step needs: fields of `Gone`, with or without the spare
    space after them."""

    rows: Float[AnyArray, "kc nc"]
    T: Float[AnyArray, "kc kc"]
    C: Float[AnyArray, "k c c"]
    forces: Float[AnyArray, " kc"]
    points: Int[AnyArray, " k"]


@dataclass(eq=False)
class Room:
    """Arrays shared by all proposals. A proposal writes after the points of the state it starts from.

    - `rows`: the anchor's `N` at the eliminated points, `(capacity·c, n·c)`.
    - `T`: `(capacity·c, capacity·c)`, as in this file's head.
    - `marks`: a unique mark for each point in `rows`. From it a proposal can tell that its rows were
      overwritten by another.
    """

    rows: Float[AnyArray, "kc nc"]
    T: Float[AnyArray, "kc kc"]
    marks: list[object]

    def wrote(self, place: int) -> object:
        """Returns the mark of the entry just written at `place`. Entries after it are no longer
        valid."""
        self.marks[place:] = [object()]
        return self.marks[-1]


@dataclass(frozen=True, eq=False)
class Gone:
    """Points eliminated since the anchor, in order, in arrays with room for more.

    Beyond index `count`, the arrays of `room` may hold anything, and `C` is zero there. On a CPU all
    arrays are NumPy arrays, and `C` and `points` are written in place too.

    - `room`: the `Room` that holds the rows of `N` for these points.
    - `C`: `(capacity, c, c)`.
    - `forces`: at the eliminated points, the force per unit of `λm` that keeps their dual variables as
      they are, minus the anchor's `α`. At the points that are left, the force per unit is the anchor's
      `α`.
    - `points`: positions of the eliminated points.
    - `shares`: the anchor's weights, which sum to one, of the points that are left. `None` on a CPU,
      where each request passes them.
    - `place`: the number `count` as an array on the device, for compiled programs; `None` on a CPU.
    - `count`: number of eliminated points.
    - `mark`: the mark of the last eliminated point.
    """

    room: Room
    C: Float[AnyArray, "k c c"]
    forces: Float[AnyArray, " kc"]
    points: Int[AnyArray, " k"]
    shares: Float[AnyArray, " n"] | None
    place: Int[AnyArray, ""] | None
    count: int
    mark: object = None

    @property
    def rows(self) -> Float[AnyArray, "kc nc"]:
        return self.room.rows

    @property
    def T(self) -> Float[AnyArray, "kc kc"]:
        return self.room.T

    @property
    def stands(self) -> bool:
        """Whether no other proposal has written over these points."""
        marks = self.room.marks[: self.count]
        return not self.count or (len(marks) == self.count and marks[-1] is self.mark)

    @property
    def eliminated(self) -> Eliminated:
        """The points with the spare space after them, as programs on a device take them."""
        return Eliminated(self.rows, self.T, self.C, self.forces, self.points)

    def first(self, count: int) -> Eliminated:
        """The first `count` points without the spare space after them, as views that NumPy can write
        to."""
        end = count * self.C.shape[1]
        arrays = self.rows[:end], self.T[:end, :end], self.C[:count], self.forces[:end]
        return Eliminated(*arrays, self.points[:count])

    @property
    def on_host(self) -> bool:
        return isinstance(self.rows, np.ndarray)


Scalar = Float[AnyArray, ""] | np.floating | float


class Step(NamedTuple):
    """The effect of leaving one point out: `Δα`, `KΔα`, the rounding of `KΔα`, and what elimination
    needs later."""

    delta: Float[AnyArray, "n c"]
    k_delta: Float[AnyArray, "n c"]
    drift: Scalar
    C: Float[AnyArray, "c c"]
    forces: Float[AnyArray, " kc"]


class Algebra(NamedTuple):
    """NumPy or JAX, a solver for the system of one point, and `spread`, which puts rows into zeros."""

    xp: ModuleType
    solve: Callable[..., AnyArray]
    spread: Callable[..., AnyArray]


def on_host() -> bool:
    """Whether small algebra is done by NumPy. On a CPU NumPy has no program to start and no copy to
    make."""
    return jax.default_backend() == "cpu"


def nothing_gone(anchor: Anchor, shares: np.ndarray, capacity: int) -> Gone:
    """Room for `capacity` points. On a CPU, memory for `T` is allocated as it is used, but memory for
    `rows` all at once, because allocating the rows of one point during a request takes 0.3 ms."""
    (n, c), dtype = anchor.alpha.shape, anchor.N.dtype
    capacity = min(capacity, n)
    if anchor.op.layout.sharding is not None:
        return _nothing_gone_on_mesh(anchor, shares, capacity)
    xp: Any = np if on_host() else jnp
    rows, T = xp.zeros((capacity * c, n * c), dtype), xp.zeros((capacity * c, capacity * c), dtype)
    C, forces = xp.zeros((capacity, c, c), dtype), xp.zeros(capacity * c, dtype)
    points = xp.zeros(capacity, xp.int32)
    # Written to once, so that the memory is there before the first request; see above.
    if on_host():
        rows.fill(0)
        return Gone(Room(rows, T, []), C, forces, points, None, None, 0)
    left, place = jnp.asarray(shares, dtype), jnp.zeros((), jnp.int32)
    arrays = committed((rows, T, C, forces, points, left, place), anchor.alpha)
    rows, T, *others = arrays
    return Gone(Room(rows, T, []), *others, count=0)


def _nothing_gone_on_mesh(anchor: Anchor, shares: np.ndarray, capacity: int) -> Gone:
    """The same for an inverse on a mesh: the rows read from it lie as it does, the rest is everywhere."""
    (n, c), dtype, places = anchor.alpha.shape, anchor.N.dtype, Places.of(anchor.op.layout)
    size = capacity * c

    def zeros() -> tuple[Array, ...]:
        small = (size, size), (capacity, c, c), (size,)
        return jnp.zeros((size, n * c), dtype), *(jnp.zeros(shape, dtype) for shape in small)

    rows, T, C, forces = jax.jit(zeros, out_shardings=(places.columns, *[places.every] * 3))()
    left = anchor.op.layout.expand(shares, "zero").astype(dtype)
    hosts = np.zeros(capacity, np.int32), left, np.zeros((), np.int32)
    points, left, place = (
        jax.make_array_from_callback(a.shape, places.every, lambda index, a=a: a[index])
        for a in hosts
    )
    return Gone(Room(rows, T, []), C, forces, points, left, place, count=0)


T_ = TypeVar("T_")


def committed(arrays: T_, like: jax.Array) -> T_:
    """Commit the arrays to the device of `like`, like the outputs of the programs; otherwise the
    programs would compile twice."""
    # Sharded arrays are bound to their mesh already.
    if len(like.devices()) > 1:
        return arrays
    return jax.device_put(arrays, jax.sharding.SingleDeviceSharding(*like.devices()))


class Fixed(NamedTuple):
    """What a step reads of the anchor, as arrays of NumPy or JAX; `alpha` is `α` at the anchor."""

    N: Float[AnyArray, "nc nc"]
    alpha: Float[AnyArray, "n c"]
    n_alpha: Float[AnyArray, "n c"]
    hess: Float[AnyArray, "n c c"]
    roots: Float[AnyArray, "n c c"]
    diagonal: Float[AnyArray, "n c"]
    error: Scalar
    ridge: Scalar

    @staticmethod
    def of(anchor: Anchor) -> "Fixed":
        a, ridge = anchor, anchor.problem.ridge
        return Fixed(a.N, a.alpha, a.n_alpha, a.hess, a.roots, a.kernel_diagonal, a.error, ridge)


def step_on_host(
    fixed: Fixed, gone: Gone, alpha: np.ndarray, point: int, share: Scalar, kept: np.ndarray
) -> tuple[Gone, Step]:
    """Leave out one point of the given share of the weight; `kept` marks the points that are left."""
    c, count = alpha.shape[1], gone.count
    used, own = count * c, slice(point * c, (point + 1) * c)
    held, now = gone.first(count), gone.first(count + 1)
    now.rows[used:], now.points[count] = fixed.N[own], point
    now.T[used:, :used] = next_row(held.T, held.C, held.rows[:, own])
    now.T[used:, used:] = np.eye(c)
    step = make_step(HOST, fixed, now, now.rows[:, own], now.T[used:], alpha, share, kept, point)
    now.C[count], forces = step.C, gone.forces.copy()
    forces[: used + c] = step.forces
    return replace(gone, forces=forces, count=count + 1, mark=gone.room.wrote(count)), step


def _solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """`A⁻¹B`, or NaN if `A` is singular, as on a device."""
    try:
        return np.linalg.solve(A, B)
    except np.linalg.LinAlgError:
        return np.full_like(B, np.nan)


def _spread(like: np.ndarray, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    spread = np.zeros_like(like)
    spread[points] = rows.reshape(len(points), -1)
    return spread


HOST = Algebra(np, lambda A, B: _solve(A, B), _spread)


def next_row(
    T: Float[AnyArray, "kc kc"], C: Float[AnyArray, "k c c"], seen: Float[AnyArray, "kc c"]
) -> Float[AnyArray, "c kc"]:
    """The next row of `T`, left of its diagonal, for a new point; `seen` are the rows of `N` at this
    point."""
    c = seen.shape[1]
    held = (C @ (T @ seen).reshape(-1, c, c)).reshape(-1, c)
    return held.T @ T


def make_step(
    algebra: Algebra,
    fixed: Fixed,
    held: Eliminated,
    seen: Float[AnyArray, "kc c"],
    row: Float[AnyArray, "c kc"],
    alpha: Float[AnyArray, "n c"],
    share: Scalar,
    kept: Float[AnyArray, " n"],
    i: Int[AnyArray, ""] | int,
) -> Step:
    """The formulas at the top of this file, for point `i`. It is the last one in `held`, and its `C` is
    not known yet.

    `seen` are the rows of `held` at point `i`, and `row` is the row of `T` for this point.
    """
    xp, start, ridge, forces = algebra.xp, fixed.alpha, fixed.ridge, held.forces
    W, R, scale = fixed.hess[i], fixed.roots[i], ridge * share
    # The changed inverse at the point, and its product with the forces of the anchor's α.
    both = xp.concatenate([row, forces[None]]) @ seen
    N_i, v_i = both[:-1], fixed.n_alpha[i] + both[-1]
    C = R @ algebra.solve(xp.eye(R.shape[0], dtype=R.dtype) - R.T @ N_i @ R, R.T)
    # Symmetric up to rounding. As it is, the difference would grow with every point eliminated after it.
    C = 0.5 * (C + C.T)
    right = scale * (W @ v_i - start[i]) - ridge * alpha[i]
    tau = right + C @ (N_i @ right)
    pushed, own = xp.stack([tau, C @ (v_i - N_i @ start[i]) - start[i]]) @ row
    more = scale * forces + pushed
    k_delta = scale * fixed.n_alpha + (more @ held.rows).reshape(start.shape)
    force = scale * start + algebra.spread(start, held.points, more)
    # The new point ends without a dual variable, whatever the solve has rounded.
    wanted = xp.where((xp.arange(start.shape[0], dtype=np.int32) == i)[:, None], -alpha, 0)
    delta, drift = _settled(xp, fixed, force, k_delta, kept, wanted)
    return Step(delta, k_delta, drift, C, forces + own)


def make_correction(
    algebra: Algebra,
    fixed: Fixed,
    gone: Eliminated,
    rho: Float[AnyArray, "n c"],
    kept: Float[AnyArray, " n"],
    scale: Scalar,
) -> tuple[AnyArray, AnyArray, Scalar]:
    """`Δα = −A⁻¹ρ` without the eliminated points, `KΔα`, and the rounding of `KΔα`."""
    # A correction is for the points that are left: the others have no equation any more.
    rho = -scale * rho * kept[:, None]
    pushed = (fixed.N @ rho.reshape(-1)).reshape(rho.shape)
    held = gone.C @ (gone.T @ pushed[gone.points].reshape(-1)).reshape(*gone.C.shape[:2], 1)
    held = held.reshape(-1) @ gone.T
    k_delta = pushed + (held @ gone.rows).reshape(rho.shape)
    force = rho + algebra.spread(rho, gone.points, held)
    delta, drift = _settled(algebra.xp, fixed, force, k_delta, kept, 0 * rho)
    return delta, k_delta, drift


def _settled(
    xp: ModuleType,
    fixed: Fixed,
    force: Float[AnyArray, "n c"],
    k_delta: Float[AnyArray, "n c"],
    kept: Float[AnyArray, " n"],
    wanted: Float[AnyArray, "n c"],
) -> tuple[AnyArray, Scalar]:
    """`Δα` of a force, replaced by `wanted` at points that are not kept, and the rounding of `KΔα`."""
    delta = (force - (fixed.hess @ k_delta[:, :, None])[:, :, 0]) / fixed.ridge
    settled = xp.where(kept[:, None] > 0, delta, wanted)
    # By how much equations at eliminated points are missed adds to KΔα, and so does the error of N.
    missed = (xp.sqrt(xp.maximum(fixed.diagonal, 0)) * xp.abs(settled - delta)).sum()
    drift = fixed.error * xp.sqrt((force**2).sum()) + missed / float(xp.finfo(force.dtype).eps)
    return settled, drift
