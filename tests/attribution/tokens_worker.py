"""Scores 120 sequences over 50,000 words in a process that may not hold their outputs: `METHOD`.

All outputs are 768 MB. The limit is that of one sequence's backward passes and some room.
"""

import resource
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import token_nets as nets  # noqa: E402

from dualfluence.attribution import Trajectory  # noqa: E402

N, T, V = 120, 32, 50_000
ROOM = 640 * 2**20
assert 4 * N * T * V > ROOM

x, y, xq, yq = nets.data(n=N, q=2, length=T, vocabulary=V)
params = nets.params(0, V, 4, T, jnp.float32)
run = Trajectory(
    nets.net, [params], [10], 0.1, trainable=lambda path, leaf: path[0].key not in ("words", "out")
)
options = {"method": sys.argv[1], "progress": False, "tokens": True, "probes": 2}
run.attribute(x[:1], y[:1], xq[:1], yq[:1], **options)  # threads and the compiler
status = Path("/proc/self/status").read_text()
held = int(status[status.index("VmData") :].split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + ROOM, held + ROOM))
scores = run.attribute(x, y, xq, yq, **options)
np.testing.assert_allclose(scores.tokens.sum(2), scores.values, rtol=1e-3, atol=1e-4)
try:
    np.ones(N * T * V, np.float32)  # the limit holds
except MemoryError:
    print("bounded")
else:
    raise SystemExit("the limit of memory has no effect")
