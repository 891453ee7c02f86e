"""Settings of `Trajectory` that are compared side by side."""

from typing import NamedTuple

import numpy as np

from dualfluence.attribution import KAPPA
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
