"""Audits of plain points, beside refits of each point in NumPy."""

import numpy as np

import dualfluence as dfl
from dualfluence import adapters, attribution

from .table import each, raises, row


@row("audit", *each("attribution", "Audit", "num_points counts flagged expected_precision"))
@row(*each("attribution", "Audit", "label_quality mended top scores rows to_pandas"))
@row("attribution.Finding", shared=True)
def findings(at):
    x, y = np.asarray(at.x), np.where(np.arange(at.n) % 2, "yes", "no")
    if at.n < 3:
        with raises(ValueError, "at least"):
            dfl.audit(None, x, y)
        return
    found = dfl.audit(None, at.x, y, x_test=at.x[:1])
    assert isinstance(found, attribution.Audit)
    np.testing.assert_equal(found.num_points, at.n)
    assert sum(found.counts.values()) == len(found.findings)
    first = found.top(kind="leak")[0]
    assert isinstance(first, attribution.Finding)
    np.testing.assert_equal((first.index, first.partner), (0, 0))
    np.testing.assert_allclose(found.label_quality + found.wrong, 1)
    mended = np.where(np.isin(np.arange(at.n), found.flagged), "?", y)
    assert np.all((mended == "?") | (found.mended == y))
    expected = found.wrong[found.flagged].mean() if len(found.flagged) else np.nan
    np.testing.assert_allclose(found.expected_precision, expected)
    np.testing.assert_array_equal(found.scores()["wrong"], found.wrong)
    assert len(list(found.rows())) == len(found.findings)
    try:
        import pandas
    except ImportError:
        with raises(ImportError, "pip install pandas"):
            found.to_pandas()
    else:
        assert isinstance(found.to_pandas(), pandas.DataFrame)


@row("audit", shared=True)
def left_out_outputs(at):
    """Of a fit by squared error: outputs at each point of the model fitted without it."""
    if at.n < 4:
        return
    found = dfl.audit(at.fitted)
    np.testing.assert_equal(found.task, "regression")
    i, J, f0 = at.n // 2, at.J, at.f0
    keep = np.delete(np.arange(at.n), i)
    rows = J[keep].reshape(-1, J.shape[2])
    rest = (np.asarray(at.y, float)[keep] - f0[keep]).ravel()
    H = rows.T @ rows / (at.n - 1) + at.ridge * np.eye(J.shape[2])
    theta = np.linalg.solve(H, rows.T @ rest / (at.n - 1))
    at.close(found.left_out[i], f0[i] + J[i] @ theta, 30)


@row("adapters.HashedText", once=True)
def hashed_text(at):
    rows = adapters.HashedText()(["one text", "one text", "another"])
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1)
