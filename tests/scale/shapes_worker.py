"""Every answer of a fit on four simulated devices, so that the programs which XLA writes can be read.

Sizes are such that no array is as large as `K` but `K` itself: what takes blocks of columns takes small ones.
"""

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.attribution import _ridge_path_mesh  # noqa: E402
from dualfluence.linalg import _spread  # noqa: E402
from dualfluence.unlearning import _anchor_mesh, _engine  # noqa: E402

N, C = 33, 3
_engine.MAX_GONE = _engine.MAX_BATCH = 4
_ridge_path_mesh.COLUMNS_AT_ONCE = _anchor_mesh.COLUMNS_AT_ONCE = 12
_spread.BLOCK = 4


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


rng = np.random.default_rng(0)
params = {
    "inner": jnp.asarray(rng.normal(size=(5, 4))),
    "outer": jnp.asarray(rng.normal(size=(4, C))),
}
x, y = rng.normal(size=(N, 5)), rng.integers(0, C, N)
fitted = dfl.fit(
    dfl.linearize(network, params), x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=0.05,
    kernel="dense", mesh=jax.devices(), progress=False,
)  # fmt: skip
fitted.attribute(x[:2], y[:2], block_size=4, progress=False)
fitted.attribute_groups([[0, 1]], x[:2], y[:2], progress=False)
fitted.ridge_path([0.05])
engine = dfl.unlearning.Engine(fitted, drift=100.0)
engine.accept(engine.propose([dfl.Remove([3])]))
engine.accept(engine.propose([dfl.Remove([4])], until=1e-2))
assert engine.work.how.startswith("closed form"), engine.work.how
