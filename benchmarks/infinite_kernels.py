"""Time the analytic kernels on this machine; prints JSON.

    python benchmarks/infinite_kernels.py [--large]

`--large` adds the 10,000 x 10,000 fully connected kernel. First calls (with compilation) and
repeated calls are apart; every time is taken with the result ready.
"""

import json
import sys
import time

import jax
import numpy as np

from dualfluence import infinite


def seconds(call, repeats: int) -> tuple[float, list[float]]:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times[0], times[1:]


def fcnn() -> infinite.Network:
    dense = infinite.Dense(2.0, 0.1)
    return infinite.serial(*[dense, infinite.Relu()] * 3, dense)


def cnn() -> infinite.Network:
    block = [
        infinite.Conv(W_std=2.0, b_std=0.1),
        infinite.Relu(),
        infinite.AvgPool((2, 2), padding="SAME"),
    ]
    return infinite.serial(*block * 3, infinite.Flatten(), infinite.Dense(2.0, 0.1))


def measure(name: str, net: infinite.Network, x: np.ndarray, repeats: int) -> dict:
    first, later = seconds(lambda: net.kernel(x, progress=False), repeats)
    pairs = len(x) * (len(x) + 1) // 2
    return {
        "what": name,
        "dtype": str(x.dtype),
        "shape": list(x.shape),
        "first_s": first,
        "repeated_s": later,
        "best_s_per_distinct_pair": min([first, *later]) / pairs,
    }


def main() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(10_000, 784)).astype(np.float32)
    images = rng.normal(size=(16, 32, 32, 3)).astype(np.float32)
    results = [
        measure("FCNN, 3 hidden ReLU layers, NTK, symmetric", fcnn(), vectors[:2000], 3),
        measure("CNN, 3 x (Conv, ReLU, AvgPool), Flatten, NTK, symmetric", cnn(), images, 2),
    ]
    if "--large" in sys.argv:
        results.append(measure("FCNN, NTK, symmetric", fcnn(), vectors, 1))
    device = jax.devices()[0]
    print(json.dumps({"device": device.device_kind, "jax": jax.__version__, "results": results}))


if __name__ == "__main__":
    main()
