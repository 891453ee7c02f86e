"""Reads the reference numbers (tests/data) and builds our networks from their descriptions."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dualfluence import infinite

DATA = Path(__file__).parents[1] / "data" / "infinite"


class Numbers:
    """`reference.npz`: inputs, kernels and layer descriptions; the others: 50 digits."""

    def __init__(self) -> None:
        with np.load(DATA / "reference.npz") as f:
            self.arrays = {k: f[k] for k in f.files if k != "layers_json"}
            self.nets = json.loads(str(f["layers_json"]))
        with np.load(DATA / "exact.npz") as f:
            self.exact = {k: f[k] for k in f.files}
        with np.load(DATA / "exact_diagonals.npz") as f:
            self.diagonals = {k: f[k] for k in f.files}

    def inputs(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        which = self.nets[name]["inputs"]
        return self.arrays[f"{which}/x1"], self.arrays[f"{which}/x2"]

    def kernels(self, name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays[f"{name}/{kind}_x1x2"], self.arrays[f"{name}/{kind}_x1x1"]

    def exact_kernels(self, name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
        return self.exact[f"{name}/{kind}_x1x2"], self.exact[f"{name}/{kind}_x1x1"]

    def exact_diagonal(self, name: str, kind: str) -> np.ndarray | None:
        """Every point with itself in 50 digits, where they were computed."""
        if f"{name}/{kind}" in self.diagonals:
            return self.diagonals[f"{name}/{kind}"]
        square = self.exact.get(f"{name}/{kind}_x1x1")
        return None if square is None else np.diag(square)


def build(layers: list[Any]) -> infinite.Network:
    """Our network for a list of `[name, arguments]` as Neural Tangents' stax takes them."""
    return infinite.serial(*[_layer(n, a) for n, a in layers if n not in ("FanOut", "FanInSum")])


def _layer(name: str, args: dict[str, Any]) -> Any:
    a = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
    if name == "parallel":
        return infinite.add(*[build(b) for b in args["branches"]])
    renamed = {
        "out_dim": "width",
        "out_chan": "width",
        "window_shape": "window",
        "attention_mechanism": "mechanism",
        "coef": "coefs",
    }
    a = {renamed.get(k, k): v for k, v in a.items()}
    if name == "Gelu":
        a = {}
    if name == "GlobalSelfAttention":
        for k in ("n_chan_out", "n_chan_key", "n_chan_val", "n_heads"):
            a.pop(k, None)
        a["mechanism"] = a["mechanism"].lower()
        a.pop("pos_emb_type", None)
        a["scaling"] = "linear" if a.pop("linear_scaling") else "sqrt"
    if name in ("AvgPool", "SumPool"):
        a.setdefault("strides", (1, 1))
    name = {"Sigmoid_like": "SigmoidLike"}.get(name, name)
    return getattr(infinite, name)(**a)
