"""Kernels of finite and of infinitely wide networks: time per kernel, and memory over the result.

python benchmarks/kernels.py --out benchmarks/results/kernels_cpu.json --peer-python …
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from measure import median_repeat, num_cores, plain_relu_network, time_first_and_repeats

from dualfluence import infinite
from dualfluence.apps.compare._machine import describe_machine
from dualfluence.apps.compare._networks import Architecture, make_network
from dualfluence.apps.paper._results import write_json
from dualfluence.kernels import empirical_kernel, traced_kernel

MIB = 2**20
WIDTHS = (784, 1024, 1024, 1024, 10)
FCNN, CNN = Architecture("fcnn", 3, None), Architecture("cnn", 3, None)
PEER_SCRIPT = Path(__file__).with_name("peer_neural_tangents.py")
JACOBIAN_BYTES = 1024 * MIB
"""Memory budget of the Jacobian tiles: the Jacobian of one point takes 116 MiB."""
WARM_UP_POINTS = 6
"""So many points that their Jacobians do not fit; more points would only repeat the same tiles."""
MEMORY_BYTES = 128 * MIB
"""Budget of the memory measurements."""
SAMPLE_SECONDS = 1e-3
"""Time between measurements of the memory; with twice this value, a short peak may be missed."""


def bench_kernels(
    *,
    points: tuple[int, ...] = (50, 500),
    jacobian_points: int = 20,
    vectors: int = 2000,
    images: int = 16,
    repeats: int = 5,
    large: bool = False,
    peer_python: str | None = None,
) -> dict[str, Any]:
    """Times of exact kernels, float32; first calls (tracing, compilation) and repeats apart.

    **Arguments:**

    - `points`: training points of the finite network's kernels.
    - `jacobian_points`: points whose kernel is also made by Jacobian tiles, which cost the same for
      every pair and so give the time for more points; 0 leaves them out.
    - `vectors`, `images`: inputs of the infinitely wide networks.
    - `large`: also 10,000 vectors; on an accelerator also 2000 points and 1000 images.
    - `peer_python`: a Python with Neural Tangents (`benchmarks/peer_neural_tangents.py` says how
      to make one), to time it in the same run.
    """
    accelerated = jax.devices()[0].platform != "cpu"
    if large and accelerated:
        points = (*points, 2000)
    result: dict[str, Any] = {
        "benchmark": "kernels",
        "machine": {**describe_machine(), "cores": num_cores()},
        "config": {
            "dtype": "float32",
            "finite": "-".join(map(str, WIDTHS)),
            "fcnn": "784 inputs, 3 x (Dense, ReLU), Dense",
            "cnn": "32 x 32 x 3 images, 3 x (Conv 3x3, ReLU, AvgPool 2x2), Flatten, Dense",
            "kernel": "NTK",
        },
        "finite": bench_finite(points, jacobian_points, repeats),
        "fcnn": [_time_infinite(make_network(FCNN), _normal(vectors, WIDTHS[0]), repeats)],
        "cnn": [_time_infinite(make_network(CNN), _normal(images, 32, 32, 3), repeats)],
    }
    if large:
        result["fcnn"].append(_time_infinite(make_network(FCNN), _normal(10_000, WIDTHS[0]), 1))
    if large and accelerated:
        result["cnn"].append(_time_infinite(make_network(CNN), _normal(1000, 32, 32, 3), 1))
    result["memory"] = bench_memory()
    if peer_python is not None:
        sizes = {"finite": points[0], "vectors": vectors, "images": images, "repeats": repeats}
        result["peer"] = run_peer(peer_python, {**sizes, "widths": WIDTHS, "cnn_repeats": 1})
        result["ratios"] = _ratios(result)
    return result


def bench_finite(points: tuple[int, ...], jacobian_points: int, repeats: int) -> dict[str, Any]:
    """Whole kernels of one and of two sets of points, traced kernels, and Jacobian tiles."""
    apply, params = plain_relu_network(WIDTHS)

    def kernel(*x: Array, **options: Any) -> Any:
        return empirical_kernel(apply, params, *x, progress=False, **options).value

    result: dict[str, Any] = {}
    if jacobian_points:
        x = _normal(jacobian_points, WIDTHS[0], seed=1)
        options: dict[str, Any] = {"method": "jacobian", "tile_bytes": JACOBIAN_BYTES}
        jax.block_until_ready(kernel(x[:WARM_UP_POINTS], **options))  # compiles the same tiles
        tiles = time_first_and_repeats(lambda: kernel(x, **options), 0)
        repeat = {"repeat": [tiles["first"]], "repeat_cpu": [tiles["first_cpu"]]}
        result["jacobian_tiles"] = {"points": jacobian_points, "bytes": JACOBIAN_BYTES, **repeat}
    sizes = []
    for n in points:
        x, y = _normal(n, WIDTHS[0], seed=1), _normal(n, WIDTHS[0], seed=2)
        entry = {
            "points": n,
            "one_set": time_first_and_repeats(lambda x=x: kernel(x), repeats),
            "two_sets": time_first_and_repeats(lambda x=x, y=y: kernel(x, y), repeats),
            "traced": time_first_and_repeats(
                lambda x=x: traced_kernel(apply, params, x, progress=False), repeats
            ),
        }
        if jacobian_points:
            whole = median_repeat(result["jacobian_tiles"]) * (n / jacobian_points) ** 2
            entry["jacobian_tiles_extrapolated_seconds"] = whole
            entry["times_faster_than_jacobian_tiles"] = whole / median_repeat(entry["one_set"])
        sizes.append(entry)
    result["sizes"] = sizes
    return result


def bench_memory() -> list[dict[str, Any]]:
    """Peak bytes of a repeated call beyond its result, compared with the byte budget."""
    apply, params = plain_relu_network(WIDTHS)
    x, vectors, images = _normal(500, WIDTHS[0]), _normal(2000, WIDTHS[0]), _normal(16, 32, 32, 3)
    calls = {
        "finite, 500 points": lambda: (
            empirical_kernel(apply, params, x, tile_bytes=MEMORY_BYTES, progress=False).value
        ),
        "fcnn, 2000 vectors": lambda: make_network(FCNN).kernel(
            vectors, tile_bytes=MEMORY_BYTES, progress=False
        ),
        "cnn, 16 images": lambda: make_network(CNN).kernel(
            images, tile_bytes=MEMORY_BYTES, progress=False
        ),
    }
    return [{"what": what, **measure_memory(call)} for what, call in calls.items()]


def measure_memory(call: Callable[[], Any]) -> dict[str, Any]:
    """Peak of the resident memory during a compiled call, beyond its result (Linux, CPU)."""
    size = jax.block_until_ready(call()).nbytes
    if not Path("/proc/self/statm").exists() or jax.devices()[0].platform != "cpu":
        return {"budget_bytes": MEMORY_BYTES, "result_bytes": size, "beyond_result_bytes": None}
    beyond = max(peak_above(call, resident) - size, 0)
    return {
        "budget_bytes": MEMORY_BYTES,
        "result_bytes": size,
        "beyond_result_bytes": beyond,
        "within_budget": beyond <= MEMORY_BYTES,
    }


def peak_above(call: Callable[[], Any], in_use: Callable[[], int]) -> int:
    """Bytes in use at the peak of a call, less those before."""
    gc.collect()
    _return_free_memory()
    before, peak, done = in_use(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, in_use())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        jax.block_until_ready(call())
    finally:
        done.set()
        thread.join()
    return max(peak - before, 0)


def run_peer(python: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Neural Tangents' times for the same work, from its own environment."""
    command = [python, str(PEER_SCRIPT), json.dumps(sizes)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"bench kernels: {python} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _ratios(result: dict[str, Any]) -> dict[str, float]:
    peer = result["peer"]
    ratios = {
        "peer_over_ours_finite": median_repeat(peer["finite"])
        / median_repeat(result["finite"]["sizes"][0]["two_sets"]),
        "peer_over_ours_fcnn": median_repeat(peer["fcnn"])
        / median_repeat(result["fcnn"][0]["seconds"]),
    }
    if "cnn" in peer:
        # Neural Tangents computes both halves of a symmetric kernel.
        theirs = median_repeat(peer["cnn"]) / peer["cnn"]["images"] ** 2
        ratios["peer_over_ours_cnn_per_pair"] = theirs / result["cnn"][0]["seconds_per_pair"]
        ratios["peer_over_ours_cnn"] = median_repeat(peer["cnn"]) / median_repeat(
            result["cnn"][0]["seconds"]
        )
    return ratios


def _time_infinite(net: infinite.Network, x: Array, repeats: int) -> dict[str, Any]:
    seconds = time_first_and_repeats(lambda: net.kernel(x, progress=False), repeats)
    pairs = len(x) * (len(x) + 1) // 2
    return {
        "points": len(x),
        "seconds": seconds,
        "distinct_pairs": pairs,
        "seconds_per_pair": median_repeat(seconds) / pairs,
    }


def _normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _return_free_memory() -> None:
    """Give freed memory back to the system, so that the next call must ask for its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="repeated calls of the fast methods")
    parser.add_argument("--large", action="store_true", help="also the sizes that take minutes")
    parser.add_argument("--peer-python", help="a Python with Neural Tangents, timed alongside")
    parser.add_argument("--out", type=Path, help="JSON file; by default only printed")
    args = parser.parse_args()
    result = bench_kernels(repeats=args.repeats, large=args.large, peer_python=args.peer_python)
    print(json.dumps(result, indent=1))
    if args.out is not None:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
