"""The training points behind predictions."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ._data import Data, fit_model


def explain(
    model: Any,
    data: Data,
    *,
    ridge: float,
    k: int = 8,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fit, attribute the queries' losses, and keep the strongest points of each."""
    start = time.perf_counter()
    report(f"fitting {len(data.x)} points")
    fitted = fit_model(model, data, ridge)
    report(f"leaving out each of {len(data.x)} points")
    result = fitted.attribute(data.xq, data.yq, progress=False)
    top = result.top(min(k, len(data.x)))
    outputs = np.asarray(fitted.predict(data.xq))
    return {
        "attribution": result.with_features(data.x, data.y, data.xq, data.yq),
        "top": top,
        "predictions": outputs.argmax(axis=1) if data.is_classes else outputs,
        "data": data,
        "notes": result.notes,
        "ridge": ridge,
        "seconds": time.perf_counter() - start,
    }
