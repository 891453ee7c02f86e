r"""What a kernel costs before it is computed: bytes, products, time, and which form to take."""

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._support.compile import jit
from ._support.memory import SHARE, total_memory
from ._support.options import check_choice, check_count, check_positive, maybe

BANDWIDTH = {"cpu": 10e9, "gpu": 3e12, "tpu": 1e12}
"""Assumed bytes per second of a stream through `K`, for another machine than this one."""

COMPUTE = {"cpu": 5e10, "gpu": 3e13, "tpu": 3e13}
"""Assumed floating-point operations per second of one device at full precision, likewise."""

MEASURED_ROWS = 8192
DEFAULT_RANK = 200
"""Columns of the preconditioner that `fit` keeps."""

DISK_BANDWIDTH = 1e9
PRODUCTS = 60
"""Assumed products with `K` for a fit and an edit, not measured; a small λ takes many times more."""

SMALLER_KERNELS = (
    "Use form='matrix-free', a kernel on disk (store.build), low_rank, float32, or more devices "
    "(mesh=...). dualfluence.plan shows what each costs."
)
HARD_SHARE = 0.9
"""Past this share of the memory a kernel that was asked for is refused rather than tried."""

DEFAULT_TILE_BYTES = 64 * 2**20


class PlanError(ValueError):
    """The work would not fit. The message says what would."""


@dataclass(frozen=True)
class Form:
    """One way to represent `K`: its bytes, and what using it takes."""

    name: str
    num_bytes: int
    bytes_per_device: int
    fits: bool
    products: int
    seconds: float
    note: str


@dataclass(frozen=True)
class Plan:
    """All forms, the one that `Auto` takes, and why; `print` it."""

    forms: tuple[Form, ...]
    chosen: str
    reason: str
    assumptions: str

    def __getitem__(self, name: str) -> Form:
        return next(form for form in self.forms if form.name == name)

    def require(self, name: str) -> Form:
        """The form of that name, or a `PlanError` with advice if it would not fit."""
        form = self[name]
        if not form.fits:
            others = [f"{f.name} ({human(f.num_bytes)})" for f in self.forms if f.fits]
            advice = ", ".join(others) if others else "fewer points or outputs"
            raise PlanError(
                f"plan: a {name} kernel takes {human(form.bytes_per_device)} per device, which is "
                f"more than there is. What fits: {advice}. More devices (mesh=...) share the rows."
            )
        return form

    def __str__(self) -> str:
        head = (
            f"{'form':<12} {'bytes':>10} {'per device':>11} {'fits':>5} {'products':>9} {'time':>9}"
        )
        lines = [head]
        for f in self.forms:
            mark = "*" if f.name == self.chosen else " "
            lines.append(
                f"{f.name + mark:<12} {human(f.num_bytes):>10} {human(f.bytes_per_device):>11} "
                f"{'yes' if f.fits else 'no':>5} {f.products:>9} {duration(f.seconds):>9}  {f.note}"
            )
        return "\n".join([*lines, f"* taken: {self.reason}", self.assumptions])


def plan(
    n: int,
    c: int = 1,
    num_params: int | None = None,
    *,
    structure: str = "dense",
    dtype: Any = "float32",
    devices: int = 1,
    memory: int | None = None,
    disk: int | None = None,
    rank: int = DEFAULT_RANK,
    tile: int | None = None,
    platform: str | None = None,
    bandwidth: float | None = None,
    products: int = PRODUCTS,
) -> Plan:
    """Bytes, products and time of every form of `K` for `n` points and `c` outputs.

    **Arguments:**

    - `num_params`: trainable parameters; without them there is no matrix-free form.
    - `structure`: `"dense"` for a finite network, `"kronecker"` for an infinitely wide one.
    - `dtype`: of the kernel.
    - `devices`, `memory`: how many, and bytes of each; by default the memory of this machine's.
    - `disk`: free bytes for a store; not checked by default.
    - `rank`: of low-rank kernels and of the preconditioner.
    - `tile`: points per side of a stored tile, as in `store.build`.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"` for another machine, whose speed is then assumed; by
      default this one, whose speed is measured in a second.
    - `bandwidth`: bytes per second through `K`, if you know them.
    - `products`: products with `K`.
    """
    n, c, devices, rank, products = (
        check_count(f"plan: {name}", value)
        for name, value in (
            ("n", n),
            ("c", c),
            ("devices", devices),
            ("rank", rank),
            ("products", products),
        )
    )
    num_params, memory, tile = (
        maybe(check_count, f"plan: {name}", value)
        for name, value in (("num_params", num_params), ("memory", memory), ("tile", tile))
    )
    disk = maybe(check_count, "plan: disk", disk, least=0)
    bandwidth = maybe(check_positive, "plan: bandwidth", bandwidth)
    check_choice("plan: structure", structure, ("dense", "kronecker"))
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    except (TypeError, ValueError, AttributeError):
        floating = False
    if not floating:
        raise ValueError(
            f"plan: dtype must be a floating-point one, e.g. 'float32', got {dtype!r}."
        )
    size = jnp.dtype(dtype).itemsize
    memory = total_memory() if memory is None else memory
    maybe(check_choice, "plan: platform", platform, choices=tuple(BANDWIDTH))
    stream, compute = (
        measure_speed() if platform is None else (BANDWIDTH[platform], COMPUTE[platform])
    )
    stream = bandwidth or stream
    per_point = c if structure == "dense" else 1
    rows = n + -n % devices
    sketch = n * c * rank * size
    held = (rows if devices > 1 else n) * per_point
    share = held // devices * held * size

    def form(name: str, total: int, each: int, limit: float, seconds: float, note: str) -> Form:
        fits = each + sketch // devices <= limit
        return Form(name, total, each, fits, products, seconds, note)

    forms = [
        form(
            structure,
            share * devices,
            share,
            SHARE * memory,
            products * share / stream,
            f"rows on {devices} devices" if devices > 1 else "one read of K per product",
        )
    ]
    stored = stored_bytes(n, per_point, size, tile)
    room = disk is None or stored <= disk
    forms.append(
        Form("stored", stored, 0, room, products, products * stored / DISK_BANDWIDTH, "on disk")
    )
    if num_params is not None:
        flops = 10.0 * num_params * n * products / devices
        work = 3 * num_params * size
        note = "no K; Jacobian products"
        forms.append(form("matrix-free", 0, work, SHARE * memory, flops / compute, note))
    low = n * c * rank * size
    seconds = 2.0 * n * c * rank**2 / compute
    forms.append(Form("low-rank", low, low, low <= SHARE * memory, 1, seconds, f"rank {rank}"))
    chosen, reason = _choose(forms, memory)
    origin = "measured" if platform is None else "assumed"
    return Plan(
        tuple(forms),
        chosen,
        reason,
        f"{'given' if bandwidth else origin} {stream / 1e9:.0f} GB/s through K, {origin} "
        f"{compute / 1e12:.2g} Tflop/s, assumed {DISK_BANDWIDTH / 1e9:.0f} GB/s from disk; times are "
        f"of the products, not of building K; {human(memory)} per device, of which K may take "
        f"{SHARE:.0%}",
    )


@lru_cache(maxsize=1)
def measure_speed() -> tuple[float, float]:
    """Bytes per second through a matrix in memory, and operations per second of a product."""
    K = jnp.ones((MEASURED_ROWS, MEASURED_ROWS), jnp.float32)
    block = K[:, : MEASURED_ROWS // 32]
    product = jit(lambda K, v: jnp.dot(K, v, precision="highest"))

    def seconds(v: Array) -> float:
        jax.block_until_ready(product(K, v))
        start = time.perf_counter()
        jax.block_until_ready([product(K, v) for _ in range(3)])
        return (time.perf_counter() - start) / 3

    return K.nbytes / seconds(K[0]), 2 * K.size * block.shape[1] / seconds(block)


def _choose(forms: list[Form], memory: int) -> tuple[str, str]:
    """What `fit(form="auto")` does: hold K if it fits, else go without it."""
    first = forms[0]
    budget = human(int(SHARE * memory))
    if first.fits:
        return first.name, f"{human(first.bytes_per_device)} per device is within {budget}"
    over = f"{first.name} takes {human(first.bytes_per_device)} per device, over {budget}"
    for other in forms[1:]:
        if other.name == "matrix-free" and other.fits:
            return other.name, over
    return "none", f"{over}; build a store, or use low_rank"


def stored_bytes(n: int, per_point: int, size: int, tile: int | None = None) -> int:
    """Bytes of the upper triangle of tiles that `store.build` writes."""
    side = tile or max(1, math.isqrt(DEFAULT_TILE_BYTES // (per_point**2 * size)))
    side = min(side, n)
    full, rest = divmod(n, side)
    widths = [side] * full + ([rest] if rest else [])
    # Σ_{i≤j} w_i w_j = ((Σw)² + Σw²) / 2
    return (n**2 + sum(w**2 for w in widths)) // 2 * per_point**2 * size


def check_fits(
    num_bytes: int, devices: int, what: str, *, call: str = "fit", hint: str = SMALLER_KERNELS
) -> None:
    """Raise a `PlanError` for an array that cannot be held, before anything is allocated."""
    if num_bytes / devices > HARD_SHARE * total_memory():
        raise PlanError(
            f"{call}: {what} takes {human(int(num_bytes / devices))} per device, and there are "
            f"{human(total_memory())}. {hint}"
        )


def plan_command(
    points: int,
    outputs: int = 1,
    parameters: int = 0,
    *,
    structure: str = "dense",
    dtype: str = "float32",
    devices: int = 1,
    memory_gib: float = 0.0,
    rank: int = DEFAULT_RANK,
    platform: str | None = None,
) -> int:
    """Print the plan; the exit status is 1 if no form fits in memory."""
    made = plan(
        points,
        outputs,
        parameters or None,
        structure=structure,
        dtype=dtype,
        devices=devices,
        memory=int(memory_gib * 2**30) or None,
        rank=rank,
        platform=platform,
    )
    print(made)
    return 1 if made.chosen == "none" else 0


def human(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
