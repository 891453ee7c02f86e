"""How far a request walks through the house: which modules it passes, and in which order.

A reader who follows a call opens these files. `walk.py` traces them in a process of its own, because only
the first call of a process runs what JAX traces.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gates
import walk

pytestmark = pytest.mark.host

MOST = {"fit": 35, "edit": 30, "attribution": 35, "removal": 38}
"""Modules that a request may pass. A fit, an edit and an attribution are what users read first."""

ROOMS = ["fitted", "models", "kernels", "losses", "operators", "solvers", "problem", "dual"]
"""Rooms of a fit in the order of first entry: the user's model is wrapped and read, targets are checked, `K`
is made, a solver is picked, the objective is set up and solved. After `models`, which calls down for what it
needs, they come in the order of `ORDER` in `test_house.py`."""

STAGES = ["fitted._options", "fitted._setup", "fitted._run"]


@pytest.fixture(scope="module")
def walks():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env["JAX_ENABLE_X64"] = "0"
    command = [sys.executable, str(Path(walk.__file__)), "--json"]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def rooms(modules):
    """Rooms in the order of first entry; helpers that every room uses do not count."""
    found = dict.fromkeys(name.split(".")[0] for name in modules)
    return [room for room in found if room != "_support"]


@pytest.mark.parametrize("request_", gates.table(MOST, ["fit", "edit"]))
def test_a_request_passes_few_modules(walks, request_):
    modules = walks[request_][0]
    assert len(modules) <= MOST[request_], modules


def test_a_fit_enters_its_rooms_in_order(walks):
    assert rooms(walks["fit"][0]) == ROOMS


def test_only_the_kernel_is_entered_again_in_a_fit(walks):
    """The number of outputs, which targets are checked against, is known after the network has been traced.
    `K`, which may take hours, is made after that check. Both are work of `kernels`, so that `losses` comes
    between them: with all of `kernels` first, a wrong label would be found when `K` is there."""
    modules = [name for name in walks["fit"][0] if name.split(".")[0] in ROOMS[2:5]]
    turns = [room for room, _ in itertools.groupby(name.split(".")[0] for name in modules)]
    assert turns == ["kernels", "losses", "kernels", "operators"]


def test_a_fit_passes_each_stage_once(walks):
    stages = [name for name in walks["fit"][1] if name not in ("fitted._update", "fitted._fitted")]
    assert stages == STAGES


def test_an_attribution_goes_through_its_room(walks):
    modules = walks["attribution"][0]
    assert {"attribution._attribute", "attribution._leave_one_out"} <= set(modules)
    assert not [name for name in modules if name.startswith(("unlearning.", "primal."))]


def test_a_removal_starts_at_the_desk(walks):
    assert rooms(walks["removal"][0])[0] == "unlearning"


def test_only_calls_inside_the_package_are_seen():
    with walk.Walk() as seen:
        json.dumps([1])
        walk.dfl.Remove([1])
    assert "problem._edits" in seen.modules
    assert not [name for name in seen.modules if name.startswith("json")]
