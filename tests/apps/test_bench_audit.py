"""The benchmark of audits: errors are planted as it says, and plots and tables take its record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.host]

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cleaning(monkeypatch):
    pytest.importorskip("cleanlab")
    monkeypatch.syspath_prepend(str(FOLDER))
    from cleaning import data

    return data


@pytest.mark.parametrize("kind", ["uniform", "by class pair", "by neighbourhood"])
def test_a_tenth_of_the_classes_is_made_wrong(cleaning, kind):
    case = cleaning.draw_case(cleaning.pools(None, True, ["digits"])["digits"], kind, 3)
    assert 15 <= case.wrong.sum() <= 15 + cleaning.GROUP - 1
    pairs = {(int(t), int(g)) for t, g in zip(case.truth, case.given, strict=True) if t != g}
    assert all(0 <= given < 10 for _, given in pairs)
    if kind == "by class pair":
        assert len({truth for truth, _ in pairs}) == len(pairs)


def test_wrong_neighbours_agree_with_each_other(cleaning):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(50, 2)), rng.normal(size=(50, 2)) + 20])
    y = np.repeat([0, 1, 2], [50, 25, 25])
    for group in cleaning.groups_of_neighbours(x, y, np.random.default_rng(1)):
        assert len(set(y[group])) == 1
        same = np.flatnonzero(y == y[group[0]])
        apart = np.sum((x[same] - x[group[0]]) ** 2, axis=1)
        assert set(group) == set(same[np.argsort(apart)[: len(group)]])
        break


def test_numbers_are_swapped_far_and_shifted_together(cleaning):
    pool = cleaning.pools(None, True, ["diabetes"])["diabetes"]
    swapped = cleaning.draw_case(pool, "uniform", 0)
    off = np.abs(swapped.given - swapped.truth)[swapped.wrong]
    assert swapped.wrong.sum() == 15
    assert off.min() > np.std(swapped.truth)
    assert set(swapped.given) <= set(swapped.truth)
    shifted = cleaning.draw_case(pool, "by neighbourhood", 0)
    off = np.abs(shifted.given - shifted.truth)[shifted.wrong]
    np.testing.assert_allclose(off, 1.5 * np.std(shifted.truth))


@pytest.mark.slow
def test_a_small_run_writes_record_and_plots(tmp_path):
    pytest.importorskip("cleanlab")
    out = tmp_path / "audit.json"
    command = [sys.executable, FOLDER / "audit.py", "--smoke", "--sets", "breast cancer"]
    done = subprocess.run(
        [*command, "--out", out], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(out.read_text())
    row = record["table"]["breast cancer: uniform"]["rows"]["dualfluence.audit"]
    assert row["auc"][0] > 0.9
    count, expected, wrong = np.array(
        record["calibration_classes"]["dualfluence.audit"]["uniform"]["bins"]
    )
    assert count.sum() == 300
    assert wrong.sum() == 30
    assert 0 < expected.sum() < 100
    assert (tmp_path / "audit.svg").exists()
    assert (tmp_path / "audit_calibration.svg").exists()
