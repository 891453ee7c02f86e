"""These tests compile many networks to run each once: compile them without optimising."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
