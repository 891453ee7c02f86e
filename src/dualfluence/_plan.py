r"""The cost of a kernel before it is computed: bytes, products, time, and the form that `fit` would
choose."""

import math
import shutil
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ._support.compile import jit
from ._support.memory import (
    BATCH_BYTES,
    GRADIENT_BYTES,
    HARD_SHARE,
    SHARE,
    STORED_TILE_BYTES,
    tile_budget,
    total_memory,
)
from ._support.options import check_choice, check_count, check_positive, maybe
from ._support.sequences import NETWORK_SHARE, PRODUCT_SHARE, Cost, Sequences, costs, sizes_of
from ._support.show import Shown, Table
from ._support.types import AnyPath

BANDWIDTH = {"cpu": 10e9, "gpu": 3e12, "tpu": 1e12}
"""Assumed bytes per second of a stream through `K`, for another machine than this one."""

COMPUTE = {"cpu": 5e10, "gpu": 3e13, "tpu": 3e13}
"""Assumed floating-point operations per second of one device at full precision, for another machine."""

MEASURED_ROWS = 8192
DEFAULT_RANK = 200
"""Columns of the preconditioner that `fit` keeps."""

DISK_BANDWIDTH = 1e9
PRODUCTS = 60
"""Assumed products with `K` for a fit and an edit, not measured; a small λ takes many times more."""

SMALLER_KERNELS = (
    "Use kernel='matrix-free', a kernel on disk (store.build), low_rank, float32, or more devices "
    "(mesh=...). dualfluence.plan shows what each costs."
)
SKETCH_COPIES = 5
"""Number of arrays of the size of the sketch in memory at once: the features that are kept, and a few
more while they are computed or multiplied with the factor of the loss."""

VECTORS = 24
"""Arrays of one number per unknown in a Newton step: state, residuals, directions, targets."""

STORED_TILES = 4
"""Tiles of a stored kernel in memory during a product: those read ahead, the one in use, and its
converted copy."""

TILE_COPIES, TILES_PER_SIDE, CUT_ROWS = 6, 5, 2048
"""Products in memory while a tile is summed. A kernel of `CUT_ROWS` rows or more is cut into five tiles
a side; a smaller one is a single tile."""

GRADIENT_COPIES = 1.35
"""Gradients of a batch of points in the diagonal of a matrix-free kernel: between one and two of each."""

PREDICTED_WITHIN = 2.0
"""Factor within which the peaks predicted here and those of compiled programs agree (tested)."""


TIMED_WITHIN = 2.0
"""Factor within which seconds of a scored checkpoint predicted here and measured on a CPU agree (tested)."""


class PlanError(ValueError):
    """The arrays would not fit into memory or on the disk. The message says which form would fit."""


@dataclass(frozen=True)
class KernelForm:
    """One way to store `K`, and its cost.

    - `name`: `"dense"`, `"kronecker"`, `"matrix-free"`, `"low-rank"` or `"stored"`.
    - `num_bytes`: of `K` in this form, on all devices together or on disk.
    - `bytes_per_device`: of `K` in the memory of each device.
    - `work_bytes`: the largest amount of further memory that `fit` and requests need on each device.
    - `fits`: whether memory (or disk) is large enough.
    - `products`, `seconds`: products with `K`, and the time they take.
    - `note`: anything else, in words.
    """

    name: str
    num_bytes: int
    bytes_per_device: int
    work_bytes: int
    fits: bool
    products: int
    seconds: float
    note: str

    @property
    def peak_bytes(self) -> int:
        """Peak memory of each device."""
        return self.bytes_per_device + self.work_bytes


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """All forms, the one that `fit` chooses, and why; `print` it.

    For sequences the forms are the methods of `Trajectory`, `"outputs"` and `"projected"`, `K` is the matrix
    of a checkpoint that is factored, and `products` are backward passes.
    """

    forms: tuple[KernelForm, ...]
    chosen: str
    reason: str
    assumptions: str
    remedy: str = "More devices (mesh=...) share the rows."

    def __getitem__(self, name: str) -> KernelForm:
        return next(form for form in self.forms if form.name == name)

    def require(self, name: str) -> KernelForm:
        """The form of that name, or a `PlanError` with advice if it would not fit."""
        form = self[name]
        if not form.fits:
            others = [f"{f.name} ({human(f.peak_bytes)})" for f in self.forms if f.fits]
            advice = ", ".join(others) if others else "fewer points or outputs"
            raise PlanError(
                f"plan: the form {name!r} takes {human(form.bytes_per_device or form.num_bytes)} "
                f"per device and {human(form.work_bytes)} of work space, which is more than "
                f"there is. These fit: {advice}. {self.remedy}"
            )
        return form

    def _table(self) -> Table:
        rows = [
            (f.name, f"{human(f.peak_bytes)} per device, {'fits' if f.fits else 'does not fit'}")
            for f in self.forms
        ]
        return "Plan", [("taken", f"{self.chosen} ({self.reason})"), *rows]

    def __str__(self) -> str:
        head = f"{'form':<12} {'K':>10} {'per device':>11} {'at peak':>10} {'fits':>5}"
        head += f" {'products':>9} {'time':>9}"
        lines = [head]
        for f in self.forms:
            mark = "*" if f.name == self.chosen else " "
            lines.append(
                f"{f.name + mark:<12} {human(f.num_bytes):>10} {human(f.bytes_per_device):>11} "
                f"{human(f.peak_bytes):>10} {'yes' if f.fits else 'no':>5} {f.products:>9} "
                f"{duration(f.seconds):>9}  {f.note}"
            )
        return "\n".join([*lines, f"* taken: {self.reason}", self.assumptions])


def plan(
    n: int,
    c: int = 1,
    num_params: int | None = None,
    *,
    structure: str = "dense",
    dtype: DTypeLike = "float32",
    devices: int = 1,
    memory: int | None = None,
    disk: int | None = None,
    folder: AnyPath = ".",
    rank: int = DEFAULT_RANK,
    tile: int | None = None,
    activation_bytes: int | None = None,
    platform: str | None = None,
    bandwidth: float | None = None,
    products: int = PRODUCTS,
    sequences: Sequences | None = None,
) -> Plan:
    """Bytes, products and time of every form of `K` for `n` points and `c` outputs.

    Peaks of memory agree with the peaks of the compiled programs within a factor of two; they leave out
    the features `x` and the parameters themselves.

    **Arguments:**

    - `num_params`: trainable parameters; without them there is no matrix-free form.
    - `structure`: `"dense"` for a finite network, `"kronecker"` for an infinitely wide one.
    - `dtype`: of the kernel.
    - `devices`, `memory`: number of devices, and bytes of each; by default the memory of this machine's
      devices.
    - `disk`: free bytes for a store; by default the free bytes of the disk that `folder` is on.
    - `rank`: of low-rank kernels and of the preconditioner.
    - `tile`: points per side of a stored tile, as in `store.build`.
    - `activation_bytes`: of the largest activation of one point, if you know it; by default a guess
      from `num_params`, which is too low for convolutional networks.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"` for another machine, whose speed is then assumed; by default
      this machine, whose speed is measured, which takes a second.
    - `bandwidth`: the rate, in bytes per second, at which a product reads `K`, if you know it.
    - `products`: the number of products with `K` that the times assume.
    - `sequences`: estimates the cost of scoring `n` sequences instead of that of a kernel; `c` is then the
      number of words, and `num_params` counts trained parameters.
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
    num_params, memory, tile, activation_bytes = (
        maybe(check_count, f"plan: {name}", value)
        for name, value in (
            ("num_params", num_params),
            ("memory", memory),
            ("tile", tile),
            ("activation_bytes", activation_bytes),
        )
    )
    disk = maybe(check_count, "plan: disk", disk, least=0)
    bandwidth = maybe(check_positive, "plan: bandwidth", bandwidth)
    check_choice("plan: structure", structure, ("dense", "kronecker"))
    maybe(check_choice, "plan: platform", platform, choices=tuple(BANDWIDTH))
    size = _itemsize(dtype)
    memory = total_memory() if memory is None else memory
    stream, compute = (
        measure_speed() if platform is None else (BANDWIDTH[platform], COMPUTE[platform])
    )
    stream = bandwidth or stream
    if sequences is not None:
        if num_params is None:
            raise ValueError("plan: scores of sequences need num_params, the trained parameters.")
        here = jax.default_backend() if platform is None else platform
        each = costs(sizes_of(sequences, n, c, num_params), memory, here)
        return _plan_of_sequences(sequences, each, devices, memory, stream, compute)
    per_point = c if structure == "dense" else 1
    held = (n + -n % devices) * per_point
    share = held // devices * held * size
    sketch = _sketch_bytes(n, c, rank, size, devices)

    def form(name: str, total: int, each: int, work: int, seconds: float, note: str) -> KernelForm:
        fits = each <= SHARE * memory and each + work <= HARD_SHARE * memory
        return KernelForm(name, total, each, work, fits, products, seconds, note)

    where = f"rows on {devices} devices" if devices > 1 else "one read of K per product"
    copies = TILE_COPIES if structure == "dense" else 1
    work = max(_tile_bytes(copies * share, share, held // devices, num_params, size), sketch)
    forms = [form(structure, share * devices, share, work, products * share / stream, where)]
    stored = stored_bytes(n, per_point, size, tile)
    free = shutil.disk_usage(_existing(Path(folder))).free if disk is None else disk
    tiles = STORED_TILES * (_stored_side(n, per_point, size, tile) * per_point) ** 2 * size
    note = f"on disk, where {human(free)} are free"
    on_disk = form("stored", stored, 0, tiles + sketch, products * stored / DISK_BANDWIDTH, note)
    forms.append(on_disk if stored <= free else replace(on_disk, fits=False))
    if num_params is not None:
        flops = 10.0 * num_params * n * products / devices
        work = _jacobian_bytes(n // devices or 1, c, num_params, size, activation_bytes)
        note = "no K; Jacobian products"
        kept = sketch // SKETCH_COPIES
        forms.append(form("matrix-free", 0, 0, max(work + kept, sketch), flops / compute, note))
    low = n * c * rank * size
    seconds = 2.0 * n * c * rank**2 / compute
    forms.append(form("low-rank", low, low, 3 * low, seconds, f"rank {rank}"))
    forms[-1] = replace(forms[-1], products=1)
    chosen, reason = _choose(forms, memory)
    origin = "measured" if platform is None else "assumed"
    return Plan(
        tuple(forms),
        chosen,
        reason,
        f"{'given' if bandwidth else origin} {stream / 1e9:.0f} GB/s through K, {origin} "
        f"{compute / 1e12:.2g} Tflop/s, assumed {DISK_BANDWIDTH / 1e9:.0f} GB/s from disk; times are "
        f"of the products, not of building K; {human(memory)} per device, of which K may take "
        f"{SHARE:.0%} and everything together {HARD_SHARE:.0%}",
    )


def _plan_of_sequences(
    given: Sequences,
    each: dict[str, Cost],
    devices: int,
    memory: int,
    stream: float,
    compute: float,
) -> Plan:
    """The methods of `Trajectory` for sequences; the choice is the fastest method that fits."""
    rate = given.flops or NETWORK_SHARE * compute
    turns = -(-given.checkpoints // devices)
    forms = []
    for name, cost in each.items():
        products = cost.flops / (PRODUCT_SHARE * compute)
        seconds = turns * (cost.pass_flops / rate + products + cost.moved / stream)
        fits = cost.system <= SHARE * memory and cost.peak <= HARD_SHARE * memory
        note = f"{duration(seconds / turns)} a checkpoint"
        work = cost.peak - cost.system
        passes = given.checkpoints * cost.passes
        forms.append(KernelForm(name, cost.system, cost.system, work, fits, passes, seconds, note))
    fit = sorted((form for form in forms if form.fits), key=lambda form: form.seconds)
    reason = (
        "the faster of those that fit",
        "the only one that fits",
        "none fits; take a smaller rank or shorter sequences",
    )
    used = min(devices, given.checkpoints)
    source = "given" if given.flops else f"{NETWORK_SHARE:.0%} of a large product"
    return Plan(
        tuple(forms),
        fit[0].name if fit else "none",
        reason[len(forms) - len(fit)],
        f"{given.checkpoints} checkpoints on {used} of {devices} devices, {turns} on each\n"
        f"seconds = operations of passes / {rate:.2g} per second ({source}) + of products / "
        f"{PRODUCT_SHARE * compute:.2g} + bytes of outputs / {stream:.2g}, without loading and compiling\n"
        f"{human(memory)} per device, of which the factored matrix may take {SHARE:.0%} and everything "
        f"together {HARD_SHARE:.0%}",
        "A smaller rank and fewer probes take less.",
    )


def _itemsize(dtype: DTypeLike) -> int:
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
            return jnp.dtype(dtype).itemsize
    except (TypeError, ValueError, AttributeError):
        pass
    raise ValueError(f"plan: dtype must be a floating-point one, e.g. 'float32', got {dtype!r}.")


def _sketch_bytes(n: int, c: int, rank: int, size: int, devices: int) -> int:
    """The preconditioner while it is made or used, and the vectors of a Newton step."""
    unknowns = n * c
    kept = min(rank, max(1, unknowns // 8))
    return (SKETCH_COPIES * kept + VECTORS) * unknowns * size // devices


def _tile_bytes(products: int, share: int, rows: int, num_params: int | None, size: int) -> int:
    """Work space while `K` is built: products of a tile, and the features of all points if they fit."""
    products = products // (TILES_PER_SIDE**2 if rows >= CUT_ROWS else 1)
    features = 3 * rows * math.isqrt(num_params or 1) * size
    return min(tile_budget(share), products + features)


def _jacobian_bytes(n: int, c: int, num_params: int, size: int, activation: int | None) -> int:
    """Gradients of a batch of points for the diagonal, or a batch's products; the larger one."""
    points = min(n, max(1, GRADIENT_BYTES // (8 * c * num_params)))
    gradients = int(GRADIENT_COPIES * points * c * num_params * size)
    each = size * math.isqrt(num_params) if activation is None else activation
    batch = 3 * min(n * each, max(BATCH_BYTES, each)) + 3 * num_params * size
    return max(gradients, batch)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    folder = folder.expanduser().resolve()
    return next(each for each in (folder, *folder.parents) if each.exists())


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


def _choose(forms: list[KernelForm], memory: int) -> tuple[str, str]:
    """The choice of `fit(kernel="auto")`: store K if it fits, else compute without it."""
    first = forms[0]
    each, budget = first.bytes_per_device, int(SHARE * memory)
    if first.fits:
        return first.name, f"K of {apart(each, budget)[0]} per device is within {human(budget)}"
    if each > budget:
        amount, limit = apart(each, budget)
        over = f"{first.name} takes {amount} per device, over {limit}"
    else:
        amount, limit = apart(first.peak_bytes, int(HARD_SHARE * memory))
        over = f"{first.name} takes {amount} per device at its peak, over {limit}"
    for other in forms[1:]:
        if other.name == "matrix-free" and other.fits:
            return other.name, over
    return "none", f"{over}; build a store, or use low_rank"


def stored_bytes(n: int, per_point: int, size: int, tile: int | None = None) -> int:
    """Bytes of the upper triangle of tiles that `store.build` writes."""
    side = _stored_side(n, per_point, size, tile)
    full, rest = divmod(n, side)
    widths = [side] * full + ([rest] if rest else [])
    # Σ_{i≤j} w_i w_j = ((Σw)² + Σw²) / 2
    return (n**2 + sum(w**2 for w in widths)) // 2 * per_point**2 * size


def _stored_side(n: int, per_point: int, size: int, tile: int | None) -> int:
    """Points per side of a stored tile."""
    return min(n, tile or max(1, math.isqrt(STORED_TILE_BYTES // (per_point**2 * size))))


def check_fits(
    num_bytes: int, devices: int, what: str, *, call: str = "fit", hint: str = SMALLER_KERNELS
) -> None:
    """Raise a `PlanError` for an array that does not fit, before anything is allocated."""
    if num_bytes / devices > HARD_SHARE * total_memory():
        raise PlanError(
            f"{call}: {what} needs {human(int(num_bytes / devices))} per device. Each device has "
            f"{human(total_memory())}; at most {HARD_SHARE:.0%} of it may be used. {hint}"
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


def human(num_bytes: int, digits: int = 1) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.{digits}f} TiB"


def apart(first: int, second: int) -> tuple[str, str]:
    """Both sizes in words, with enough digits to distinguish them."""
    for digits in range(1, 10):
        words = human(first, digits), human(second, digits)
        if words[0] != words[1]:
            return words
    return f"{first} B", f"{second} B"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
