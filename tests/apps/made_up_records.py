"""Records of the paper's experiments that no run has made."""

from dualfluence.apps.compare._names import (
    COMPARED,
    ITERATED,
    ONE_STEP,
    RANDOM,
    RELEASED,
    RETRAINED,
)
from dualfluence.apps.paper import _published as published
from dualfluence.apps.paper._config import as_json, configure
from dualfluence.apps.paper._results import plain


def made_up_fig1(slowness):
    """A results file with the published distances, ours `slowness` times as fast."""
    names = (*COMPARED, *RELEASED)
    accuracy = {n: {"forgotten": 0.7, "test": 0.8} for n in (*names, RANDOM, RETRAINED)}
    distance = dict.fromkeys((*names, RANDOM), 1e-5) | {ONE_STEP: 1e-7, ITERATED: 1e-8}
    seconds = {n: 0.1 if n in (ONE_STEP, ITERATED) else 0.1 * slowness for n in names}
    both = ("published", "exact")
    pieces = {}
    for row in ("fcnn", "cnn"):
        pieces[f"{row}/training"] = {"num_devices": 1, "descent_to_optimum": 1e-4}
        for percent in published.PERCENTAGES:
            pieces[f"{row}/{percent}"] = {
                "warm_seconds": {n: [t, 1.1 * t] for n, t in seconds.items()},
                "distance": {a: dict.fromkeys(both, distance) for a in both},
                "accuracy": dict.fromkeys(both, accuracy),
                "retrained_apart": 2e-4,
            }
            pieces[f"{row}/{percent}/cold"] = {"cold_seconds": dict(seconds)}
    return {
        "experiment": "fig1",
        "scale": "paper",
        "complete": True,
        "seed": 0,
        "config": plain(as_json(configure("fig1", "paper"))),
        "environment": {"device": "a device", "num_devices": 1, "commit": None, "finished": "now",
                        "versions": {"jax": "1"}},
        "pieces": {k: {"seconds": 1.0, "device": "d", "values": v} for k, v in pieces.items()},
    }  # fmt: skip
