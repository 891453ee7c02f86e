"""Matrix products in full precision, where an accelerator's default is not enough.

TF32 and bfloat16 have three digits: conjugate gradients stall, and factors of a matrix that is positive
definite do not exist.
"""

import jax

HIGHEST = jax.lax.Precision.HIGHEST
"""For one product."""

PRECISION = "highest"
"""The same for `jax.default_matmul_precision`, which takes a name."""
