"""These tests compile many networks once each: compile them fast rather than well."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compiles():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
