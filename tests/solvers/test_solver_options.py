"""Every option of every solver is checked where the solver is made."""

import dataclasses

import pytest

import dualfluence as dfl
from dualfluence import primal
from dualfluence.solvers import Refined

SOLVERS = [
    dfl.Auto(), dfl.CG(), dfl.Cholesky(), Refined(dfl.CG()), primal.CG(), primal.LiSSA(),
    primal.Arnoldi(), primal.Nystrom(), primal.KFAC(), primal.EKFAC(),
]  # fmt: skip
OPTIONS = [
    (type(solver), field.name, getattr(solver, field.name))
    for solver in SOLVERS
    for field in dataclasses.fields(solver)
    if field.init
]


def made(kind, **options):
    return (
        kind(dfl.CG(), **options) if kind is Refined and "inner" not in options else kind(**options)
    )


WRONG = {int: -1, float: float("nan")}
"""Of the right type: what is of another, beartype refuses here before the solver can."""


@pytest.mark.parametrize(
    ("kind", "name", "default"), OPTIONS, ids=[f"{k.__name__}-{n}" for k, n, _ in OPTIONS]
)
def test_an_option_out_of_range_is_refused_by_name(kind, name, default):
    made(kind, **{name: default})
    if type(default) in (bool, str, dfl.CG):  # no range
        return
    wrong = -1.0 if name == "scale" else WRONG[int if default is None else type(default)]
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} must "):
        made(kind, **{name: wrong})


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (dfl.CG, "max_steps", 0),
        (primal.LiSSA, "scale", float("inf")),
        (primal.Nystrom, "seed", 2**32),
        (primal.CG, "rtol", 1.0),
    ],
)
def test_numbers_at_the_edge(kind, name, wrong):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} must "):
        kind(**{name: wrong})


def test_zero_is_a_size_that_nothing_is_within():
    assert dfl.Auto(direct_size=0, gather_size=0).direct_size == 0
    assert dfl.Cholesky(refinements=0, max_refinements=0).refinements == 0
