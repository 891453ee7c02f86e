"""All rows; importing this fills `table.ROWS`."""

from . import (
    rows_adapters,
    rows_attribution,
    rows_audit,
    rows_fits,
    rows_infinite,
    rows_layers,
    rows_losses,
    rows_models,
    rows_operators,
    rows_primal,
    rows_records,
    rows_solvers,
    rows_store,
    rows_unlearning,
)

__all__ = [
    "rows_adapters",
    "rows_attribution",
    "rows_audit",
    "rows_fits",
    "rows_infinite",
    "rows_layers",
    "rows_losses",
    "rows_models",
    "rows_operators",
    "rows_primal",
    "rows_records",
    "rows_solvers",
    "rows_store",
    "rows_unlearning",
]
