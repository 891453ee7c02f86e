"""A small model of digits, fitted once, sessions on it, and a count of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import datasets
from dualfluence.apps.compare._networks import fully_connected_from_zero
from dualfluence.apps.explore._session import Session
from dualfluence.apps.page._scene import Scene

POINTS, QUERIES = 40, 9


@pytest.fixture(scope="session")
def digits_scene():
    small = datasets.load("mnist-small")
    fitted = dfl.fit(
        fully_connected_from_zero((784, 24, 10), 0),
        jnp.asarray(small.x_train[:POINTS], float),
        small.y_train[:POINTS],
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=1e-2,
        progress=False,
    )
    xq, yq = np.asarray(small.x_test[:QUERIES], float), small.y_test[:QUERIES]
    return Scene(fitted, xq, yq, "mnist-small", "A network 784-24-10")


@pytest.fixture(scope="session")
def edited():
    """What the page promises of an edit: one step, and further ones above 1 %."""
    return lambda model, *edits: model.edit(list(edits), drift=1e-2, progress=False)


@pytest.fixture(scope="session")
def first(digits_scene):
    """What every visitor begins with; never edited."""
    return Session(digits_scene)


@pytest.fixture
def session(first):
    return first.another()


COMPILED = []
"""One entry for each program that was compiled."""

jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: (
        COMPILED.append(name) if name.endswith("backend_compile_duration") else None
    )
)


@pytest.fixture
def compiled():
    """How many programs were compiled so far."""
    return lambda: len(COMPILED)
