"""Fits that nobody would call hard: ReLU networks on digit-like data, which must never be refused.

784-64-10 networks in miniature: fewer inputs, scaled so that kernels are as large as theirs. The truth is
about the kernel that the network returns, through a factor of its stored numbers. `checker` says what
well-posed means; here nearly every draw is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import truth
from checker import Checker, Record
from random_problems import (
    CHUNK,
    LOSS_OBJECTS,
    SOLVER_OBJECTS,
    SPARE,
    Case,
    Data,
    Family,
    stored_factor,
)

import dualfluence as dfl

SHAPES = ((30, 24, 4, 20), (16, 48, 3, 30), (40, 32, 6, 12), (24, 64, 10, 8))
"""Inputs, hidden units, outputs, points."""

PIXELS = 784


def network(params: Any, x: Any) -> Any:
    """One hidden layer of ReLU."""
    (W1, b1), (W2, b2) = params
    return jnp.maximum(x @ W1 + b1, 0) @ W2 + b2


def make_fit(index: int) -> Case:
    """Fit `index`: λ from 1e-4 to 0.1, softmax or logistic, a third of them in float32."""
    chunk = index // CHUNK
    d, h, c, n = SHAPES[chunk % len(SHAPES)]
    dtype = ("float64", "float64", "float32")[chunk % 3]
    loss = ("softmax", "logistic")[chunk // 2 % 2]
    family = Family(chunk, "relu", loss, ("auto", "cg", "cholesky")[chunk // 3 % 3], dtype, n, c, h)
    rng = np.random.default_rng([14, index])
    labels = rng.integers(0, c, n + SPARE)
    noise = rng.choice((0.05, 0.3, 1.0))
    pixels = rng.uniform(size=(c, d))[labels] + noise * rng.normal(size=(n + SPARE, d))
    x = (np.clip(pixels, 0, 1) * np.sqrt(PIXELS / d)).astype(dtype)
    model = dfl.linearize(network, _params(rng, d, h, c, dtype))
    # A float32 model is computed in float64 where float32 would fall short: the truth is the network's own.
    wide = dfl.linearize(network, jax.tree.map(lambda a: a.astype("float64"), model.params))
    K = np.asarray(wide.kernel(jnp.asarray(x, "float64"), progress=False))
    f0 = np.asarray(wide.base_outputs(jnp.asarray(x, "float64")))
    one_hot = np.eye(c, dtype=truth.LD)[labels]
    flat = K.reshape(K.shape[0] * c, -1)
    phi = stored_factor(((flat + flat.T) / 2).reshape(K.shape))
    data = Data(phi, f0.astype(truth.LD), one_hot, np.ones(n + SPARE, truth.LD))
    head, tail = (
        Data(*(a[rows] for a in vars(data).values())) for rows in (slice(n), slice(n, None))
    )
    ridge = float(10.0 ** rng.uniform(-4, -1))
    y = labels[:n] if loss == "softmax" else one_hot[:n].astype(dtype)
    return Case(index, family, "relu", ridge, model, x[:n], y, None, head, x[n:], tail, rng)


def _params(rng: np.random.Generator, d: int, h: int, c: int, dtype: str) -> Any:
    shapes = ((d, h), (h, c))
    draw = [
        (rng.normal(size=s) * np.sqrt(2 / s[0]), rng.normal(size=s[1]) * rng.choice((0.0, 0.1)))
        for s in shapes
    ]
    return [tuple(jnp.asarray(a, dtype) for a in pair) for pair in draw]


class FitChecker(Checker):
    """The fit alone."""

    def _run(self) -> None:
        case = self.case
        self._call(
            "fit",
            lambda: dfl.fit(
                case.model,
                case.x,
                case.y,
                loss=LOSS_OBJECTS[case.family.loss],
                ridge=case.ridge,
                solver=SOLVER_OBJECTS[case.family.solver],
                progress=False,
            ),
            case.data,
            None,
        )


def check_fit(index: int) -> Record:
    """Fit `index` from its seed, checked."""
    return FitChecker(make_fit(index)).run()
