"""Batches of factorisations: right, and never shared between the threads that wait for them."""

import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence import linalg
from dualfluence.linalg._each import MOST_OPERATIONS

WORKER = Path(__file__).with_name("batches_worker.py")


def definite(k, c, dtype):
    half = np.random.default_rng(k + c).normal(size=(k, c, c))
    return jnp.asarray(half @ half.transpose(0, 2, 1) + np.eye(c), dtype)


@pytest.mark.parametrize(("k", "c"), [(1, 3), (5, 1), (33, 10), (997, 10), (3000, 5), (4, 70)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_item_is_that_of_numpy(k, c, dtype):
    A = definite(k, c, dtype)
    b = jnp.asarray(np.random.default_rng(0).normal(size=(k, c)), dtype)
    near = 1e-3 if dtype == "float32" else 1e-10
    want = np.linalg.solve(np.asarray(A, float), np.asarray(b, float)[:, :, None])[:, :, 0]
    np.testing.assert_allclose(linalg.solve_each(A, b), want, atol=near * np.abs(want).max())
    values, vectors = linalg.spectrum_each(A)
    again = np.einsum("kab,kb,kcb->kac", vectors, values, vectors)
    np.testing.assert_allclose(again, A, atol=near * np.abs(A).max())
    chols = jax.vmap(linalg.cholesky)(A)
    np.testing.assert_allclose(chols, np.linalg.cholesky(A), atol=near * np.abs(A).max())
    inverses = jax.vmap(linalg.lower_inverse)(chols)
    eye = np.broadcast_to(np.eye(c), A.shape)
    np.testing.assert_allclose(np.asarray(inverses) @ np.asarray(chols), eye, atol=100 * near)


@pytest.mark.host
@pytest.mark.parametrize(("k", "c"), [(997, 10), (3000, 5), (4, 70)])
def test_a_batch_is_too_small_to_be_shared_between_threads(k, c):
    A, b = definite(k, c, "float32"), jnp.ones((k, c), jnp.float32)
    text = jax.jit(linalg.solve_each).lower(A, b).as_text()
    sizes = [
        (int(m), int(size))
        for m, size in re.findall(
            r"@lapack_sgetrf_ffi.*?-> \(tensor<(?:(\d+)x)\d+x(\d+)xf32>", text
        )
    ]
    assert sizes
    assert all(m == 1 or m * size**3 < MOST_OPERATIONS for m, size in sizes)


@pytest.mark.thorough
@pytest.mark.host
def test_no_program_of_the_library_has_a_batch_that_is_shared(tmp_path):
    """Two such batches at a time hold both threads of a machine with two cores for ever."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    flags += " --xla_dump_hlo_pass_re=NONE"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, str(WORKER)], env=env, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-2000:]
    calls, shared = 0, set()
    pattern = r'= \(?[a-z0-9]+\[([\d,]+)\].*? custom-call\(.*custom_call_target="(lapack_\w+)"'
    for file in tmp_path.glob("*before_optimizations.txt"):
        for dims, target in re.findall(pattern, file.read_text()):
            *batch, rows, columns = map(int, dims.split(","))
            calls += 1
            if (
                prod(batch) > 1
                and prod(batch) * rows * columns * max(rows, columns) >= MOST_OPERATIONS
            ):
                shared.add(f"{target} {dims} in {file.name}")
    assert calls > 50
    assert sorted(shared) == []
