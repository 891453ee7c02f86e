"""Settings of `Trajectory` compared side by side: those of one checkpoint share its kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualfluence.attribution import KAPPA
from dualfluence.attribution import _checkpoint as at
from dualfluence.attribution._trajectory import INDEPENDENT, shrunk

SKETCH = (1, 2, 3, 5, 8, 14, 25)

EPOCHS = {
    "sketch": lambda e, total: e in (*SKETCH, total),
    "halves": lambda e, total: e % 0.5 == 0,
    "first quarter": lambda e, total: e <= total / 4,
    "from the first": lambda e, total: e >= 1,
    "from the second": lambda e, total: e >= 2,
    "all": lambda e, total: True,
}
"""Which of the saved epochs are used."""


class Setting(NamedTuple):
    """Which checkpoints, `κ`, and how their scores are combined."""

    epochs: str
    kappa: float = KAPPA
    combine: str = "shrunk"

    def __str__(self):
        return f"epochs {self.epochs}, kappa {self.kappa:g}, {self.combine}"

    def keys(self, recipe):
        """`(epoch, κ)` of every checkpoint it uses."""
        chosen = (e for e in recipe["saved"] if EPOCHS[self.epochs](e, recipe["epochs"]))
        return [(e, self.kappa) for e in chosen]

    def combined(self, runs, recipe):
        """Scores of several runs, each `{(epoch, κ): scores}`, which stay on the device until here."""
        parts = [kept[key] for kept in runs for key in self.keys(recipe)]
        mean = sum(parts) / len(parts)
        if self.combine == "mean":
            return np.asarray(mean)
        variance = sum((part - mean) ** 2 for part in parts) / len(parts)
        return shrunk(np.asarray(mean), np.asarray(variance), INDEPENDENT * len(runs))


REFERENCE = Setting("sketch", KAPPA, "mean")
SETTINGS = [Setting(e, KAPPA, c) for e in EPOCHS for c in ("mean", "shrunk")]
"""Those that are chosen from. `κ` is not: the library's own has its reason."""

OTHER_KAPPAS = [Setting("sketch", k) for k in (KAPPA / 2, KAPPA * 2 / 3, KAPPA * 2)]
"""Shown, to say what another `κ` would have given."""

_factor = jax.jit(at._factor_body)  # B stays for the next κ


def solve_checkpoint(model, x, xq, local, ridges):
    """Scores with root mean square one per query, for each ridge, with one pass over the kernel."""
    n, _, r = local.roots.shape
    B, T = (jnp.zeros(shape, local.g.dtype) for shape in ((n * r, n * r), (n * r, n)))
    for start, block in at._row_blocks(model, x):
        B, T = at._fold_rows(B, T, block, local, jnp.asarray(start))
        jax.block_until_ready(T)
    thin, Y = at._fold_queries(at._query_block(model, xq, x), local)
    return [_normalised(_scores(B, T, thin, Y, local, ridge)) for ridge in ridges]


def _scores(B, T, thin, Y, local, ridge):
    lam = jnp.asarray(ridge, B.dtype)
    return at._scores(thin, at._solve_both(_factor(B, lam), Y), T, local.g, lam)


def _normalised(scores):
    size = jnp.sqrt(jnp.mean(scores**2, axis=1, keepdims=True))
    values = scores / jnp.where(size > 0, size, 1)
    if not jnp.isfinite(values).all():
        raise FloatingPointError("the factorisation failed")
    return values
