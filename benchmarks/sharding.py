"""Bytes per device of the paper's sharded form, on simulated devices: `python benchmarks/sharding.py`.

Each number of devices runs in a process of its own, on a `K` of `--size` rows in float32. Simulated
devices share the cores and the memory of one machine. The bytes are those of real devices, the seconds
are not, and are left out.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

DEVICES = (1, 2, 8)


def child(size: int, outputs: int, kind: str) -> dict[str, object]:
    """Removes a tenth of the points with the rows of `K_rr` on every device of this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dualfluence.apps.paper._mesh import retained_rows
    from dualfluence.operators import DenseOperator, KroneckerOperator

    each = outputs if kind == "dense" else 1
    n = size // each
    keep = np.flatnonzero(np.arange(n) % 10 != 3)[:-1]  # one fewer, so that nothing divides
    factor = np.random.default_rng(0).standard_normal((size, 8), dtype=np.float32)
    K = jnp.asarray(factor) @ jnp.asarray(factor).T
    op = (DenseOperator if kind == "dense" else KroneckerOperator)(K, outputs)
    block = retained_rows(op, keep, jax.devices())
    v = np.random.default_rng(1).standard_normal((len(keep), outputs), dtype=np.float32)
    rows = (keep[:, None] * each + np.arange(each)).ravel()
    flat = v.reshape(len(rows), -1)
    want = (factor[rows] @ (factor[rows].T @ flat)).reshape(v.shape)
    error = np.linalg.norm(np.asarray(block.mv(jnp.asarray(v))) - want) / np.linalg.norm(want)
    return {
        "kind": kind,
        "devices": len(jax.devices()),
        "points": n,
        "outputs": outputs,
        "retained": len(keep),
        "bytes_of_K": K.nbytes,
        "bytes_of_block": (len(keep) * each) ** 2 * 4,
        "bytes_per_device": block.bytes_per_device,
        "error_of_product": float(error),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16_000)
    parser.add_argument("--outputs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=("dense", "kronecker"))
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.size, args.outputs, args.child)))
        return
    from dualfluence.apps.compare._machine import environment
    from dualfluence.apps.paper._results import write_json

    rows = []
    for kind in ("dense", "kronecker"):
        for devices in DEVICES:
            flags = f"--xla_force_host_platform_device_count={devices}"
            options = ["--size", str(args.size), "--outputs", str(args.outputs), "--child", kind]
            done = subprocess.run(
                [sys.executable, __file__, *options],
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=True,
            )
            rows.append(json.loads(done.stdout))
            print(rows[-1], flush=True)
    if args.out:
        write_json(args.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
