"""Chains of one-step edits: the note that they drifted, and the limit on it."""

from dataclasses import replace

import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.fitted._update import NOTABLE, check_drift, distance_limit, exceeds, follow, told
from dualfluence.problem._certificate import Stats

N = 40


def _case():
    p = problems.linear_problem(N, 3, 150, "softmax", ridge=2e-3)
    return p, cases.fit(p)


def _distance(update, p, gone):
    true = cases.retrain(p, cases.without(p, gone))
    return cases.relative(update.params(), true)


def test_a_chain_that_drifted_says_so_and_counts_its_edits():
    _, fitted = _case()
    noted = []
    for i in range(12):
        update = fitted.edit(dfl.Remove([3 * i, 3 * i + 1, 3 * i + 2]), progress=False)
        chain = follow(fitted.stats, update.certificate, met=False)
        fitted = update.commit()
        fitted = replace(fitted, stats=told(fitted.stats, chain))
        assert fitted.stats.edits == i + 1
        noted.append(any(f"after {i + 1} edits in a row" in note for note in fitted.stats.notes))
        assert noted[-1] == (i > 0 and update.certificate.relative_bound > NOTABLE)
    assert any(noted)
    assert "12 in a row" in repr(fitted.stats)


def test_the_limit_brings_every_answer_of_a_chain_within_it():
    p, fitted = _case()
    drift, further = 1e-3, 0
    for i in range(8):
        edit = dfl.Remove(np.arange(4 * i, 4 * i + 4))
        update = fitted.edit(edit, progress=False)
        if exceeds(update.certificate, drift):
            further += 1
            until = distance_limit(update.certificate, drift)
            update = fitted.edit(edit, until=until, progress=False)
        assert update.certificate.relative_bound <= drift
        fitted = update.commit()
    assert further > 0  # or the limit was never put to the test
    assert _distance(fitted, p, np.arange(32)) <= drift / (1 - drift)


def test_an_answer_that_met_a_tolerance_ends_the_chain():
    _, fitted = _case()
    update = fitted.edit(dfl.Remove([0]), progress=False)
    stats = told(update.stats, follow(fitted.stats, update.certificate, met=False))
    assert stats.edits == 1
    assert follow(stats, update.certificate, met=True) == (0, ())


def test_networks_without_a_certificate_have_no_limit_to_meet():
    nobody_knows = dfl.Certificate(0.0, 0.0, 1.0, 0.1, certified=False)
    assert exceeds(nobody_knows, 0.5)
    assert not exceeds(nobody_knows, None)
    assert follow(_stats(edits=3), nobody_knows, met=False) == (4, ())
    with pytest.raises(ValueError, match=r"no certificate\. Use steps="):
        distance_limit(nobody_knows, 0.1)


def _stats(edits):
    return Stats(1, 0, 1, True, 0.0, 0.0, "CG()", "asked for", (), edits)


@pytest.mark.parametrize("bad", [0, -1e-3, np.nan, np.inf, "small", True])
def test_a_limit_that_is_no_share_is_refused(bad):
    with pytest.raises(ValueError, match="edit: drift must be a positive share"):
        check_drift(bad)
