"""Time Neural Tangents on the work of `dualfluence bench kernels`; prints one JSON object.

Runs in an environment of its own, as Neural Tangents needs an old JAX:

    python3.11 -m venv peer
    peer/bin/pip install "jax==0.4.34" "jaxlib==0.4.34" "numpy<2" "scipy<1.15" absl-py frozendict
    peer/bin/pip install --no-deps neural-tangents==0.6.5
    dualfluence bench kernels --peer-python peer/bin/python

`dualfluence bench kernels` sends the sizes as JSON in the first argument. Inputs and sizes are the
same on both sides; first calls (tracing, compilation) and repeated calls are apart.
"""

import importlib.machinery
import json
import sys
import time
import types
from itertools import pairwise

import numpy as np


class _Stub(types.ModuleType):
    """Stands for every submodule and name of `neural_tangents.experimental` (needs TensorFlow)."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return None


class _StubFinder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("neural_tangents.experimental"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def import_neural_tangents():
    """The library, with the two aliases that JAX 0.4.26 removed put back."""
    import jax
    from jax._src import source_info_util
    from jax.interpreters import ad

    sys.meta_path.insert(0, _StubFinder())
    ad.source_info_util, ad.config = source_info_util, jax.config
    import neural_tangents

    return jax, neural_tangents


def measure(jax, call, repeats):
    """Seconds of the first call and of the repeated ones, with the result ready."""
    seconds, cpu = [], []
    for _ in range(repeats + 1):
        start, start_cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return {"first": seconds[0], "repeat": seconds[1:], "repeat_cpu": cpu[1:]}


def finite(jax, nt, sizes):
    """The empirical NTK of a ReLU network by structured derivatives, its fastest implementation."""
    rng = np.random.default_rng(0)
    widths = sizes["widths"]
    params = [
        ((rng.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in pairwise(widths)
    ]

    def apply(params, x):
        for W, b in params[:-1]:
            x = jax.nn.relu(x @ W + b)
        return x @ params[-1][0] + params[-1][1]

    kernel = jax.jit(
        nt.empirical_ntk_fn(
            apply,
            trace_axes=(),
            vmap_axes=0,
            implementation=nt.NtkImplementation.STRUCTURED_DERIVATIVES,
        )
    )
    n = sizes["finite"]
    x1, x2 = (
        np.random.default_rng(seed).normal(size=(n, widths[0])).astype(np.float32)
        for seed in (1, 2)
    )
    return {"points": n, **measure(jax, lambda: kernel(x1, x2, params), sizes["repeats"])}


def infinite(jax, nt, sizes):
    """The analytic NTKs of the fully connected network and of the CNN."""
    from neural_tangents import stax

    dense = [stax.Dense(1, W_std=2.0, b_std=0.1), stax.Relu()]
    fcnn = stax.serial(*dense * 3, stax.Dense(1, W_std=2.0, b_std=0.1))[2]
    conv = [
        stax.Conv(1, (3, 3), padding="SAME", W_std=2.0, b_std=0.1),
        stax.Relu(),
        stax.AvgPool((2, 2), strides=(2, 2), padding="SAME"),
    ]
    cnn = stax.serial(*conv * 3, stax.Flatten(), stax.Dense(1, W_std=2.0, b_std=0.1))[2]
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(sizes["vectors"], sizes["widths"][0])).astype(np.float32)
    images = np.random.default_rng(0).normal(size=(sizes["images"], 32, 32, 3)).astype(np.float32)
    whole = jax.jit(lambda x: fcnn(x, None, get="ntk"))
    results = {
        "fcnn": {
            "points": len(vectors),
            **measure(jax, lambda: whole(vectors), sizes["repeats"]),
        }
    }
    if sizes["images"]:
        batch = min(8, sizes["images"])
        tiled = nt.batch(jax.jit(cnn, static_argnames="get"), batch_size=batch)
        results["cnn"] = {
            "images": len(images),
            "batch": batch,
            **measure(jax, lambda: tiled(images, None, get="ntk"), sizes["cnn_repeats"]),
        }
    return results


def main():
    sizes = json.loads(sys.argv[1])
    jax, nt = import_neural_tangents()
    result = {
        "library": "neural-tangents",
        "jax": jax.__version__,
        "finite": finite(jax, nt, sizes),
        **infinite(jax, nt, sizes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
