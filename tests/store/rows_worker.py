"""Spools 512 MiB of rows and builds a store from them in a process that may not hold them: `FOLDER`."""

import resource
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402

folder, n, d = Path(sys.argv[1]), 128, 2**20
model = dfl.linearize(lambda p, x: jnp.tanh(x[:, :64] @ p), jnp.ones((64, 1), jnp.float32))
small = np.ones((8, 64), np.float32)
dfl.store.build(model, small, folder / "warm", tile=4, progress=False)  # threads and programs
status = Path("/proc/self/status").read_text()
held = int(status[status.index("VmData") :].split()[1]) * 1024
limit = held + 350 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def batches():
    for i in range(0, n, 8):
        yield np.random.default_rng(i).random((8, d), np.float32)


rows = dfl.store.spool(batches(), folder / "rows.npy")
assert rows.nbytes == 2**29
made = dfl.store.build(model, rows, folder / "k", tile=16, progress=False)
want = np.asarray(model.kernel(jnp.asarray(np.asarray(rows[:, :64])))).reshape(n, n)
np.testing.assert_allclose(made.operator().dense(), want, rtol=1e-4, atol=1e-4)
try:
    np.ones(2**27, np.float32)  # the limit holds
except MemoryError:
    print("bounded")
else:
    raise SystemExit("the limit of memory has no effect")
