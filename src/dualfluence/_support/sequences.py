"""What scores of sequences take, counted from sizes: operations, bytes moved, memory.

The methods are those of `Trajectory` for networks with outputs `(n, T, V)`: `"outputs"` holds a system with
a row for every probe, `"projected"` one of the size of the projection.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .memory import PANEL_BYTES, even_size, tile_room
from .options import check_count, check_positive, maybe

ROWS_SHARE = 0.2
"""Share of the memory for gradients that are held at once. If all fit, every gradient is computed once."""

LOGIT_COPIES = 6
"""Arrays of the size of a sequence's outputs in one of its backward passes: outputs, probabilities, signs,
cotangent, and what the compiler keeps between them."""

AT_ONCE = 16
"""Sequences of one step on an accelerator with enough memory: fewer leave it waiting for small products."""

KEPT = 6
"""Numbers of a forward pass kept for backward ones: this many for each token and each unit of the root of
the number of parameters. A guess."""

USED = 0.4
"""Share of the work space of backward passes that they take, measured on a CPU."""

LOGIT_PASSES = {"cpu": 150, "gpu": 24, "tpu": 24}
"""Reads or writes of memory that the probes of one output take: random signs, softmax, cotangent. Measured
on a CPU, where random numbers cost most of it."""

SIZE = 4
"""Bytes of a number: systems, sums and gradients are in float32."""


NETWORK_SHARE, PRODUCT_SHARE = 0.35, 0.5
"""Shares of the rate of a large product that a network's passes, and products of gradients, reach. Measured
with transformers of width 128 and 256 on a CPU."""


@dataclass(frozen=True)
class Sequences:
    """A run of `Trajectory` that scores sequences of tokens, described so that `plan` can estimate its
    cost.

    - `tokens`: number of tokens of each sequence.
    - `frozen`: parameters that are not trained.
    - `probes`, `rank`: as in `Trajectory.attribute`.
    - `checkpoints`, `queries`: numbers of them. Each device scores checkpoints of its own (`worker=`).
    - `flops`: operations per second of the network's passes on one device, if you know them; by default a
      share of the rate that a large matrix product reaches.
    """

    tokens: int
    frozen: int = 0
    probes: int = 16
    rank: int = 2048
    checkpoints: int = 1
    queries: int = 100
    flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "probes", "rank", "checkpoints", "queries"):
            check_count(f"Sequences: {name}", getattr(self, name))
        check_count("Sequences: frozen", self.frozen, least=0)
        maybe(check_positive, "Sequences: flops", self.flops)


class Sizes(NamedTuple):
    """Sizes of a request. Parameters are `trained` or `frozen`, and `n` is the number of sequences."""

    n: int
    tokens: int
    words: int
    trained: int
    frozen: int
    probes: int
    rank: int
    queries: int

    @property
    def rows(self) -> int:
        """Backward passes of a sequence: its probes and its own gradient."""
        return self.probes + 1


def sizes_of(given: Sequences, n: int, words: int, trained: int) -> Sizes:
    """Together with what `plan` is told besides."""
    own = (given.tokens, words, trained, given.frozen, given.probes, given.rank, given.queries)
    return Sizes(n, *own)


class Cost(NamedTuple):
    """Of one checkpoint.

    - `system`: bytes of the matrix that is factored; `peak`: bytes at once, with it.
    - `pass_flops`, `flops`: operations of the network's passes, and of products of gradients and solves.
    - `moved`: bytes read or written for outputs.
    - `passes`: backward passes.
    """

    system: int
    peak: int
    pass_flops: float
    flops: float
    moved: float
    passes: int


def sequences_at_once(rows: int, outputs: int, parameters: int, budget: int) -> int:
    """Sequences of which the backward passes with `rows` cotangents fit into the work space."""
    return max(1, budget // sequence_bytes(rows, outputs, parameters))


def sequence_bytes(rows: int, outputs: int, parameters: int) -> int:
    """Work space of one sequence's backward passes."""
    return rows * (LOGIT_COPIES * outputs + 2 * parameters) * SIZE


def panel_of(n: int, rows: int, parameters: int, size: int, memory: int) -> int:
    """Sequences whose gradients are held at once: all, or half of what two panels may take."""
    most = int(ROWS_SHARE * memory) // (rows * parameters * size)
    return n if most >= n else max(1, most // 2)


def costs(sizes: Sizes, memory: int, platform: str) -> dict[str, Cost]:
    """The cost of a checkpoint by each method, on a machine with this memory."""
    return {
        "outputs": _outputs(sizes, memory, platform),
        "projected": _projected(sizes, memory, platform),
    }


def _outputs(s: Sizes, memory: int, platform: str) -> Cost:
    unknowns, panel = s.n * s.probes, panel_of(s.n, s.rows, s.trained, SIZE, memory)
    blocks = -(-s.n // panel)
    # If they do not fit, gradients are computed again for every panel of rows and for the queries.
    times = 1 if panel == s.n else blocks + 2
    system = unknowns**2 * SIZE
    halves = (
        system // 2 if s.probes > 1 else 0
    )  # factors of both halves, which say how sure a draw is
    side = unknowns * s.n * SIZE * 2
    # Both sides of a product of gradients, which are one if all fit, and a copy that it makes.
    held = (2 if panel == s.n else 3) * panel * s.rows * s.trained * SIZE
    against = panel * s.rows * s.n * s.rows * SIZE * 2
    passes = s.n * s.rows * times + s.queries
    own = times * s.n * _gradients(s, s.rows) + s.queries * _gradients(s, 1)
    flops = 2.0 * (s.n * s.rows) ** 2 * s.trained + 2.0 * s.queries * s.n * s.rows * s.trained
    flops += (1.25 if s.probes > 1 else 1.0) * unknowns**3 / 3 + 4.0 * unknowns**2 * s.queries
    peak = max(system + side + held + max(against, _work(s, panel, memory, platform)),
               2 * system + halves + side)  # fmt: skip
    return Cost(system, peak, own, flops, times * _moved(s, platform), passes)


def _projected(s: Sizes, memory: int, platform: str) -> Cost:
    k = min(s.rank, s.trained)
    system = k**2 * SIZE
    block = even_size(s.n, max(1, 4 * PANEL_BYTES // (SIZE * k * s.rows)))
    phi = 2 * block * s.rows * k * SIZE
    own = s.n * k * SIZE
    through = s.n * _gradients(s, s.rows) + s.queries * _gradients(s, 1)
    flops = 2.0 * s.n * s.probes * k**2 + k**3 / 3 + 2.0 * s.queries * (s.n * k + k**2)
    peak = max(2 * system + own + phi + _work(s, block, memory, platform), 3 * system + 2 * own)
    return Cost(system, peak, through, flops, _moved(s, platform), s.n * s.rows + s.queries)


def _gradients(s: Sizes, rows: int) -> float:
    """A forward pass and `rows` backward ones; frozen weights need no gradient."""
    forward = 2.0 * (s.trained + s.frozen)
    return s.tokens * (forward + rows * (forward + 2.0 * s.trained))


def _moved(s: Sizes, platform: str) -> float:
    return LOGIT_PASSES[platform] * 4.0 * (s.n * s.rows + s.queries) * s.tokens * s.words


def _work(s: Sizes, most: int, memory: int, platform: str) -> int:
    """Backward passes of as many sequences as one step takes."""
    outputs = s.tokens * s.words
    each = sequence_bytes(s.rows, outputs, s.trained)
    free = None if platform == "cpu" else memory
    budget = tile_room(8 * AT_ONCE * each, free)
    kept = KEPT * s.tokens * int((s.trained + s.frozen) ** 0.5) * SIZE
    together = min(most, sequences_at_once(s.rows, outputs, s.trained, budget))
    return int(together * (USED * each + kept))
