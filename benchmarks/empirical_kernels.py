"""Time the empirical NTK of a 784-1024-1024-1024-10 network: structured against Jacobian tiles.

Prints one JSON object. First calls (tracing, compilation) and repeated calls are given apart, and
every time waits for the result. Jacobian tiles are timed on a small square and extrapolated by the
number of pairs, as they cost the same for every pair.
"""

import argparse
import json
import time
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from dualfluence.kernels import empirical_kernel, traced_kernel

WIDTHS = (784, 1024, 1024, 1024, 10)


def make_network(seed=0):
    """Parameters and the function, in float32."""
    rng = np.random.default_rng(seed)
    params = [
        {
            "W": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32),
            "b": jnp.zeros(b, jnp.float32),
        }
        for a, b in pairwise(WIDTHS)
    ]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["W"] + layer["b"])
        return x @ params[-1]["W"] + params[-1]["b"]

    return apply, params


def make_points(n, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, WIDTHS[0])), jnp.float32)


def measure(call, repeats):
    """Seconds of the first call, and the least and the median of the repeated ones."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    warm = sorted(seconds[1:])
    return {"first_s": seconds[0], "warm_min_s": warm[0], "warm_median_s": warm[len(warm) // 2]}


def run(sizes, jacobian_points, jacobian_bytes, repeats):
    apply_fn, params = make_network()
    device = jax.devices()[0]
    result = {
        "network": "-".join(map(str, WIDTHS)),
        "dtype": "float32",
        "jax": jax.__version__,
        "device": f"{device.platform}: {device.device_kind}",
    }
    per_pair = None
    if jacobian_points:
        x = make_points(jacobian_points)
        jacobian = measure(
            lambda: (
                empirical_kernel(
                    apply_fn, params, x, x, method="jacobian", tile_bytes=jacobian_bytes
                ).value
            ),
            1,
        )
        per_pair = jacobian["warm_min_s"] / jacobian_points**2
        result["jacobian_tiles"] = {"points": jacobian_points, **jacobian}
    for n in sizes:
        x = make_points(n)
        other = make_points(n, seed=2)
        entry = {
            "symmetric": measure(lambda x=x: empirical_kernel(apply_fn, params, x).value, repeats),
            "two_sets": measure(
                lambda x=x, y=other: empirical_kernel(apply_fn, params, x, y).value, repeats
            ),
            "traced": measure(lambda x=x: traced_kernel(apply_fn, params, x), repeats),
        }
        if per_pair is not None:
            entry["jacobian_extrapolated_s"] = per_pair * n * n
            entry["times_faster"] = per_pair * n * n / entry["symmetric"]["warm_median_s"]
        result[f"{n}x{n}"] = entry
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--jacobian-points", type=int, default=20, help="0 leaves them out")
    parser.add_argument("--jacobian-bytes", type=int, default=2 * 2**30)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    result = run(args.points, args.jacobian_points, args.jacobian_bytes, args.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
