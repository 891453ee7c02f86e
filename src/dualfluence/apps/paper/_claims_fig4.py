"""Fig. 4: claims about infinitely wide networks."""

from typing import Any

import numpy as np

from ..compare._names import ITERATED, ONE_STEP
from ._read import ROW_TITLES, r_squared, values
from ._verdicts import OURS, Claim, verdict

R_SQUARED = 0.999
"""Points count as lying on the diagonal above this R²; a threshold twice as far from 1 would accept a
visible spread."""


ACCURATE = "paper, section 4.4, paragraph 2, last sentence; figure 4"


def fig4_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for row in (r["name"] for r in results["config"]["rows"]):
        title = f"Infinitely wide {ROW_TITLES[row].split(',')[0]}"
        for training, words in (("published", "as published"), ("exact", "to the optimum")):
            found = values(results, f"{row}/{training}")
            if found is None:
                continue
            step = found["estimates"][ONE_STEP]
            outputs = r_squared(found["actual_outputs"], step["outputs"])
            actual, evaluated = found["actual_loss"], np.ravel(step["loss_evaluated"])
            alone, with_ridge = (
                r_squared(actual, evaluated + extra) for extra in (0.0, step["ridge_term"])
            )
            first_order = {
                key: r_squared(actual, step[key])
                for key in ("loss_with_ridge", "loss_without_ridge")
            }
            claims.append(
                Claim(
                    f"{title}, trained {words}: estimated changes of outputs lie on the diagonal "
                    f"(R² at least {R_SQUARED}).",
                    ACCURATE,
                    verdict(outputs >= R_SQUARED),
                    f"R² = {outputs:.6f}; iterated "
                    f"{r_squared(found['actual_outputs'], found['estimates'][ITERATED]['outputs']):.6f}",
                    "4.4 outputs",
                )
            )
            claims.append(
                Claim(
                    f"{title}, trained {words}: estimated changes of the loss (eq. 9) lie on the diagonal "
                    f"(R² at least {R_SQUARED}).",
                    ACCURATE,
                    verdict(first_order["loss_with_ridge"] >= R_SQUARED),
                    f"R² = {first_order['loss_with_ridge']:.4f}; without the ridge term "
                    f"{first_order['loss_without_ridge']:.4f}; evaluated at the estimated outputs, not to "
                    f"first order, {alone:.4f}",
                    "4.4 loss",
                )
            )
            claims.append(
                Claim(
                    f"{title}, trained {words}: the small offset of the estimated losses is the "
                    "ridge term, which is part of the estimate (eq. 9) but not of the actual "
                    "change.",
                    OURS,
                    verdict(alone >= with_ridge),
                    f"ridge term {step['ridge_term']:.3g} for every query; R² with the loss evaluated "
                    f"at the estimated outputs {alone:.4f}, with the ridge term added "
                    f"{with_ridge:.4f}; to first order, where curvature is missing too, "
                    f"{first_order['loss_without_ridge']:.4f} and "
                    f"{first_order['loss_with_ridge']:.4f}",
                )
            )
    return claims
