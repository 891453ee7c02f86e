"""The first part of the demo: points behind two predictions, and wrong labels found."""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...attribution.evaluate import mislabel_auc
from ...fitted._fit import fit
from ...fitted._fitted import Fitted
from ..compare._removals import Removals

STRONGEST = 8
"""Helpful and harmful points shown for a query."""

FLIPPED = 0.1
"""Share of the labels that are made wrong on purpose."""

SUSPECTS = 12
"""Most suspicious labels shown."""


def tell(case: Removals, seed: int) -> dict[str, Any]:
    """Numbers of the story; pictures are those of the data set."""
    outputs = case.outputs(case.params, case.x_test)
    right = outputs.argmax(axis=1) == np.asarray(case.y_test)
    # One that the model gets wrong and one that it gets right, the first of each.
    chosen = [int(np.flatnonzero(mask)[0]) for mask in (~right, right) if mask.any()]
    queries, first = _explain(case.fitted, case, chosen, outputs)
    return {
        "test_accuracy": float(right.mean()),
        "chosen": chosen,
        "queries": queries,
        "first_seconds": first,
        "labels": _audit(case, chosen, seed),
    }


def _explain(
    fitted: Fitted, case: Removals, chosen: list[int], outputs: np.ndarray
) -> tuple[list[dict[str, Any]], float]:
    """The strips of each query, and the seconds of the attribution, its compilation included."""
    labels = np.asarray(case.y_test)[chosen]
    start = time.perf_counter()
    found = fitted.attribute(case.x_test[np.asarray(chosen)], labels, progress=False)
    first = time.perf_counter() - start
    top = found.top(min(STRONGEST, len(case.y)))
    strips = [
        {
            "test_index": index,
            "label": int(labels[q]),
            "answer": int(outputs[index].argmax()),
            **{
                kind: [
                    {"index": int(i), "label": int(case.y[int(i)]), "effect": float(v)}
                    for i, v in zip(side.indices[q], side.values[q], strict=True)
                ]
                for kind, side in (("helpful", top.helpful), ("harmful", top.harmful))
            },
        }
        for q, index in enumerate(chosen)
    ]
    return strips, first


def _audit(case: Removals, chosen: list[int], seed: int) -> dict[str, Any]:
    """Labels made wrong at random, and how suspicious each looks to the model trained without it.

    The effects on the chosen queries come along unused, so that the programs are those of `_explain`.
    """
    rng, n = np.random.default_rng(seed), len(case.y)
    wrong, classes = np.zeros(n, bool), case.fitted.num_outputs
    wrong[rng.choice(n, max(1, round(FLIPPED * n)), replace=False)] = True
    y = np.where(wrong, (case.y + rng.integers(1, classes, n)) % classes, case.y)
    K = case.fitted.kernel_op
    fitted = fit(case.model, case.x, y, loss=case.loss, ridge=case.ridge, kernel=K, progress=False)
    queries = np.asarray(chosen)
    found = fitted.attribute(case.x_test[queries], case.y_test[queries], progress=False)
    outputs = jnp.asarray(found.outputs_without)
    suspicion = np.asarray(fitted.loss.value(outputs, fitted.data.targets))
    order = np.argsort(-suspicion, kind="stable")[:SUSPECTS]
    return {
        "flipped": int(wrong.sum()),
        "auc": mislabel_auc(suspicion, wrong),
        "suspects": [
            {
                "index": int(i),
                "given": int(y[i]),
                "truth": int(case.y[i]),
                "said": int(outputs[int(i)].argmax()),
                "wrong": bool(wrong[i]),
            }
            for i in order
        ],
    }
