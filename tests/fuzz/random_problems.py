"""Seeded random problems: models, training sets and edits, for the library and for the truth alike.

Problems come in chunks that share every shape and type, so that one compilation serves a chunk:
`family(k)` walks through all kernels × losses × solvers × dtypes (150 of them) as `k` grows, with sizes in
turn. Problem `i` belongs to chunk `i // CHUNK` and draws everything else (features, labels, weights, ridge,
edits) from its own seed.

So that the truth speaks of the model that the library is given, and not of a rounded neighbour:

- features, base outputs and targets are numbers of the library's dtype;
- a precomputed kernel is either made of small integers times a power of two, and then exact, or the
  truth takes a factor of `K` as it is stored (`style == "stored"`);
- low rank features are those that the model itself returns.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import truth

import dualfluence as dfl

CHUNK = 20
KERNELS = ("network", "matrix-free", "dense", "kronecker", "low-rank")
LOSSES = ("squared", "softmax", "logistic", "logcosh", "radial")
SOLVERS = ("auto", "cg", "cholesky")
DTYPES = ("float64", "float32")
SIZES = (
    (12, 2, 6),
    (5, 3, 8),
    (1, 1, 1),
    (40, 1, 5),
    (8, 1, 30),
    (3, 2, 4),
    (20, 5, 30),
    (2, 1, 3),
    (30, 3, 10),
    (6, 2, 30),
    (16, 4, 16),
)
"""Points, outputs, features."""

SPARE = 2
"""Query points; edits take new points from them."""

ADDED = 1
"""Points that the edits of one problem may add: each number of rows is another compilation."""


@dataclass(frozen=True)
class Family:
    """What a chunk shares: everything that a compiled program depends on."""

    chunk: int
    kernel: str
    loss: str
    solver: str
    dtype: str
    n: int
    c: int
    p: int

    @property
    def is_network(self) -> bool:
        return self.kernel in ("network", "matrix-free", "low-rank")

    @property
    def refine(self) -> bool:
        """Some float32 kernels with float64 residuals: those whose stored numbers are the truth."""
        return self.kernel in ("dense", "kronecker") and self.chunk % 8 == 3


def family(chunk: int) -> Family:
    """All 150 combinations in turn: 25 and 6 have no common divisor."""
    k = chunk % 25
    n, c, p = SIZES[(chunk + chunk // len(SIZES)) % len(SIZES)]
    loss = LOSSES[(k + k // 5) % 5]
    if loss == "softmax" and c == 1 and chunk % 7:
        c = 2  # one class alone is a legal problem, but a dull one
    kernel = KERNELS[k % 5]
    if kernel == "kronecker":
        p = max(1, p // c)  # features per output
    return Family(chunk, kernel, loss, SOLVERS[chunk % 3], DTYPES[chunk % 2], n, c, p)


@dataclass(frozen=True)
class Data:
    """A training set in longdouble: what `truth.Objective` takes, one row per row of the library's."""

    phi: np.ndarray
    f0: np.ndarray
    y: np.ndarray
    samples: np.ndarray

    def objective(self, ridge: float, loss: str) -> truth.Objective:
        return truth.Objective(self.phi, self.f0, self.y, self.samples, ridge, truth.LOSSES[loss])


@dataclass(frozen=True)
class Case:
    """One problem: arguments for `fit`, the training set behind them, and spare points."""

    index: int
    family: Family
    style: str
    ridge: float
    model: Any
    x: Any
    y: Any
    weights: Any
    data: Data
    spare_x: Any
    spare: Data
    rng: np.random.Generator

    def describe(self) -> str:
        f = self.family
        return (
            f"{f.kernel}{' refined' * f.refine} {f.loss} {f.solver} {f.dtype} "
            f"n={f.n} c={f.c} p={f.p} {self.style} "
            f"ridge={self.ridge:.2g}"
        )


def apply(theta: Any, x: Any) -> Any:
    """A model linear in its parameters, whose input holds its own Jacobian and offset."""
    return jnp.matmul(x[..., :-1], theta) + x[..., -1]


def log_cosh(f: Any, y: Any) -> Any:
    """`Σ log cosh(f − y)`, with derivatives that neither overflow nor cancel."""
    r = f - y
    near = jnp.log(jnp.cosh(jnp.clip(r, -15, 15)))
    return jnp.sum(jnp.where(jnp.abs(r) < 15, near, jnp.abs(r) - jnp.log(2.0).astype(r.dtype)))


def radial(f: Any, y: Any) -> Any:
    """`√(1 + |f − y|²)`."""
    return jnp.sqrt(1 + jnp.sum((f - y) ** 2))


LOSS_OBJECTS = {
    "squared": dfl.SquaredError(),
    "softmax": dfl.SoftmaxCrossEntropy(),
    "logistic": dfl.Logistic(),
    "logcosh": dfl.Convex(log_cosh, "logcosh"),
    "radial": dfl.Convex(radial, "radial"),
}
SOLVER_OBJECTS = {"auto": dfl.Auto(), "cg": dfl.CG(), "cholesky": dfl.Cholesky()}

STYLES = ("normal", "few-bits", "duplicates", "deficient", "constant", "null-sum", "columns")
EXACT_STYLES = ("few-bits", "duplicates", "deficient", "constant", "null-sum", "stored")
WEIGHTS = ("none", "none", "uniform", "extreme", "zeros")


def make_case(index: int) -> Case:
    """Problem `index`, the same on every machine."""
    fam = family(index // CHUNK)
    rng = np.random.default_rng([10, index])
    exact = fam.kernel in ("dense", "kronecker")
    style = str(rng.choice(EXACT_STYLES if exact else STYLES))
    if style == "stored" and fam.n * fam.c > 60:
        style = "few-bits"  # a factor of K has n·c columns; keep the truth quick
    ridge = float(10.0 ** rng.uniform(-8, 2))
    if rng.uniform() < 0.3:
        ridge = float(10.0 ** rng.uniform(-4, 0))
    model, x, spare_x, phi, f0 = _model(rng, fam, style)
    y, targets = draw_targets(rng, fam, phi, len(phi))
    samples = _samples(rng, fam.n)
    data = Data(phi, f0, targets, np.ones(len(phi), truth.LD))
    head, tail = _rows(data, slice(0, fam.n)), _rows(data, slice(fam.n, None))
    if samples is not None:
        head = replace(head, samples=samples.astype(truth.LD))
    return Case(index, fam, style, ridge, model, x, y[: fam.n], samples, head, spare_x, tail, rng)


def _rows(data: Data, rows: Any) -> Data:
    return Data(data.phi[rows], data.f0[rows], data.y[rows], data.samples[rows])


def _model(rng: np.random.Generator, fam: Family, style: str) -> tuple:
    """Model, inputs of training and spare points, their features and base outputs in longdouble."""
    n, c, p, dtype = fam.n, fam.c, fam.p, np.dtype(fam.dtype)
    total = n + SPARE
    if fam.kernel == "kronecker":
        return _kronecker(rng, fam, style)
    phi = _features(rng, style, total, c, p).astype(dtype)
    zero = np.zeros((total, c), dtype)
    if fam.kernel == "dense":
        if style == "stored":
            phi = _features(rng, "normal", total, c, 2 * total * c).astype(dtype)
        K = np.einsum("iap,jbp->iajb", phi, phi)
        K = (K + K.transpose(2, 3, 0, 1)) / 2  # exact where K was symmetric
        exact = phi.astype(truth.LD) if style != "stored" else stored_factor(K)
        pool = dfl.PrecomputedKernel(jnp.asarray(K))
        return pool, np.arange(n), np.arange(n, total), exact, zero.astype(truth.LD)
    f0, theta = zero, np.zeros(p, dtype)
    if rng.uniform() < 0.6:
        size = np.abs(phi).mean() if rng.uniform() < 0.5 else 1.0
        f0 = (rng.integers(-8, 9, (total, c)) * 2.0 ** np.round(np.log2(size + 1e-30))).astype(
            dtype
        )
    x = np.concatenate([phi, f0[..., None]], -1)
    model: Any = dfl.linearize(apply, jnp.asarray(theta))
    exact = phi.astype(truth.LD)
    if fam.kernel == "low-rank":
        method = "nystrom" if fam.chunk % 2 else "random-features"
        model = dfl.low_rank(model, x[:n], max(1, p // 2), method=method)
        made = [np.asarray(model.features(jnp.asarray(part))) for part in (x[:n], x[n:])]
        exact = np.concatenate(made).astype(truth.LD)
    return model, x[:n], x[n:], exact, f0.astype(truth.LD)


def _kronecker(rng: np.random.Generator, fam: Family, style: str) -> tuple:
    total, c, dtype = fam.n + SPARE, fam.c, np.dtype(fam.dtype)
    width = 2 * total if style == "stored" else fam.p
    shared = _features(rng, "normal" if style == "stored" else style, total, 1, width)[:, 0]
    shared = shared.astype(dtype)
    sigma = shared @ shared.T
    if style == "stored":
        shared = truth.cholesky(((sigma + sigma.T) / 2).astype(truth.LD))
        sigma = (sigma + sigma.T) / 2
    exact = np.einsum("nd,ab->nadb", shared.astype(truth.LD), np.eye(c, dtype=truth.LD))
    pool = dfl.PrecomputedKernel(jnp.asarray(sigma))
    zero = np.zeros((total, c), truth.LD)
    n = fam.n
    return pool, np.arange(n), np.arange(n, total), exact.reshape(total, c, -1), zero


def stored_factor(K: np.ndarray) -> np.ndarray:
    """`Φ` with `ΦΦᵀ = K` for the numbers that `K` holds."""
    n, c = K.shape[:2]
    return truth.cholesky(K.reshape(n * c, -1).astype(truth.LD)).reshape(n, c, -1)


def _features(rng: np.random.Generator, style: str, n: int, c: int, p: int) -> np.ndarray:
    """`(n, c, p)` features at a scale from 1e-3 to 1e3; all but two styles in few bits."""
    scale = 2.0 ** np.round(rng.uniform(-10, 10))
    if rng.uniform() < 0.4:
        scale = 1.0
    small = rng.integers(-4, 5, (n, c, p)).astype(float)
    if style == "normal":
        small = rng.normal(size=(n, c, p))
    elif style == "columns":
        small = rng.normal(size=(n, c, p)) * 10.0 ** rng.uniform(-3, 0, p)
    elif style == "duplicates":
        small = small[rng.integers(0, max(1, n // 3), n)]
    elif style == "constant":
        small = np.broadcast_to(small[:1], small.shape).copy()
    elif style == "deficient":
        rank = int(rng.integers(1, max(2, min(p, n * c) // 2 + 1)))
        left, right = rng.integers(-2, 3, (n * c, rank)), rng.integers(-2, 3, (rank, p))
        small = (left @ right).reshape(n, c, p).astype(float)
    elif style == "null-sum":
        small[1::2] = -small[: 2 * (n // 2) : 2]  # each second point undoes the one before it
    return small * scale


def draw_targets(
    rng: np.random.Generator, fam: Family, phi: np.ndarray, m: int
) -> tuple[np.ndarray, np.ndarray]:
    """Targets as the library is given them, and as `(m, c)` in longdouble."""
    c, dtype = fam.c, np.dtype(fam.dtype)
    scores = (phi @ rng.normal(size=phi.shape[2]).astype(truth.LD)).astype(float)
    kind = rng.choice(("random", "separable", "noisy", "one", "soft"))
    flip = rng.uniform(size=m) < 0.1
    if fam.loss == "softmax":
        labels = rng.integers(0, c, m)
        if kind in ("separable", "noisy"):
            labels = np.where(flip & (kind == "noisy"), labels, scores.argmax(1))
        if kind == "one":
            labels = np.zeros(m, int)
        if kind == "soft":
            y = _soft(rng, m, c).astype(dtype)
            return y, y.astype(truth.LD)
        return labels, np.eye(c, dtype=truth.LD)[labels]
    if fam.loss == "logistic":
        y = rng.integers(0, 2, (m, c)).astype(float)
        if kind in ("separable", "noisy"):
            y = np.where(flip[:, None] & (kind == "noisy"), y, scores > 0)
        if kind == "one":
            y = np.ones((m, c))
        if kind == "soft":
            y = rng.uniform(size=(m, c))
    else:
        y = rng.normal(size=(m, c)) * 10.0 ** rng.uniform(-3, 3)
        if kind in ("separable", "noisy"):
            y = scores + (rng.normal(size=(m, c)) if kind == "noisy" else 0)
        if kind == "one":
            y = np.zeros((m, c)) if rng.uniform() < 0.7 else np.full((m, c), 7e7)
        if kind == "soft":
            y = rng.integers(-3, 4, (m, c)).astype(float)
    y = y.astype(dtype)
    return y, y.astype(truth.LD)


def _soft(rng: np.random.Generator, m: int, c: int) -> np.ndarray:
    """Probabilities: in sixteenths, which sum to one exactly, or any."""
    if rng.uniform() < 0.5:
        return rng.multinomial(16, np.ones(c) / c, m) / 16
    return rng.dirichlet(np.ones(c), m)


def _samples(rng: np.random.Generator, n: int) -> np.ndarray | None:
    kind = rng.choice(WEIGHTS)
    if kind == "none":
        return None
    if kind == "uniform":
        return rng.uniform(0.2, 3.0, n)
    if kind == "extreme":
        return 10.0 ** rng.uniform(-6, 6, n)
    samples = rng.integers(0, 3, n).astype(float)
    samples[rng.integers(n)] = 1.0
    return samples


class Editor:
    """Draws edits that the training set admits, and applies them to it independently."""

    def __init__(self, case: Case):
        self.case, self.rng, self.used = case, case.rng, 0

    def draw(self, data: Data) -> tuple[Any, Data, str]:
        """One edit or a list of up to three, the set after it, and a name for reports."""
        count = int(self.rng.choice((1, 1, 1, 2, 3)))
        edits, names = [], []
        for _ in range(count):
            made = self._one(data)
            if made is not None:
                edit, data, name = made
                edits.append(edit)
                names.append(name)
        if not edits:
            edits, names = [dfl.Reweight([0], [1.0])], ["Reweight"]
            data = self._weighted(data, np.array([0]), np.array([1.0]))
        return edits[0] if len(edits) == 1 else edits, data, "+".join(names)

    def _one(self, data: Data) -> tuple[Any, Data, str] | None:
        rng, fam = self.rng, self.case.family
        names = ["Remove", "Remove", "Relabel", "Reweight", "Replace"]
        if self.used < ADDED:
            names += ["Add"]
        name = str(rng.choice(names))
        present = np.flatnonzero(data.samples > 0)
        size = int(rng.integers(1, max(2, len(present) // 2 + 1)))
        where = rng.permutation(present)[:size]
        if name == "Remove":
            if size >= len(present):
                return None
            after = self._weighted(data, where, np.zeros(size))
            return dfl.Remove(where), after, name
        if name == "Reweight":
            weights = rng.choice((0.0, 1e-6, 1e-3, 0.5, 2.0, 1e3, 1e6), size)
            if size >= len(present):
                weights = np.maximum(weights, 1e-6)
            return dfl.Reweight(where, weights), self._weighted(data, where, weights), name
        if name == "Add":
            return self._add(data)
        if name == "Replace" and self.used < ADDED and rng.uniform() < 0.5:
            return self._move(data, where[:1])
        given, y = draw_targets(rng, fam, data.phi[where], size)
        targets = data.y.copy()
        targets[where] = y
        after = replace(data, y=targets)
        make = dfl.Relabel(where, given) if name == "Relabel" else dfl.Replace(where, targets=given)
        return make, after, name

    def _add(self, data: Data) -> tuple[Any, Data, str]:
        x, row = self._spare()
        given, y = draw_targets(self.rng, self.case.family, row.phi, 1)
        weight = float(self.rng.choice((1.0, 1e-3, 1e3)))
        row = replace(row, y=y, samples=np.array([weight], truth.LD))
        return dfl.Add(x, given, [weight]), _joined(data, row), "Add"

    def _move(self, data: Data, where: np.ndarray) -> tuple[Any, Data, str]:
        x, row = self._spare()
        row = replace(row, y=data.y[where], samples=data.samples[where])
        after = self._weighted(data, where, np.zeros(1))
        return dfl.Replace(where, x=x), _joined(after, row), "Replace-x"

    def _spare(self) -> tuple[Any, Data]:
        rows = slice(self.used, self.used + 1)
        self.used += 1
        return self.case.spare_x[rows], _rows(self.case.spare, rows)

    @staticmethod
    def _weighted(data: Data, where: np.ndarray, weights: np.ndarray) -> Data:
        samples = data.samples.copy()
        samples[where] = weights
        return replace(data, samples=samples)


def _joined(data: Data, row: Data) -> Data:
    parts = zip(
        (data.phi, data.f0, data.y, data.samples),
        (row.phi, row.f0, row.y, row.samples),
        strict=True,
    )
    return Data(*(np.concatenate(pair) for pair in parts))
