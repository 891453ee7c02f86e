"""Requests after the first compile nothing, whatever their indices and count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence._support.compile import filter_jit
from dualfluence.dual import _newton


@pytest.mark.parametrize("solver", [dfl.CG(), dfl.Cholesky()], ids=repr)
def test_later_requests_compile_nothing(solver):
    p = problems.linear_problem(17, 3, 80, "softmax", ridge=0.05)  # a shape of its own
    fitted = cases.fit(p)
    fitted.edit(dfl.Remove([0]), solver=solver)
    before = _newton.COUNTERS["traces"]
    requests = [
        dfl.Remove([5]),
        dfl.Remove(np.arange(9)),
        dfl.Reweight([1, 2], [0.5, 2.0]),
        dfl.Relabel([3], [1]),
        [dfl.Remove([3, 4]), dfl.Relabel([6], [0])],
    ]
    for edit in requests:
        fitted.edit(edit, solver=solver)
    fitted.edit(dfl.Remove([1]), solver=solver).commit().edit(dfl.Remove([2]), solver=solver)
    assert _newton.COUNTERS["traces"] == before


def test_attributions_after_removals_compile_nothing():
    p = problems.linear_problem(17, 3, 80, "softmax", ridge=0.05)
    fitted, programs = cases.fit(p), []
    gone = np.arange(17)
    fitted.edit(dfl.Remove([0]))
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: name.endswith("backend_compile_duration") and programs.append(name)
    )

    def check(model, kept):
        values = model.attribute(p.x_q, p.y_q, progress=False).values
        for i in kept:
            change = np.asarray(model.edit(dfl.Remove([i])).delta_loss(p.x_q, p.y_q))
            np.testing.assert_allclose(values[:, i], change, rtol=1e-7, atol=1e-10)

    model = fitted
    for count in (1, 2, 9):  # 16, 14 and 5 of 17 rows are left: filled up to 17, 17 and 8
        first, gone = gone[:count], gone[count:]
        model = model.edit(dfl.Remove(first), drift=1e-8).commit()
        before = len(programs)
        check(model, gone[-2:])
        assert (len(programs) == before) == (count == 2)


def test_the_counter_counts():
    p = problems.linear_problem(13, 3, 80, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    before = _newton.COUNTERS["traces"]
    fitted.edit(dfl.Add(p.x_q, p.y_q))  # new shape: must be seen
    assert _newton.COUNTERS["traces"] > before


def test_auto_explains_its_choice():
    p = problems.linear_problem(13, 3, 80, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    assert "direct and exact" in fitted.stats.reason
    update = fitted.edit(dfl.Remove([1]), solver=dfl.Auto(direct_size=10))
    assert update.stats.solver.startswith("CG")
    assert "39 > 10" in update.stats.reason


def test_functions_of_arrays_and_of_other_things_agree():
    """With arrays alone a call goes to `jax.jit`, with anything else to `equinox.filter_jit`."""
    counted = []

    @filter_jit
    def power(x, exponent):
        counted.append(exponent)
        return x**exponent

    x = jnp.arange(3.0)
    for exponent in (jnp.asarray(2), jnp.asarray(3), 2, 3):
        np.testing.assert_array_equal(power(x, exponent), np.arange(3.0) ** int(exponent))
    assert len(counted) == 3  # the arrays share a program, the numbers are part of theirs
    assert counted[1:] == [2, 3]
    doubled = jax.jit(lambda x: power(x, jnp.asarray(2)) * 2)
    np.testing.assert_array_equal(doubled(x), [0, 2, 8])
