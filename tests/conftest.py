"""Strict settings for every test: float64, checked shapes and types.

Tests compile many small programs and run each once: they compile fast rather than well, here and in
the processes that tests start.
"""

import os

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

install_import_hook("dualfluence", "beartype.beartype")


@pytest.fixture(autouse=True)
def quick_compiles():
    """A test that runs longer than it compiles may switch optimisation on for itself."""
    yield
    jax.config.update("jax_disable_most_optimizations", True)
