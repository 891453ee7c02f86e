"""Strict settings for every test: float64, checked shapes and types."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

install_import_hook("dualfluence", "beartype.beartype")
