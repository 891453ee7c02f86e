"""Cold runtime: first calls in a new process, compilation included.

The time does not include starting Python, initialising the libraries of the device, and loading the
trained state with its kernel. Compiled functions are dropped before each method. The compiler also
remembers which variant of a product is fastest. This favours later methods, so ours come first. A
stored Jacobian is not timed here, because it pays only after many requests.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...fitted._io import load
from ...kernels._linearized import linearize
from ..compare._methods import Settings, TrainedCase
from ..compare._names import ITERATED, ONE_STEP, PAPER, PARAMETER, RELEASED, SHARDED
from ..compare._networks import Architecture, make_network
from ..compare._timing import time_call
from ._config import Row
from ._methods import make_methods, make_released

STATE, PARAMS, TARGETS = "state.npz", "params.npz", "targets.npy"
REQUEST, ANSWER = "request.json", "answer.json"
TIMEOUT_SECONDS = 1800.0
"""Seconds to wait for the new process."""
ORDER = (ONE_STEP, ITERATED, PAPER, SHARDED, PARAMETER, *RELEASED)


def measure(
    folder: Path,
    gone: np.ndarray,
    settings: Settings,
    precision: str,
    row: Row,
    *,
    released: Sequence[str],
) -> dict[str, Any]:
    """Seconds of the first call of every method on this forget set, measured in a new process.

    `released` names the methods of `RELEASED` to time.
    """
    request = {
        "gone": gone.tolist(),
        "settings": settings._asdict(),
        "precision": precision,
        "network": asdict(row.network),
        "released": list(released),
    }
    (folder / REQUEST).write_text(json.dumps(request))
    (folder / ANSWER).unlink(missing_ok=True)
    # The parent holds most of the device's memory; no compiled code may come from a cache.
    settings_env = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_ENABLE_X64": "1" if jax.config.read("jax_enable_x64") else "0",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()", str(folder)],
        env=os.environ | settings_env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"cold run failed:\n{done.stderr[-2000:]}")
    return json.loads((folder / ANSWER).read_text())


def main() -> None:
    """The child: load, then time each method's first call."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text())
    net = make_network(Architecture(**request["network"]))
    with np.load(folder / PARAMS) as file:
        leaves = [jnp.asarray(file[name]) for name in file.files]
    y = np.load(folder / TARGETS)
    with jax.default_matmul_precision(request["precision"]):
        shape = jax.eval_shape(
            lambda k: net.init(k, _input_shape(folder), outputs=_outputs(folder)), jax.random.key(0)
        )
        params = jax.tree.unflatten(jax.tree.structure(shape), leaves)
        fitted = load(folder / STATE, linearize(net.apply, params), progress=False)
        assert fitted.reference is not None
        trained = fitted.reference.params
        model = TrainedCase(fitted, trained, y, Settings(**request["settings"]))
        methods, slow = make_methods(model), make_released(model)
        methods |= {name: slow[name] for name in request["released"]}
        jax.block_until_ready((fitted.kernel_op, _initialise_libraries()))
        gone = np.asarray(request["gone"])
        seconds = {}
        for name in [n for n in ORDER if n in methods]:
            jax.clear_caches()
            seconds[name] = time_call(lambda m=methods[name]: m(gone)[0]).seconds
    (folder / ANSWER).write_text(json.dumps({"cold_seconds": seconds}))


def _initialise_libraries() -> Any:
    """A small product, factor, solve and convolution: each loads a library of the device."""
    eye = jnp.eye(64)
    factor = jnp.linalg.cholesky(eye @ eye)
    image = jnp.ones((1, 1, 8, 8))
    solved = jax.scipy.linalg.solve_triangular(factor, eye, lower=True)
    return solved, jax.lax.conv(image, image[..., :3, :3], (1, 1), "SAME")


def _input_shape(folder: Path) -> tuple[int, ...]:
    with np.load(folder / STATE) as file:
        return file["x"].shape[1:]


def _outputs(folder: Path) -> int:
    with np.load(folder / STATE) as file:
        return file["alpha"].shape[1]
