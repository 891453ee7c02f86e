"""The paper's sharded form on meshes of simulated devices: `python mesh_worker.py OUT.npz`, once with
`--xla_force_host_platform_device_count=8` in `XLA_FLAGS`."""

import sys

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.apps.paper import PaperCG, remove  # noqa: E402
from dualfluence.apps.paper._forms import _with_entries  # noqa: E402
from dualfluence.apps.paper._mesh import retained_rows  # noqa: E402

N, C, GONE = 13, 3, [2, 7]  # 11 points stay: neither 2 nor 8 divides them


def rbf(x1, x2):
    return jnp.exp(-jnp.sum((x1[:, None] - x2[None]) ** 2, axis=-1) / 4)


def network(theta, x):
    return jnp.tanh(x @ theta["inner"]) @ theta["outer"]


def make(kind, mesh):
    rng = np.random.default_rng(0)
    inner, outer = rng.normal(size=(4, 20)), rng.normal(size=(20, C))
    theta = {"inner": jnp.asarray(inner), "outer": jnp.asarray(outer)}
    x, labels = rng.normal(size=(N, 4)), rng.integers(0, C, N)
    model = rbf if kind == "kronecker" else dfl.linearize(network, theta)
    kernel = dfl.KernelOptions(num_outputs=C) if kind == "kronecker" else None
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "tolerance": 1e-12}
    return dfl.fit(model, x, labels, kernel=kernel, mesh=mesh, progress=False, **options)


results = {}
for kind in ("dense", "kronecker"):
    alone = make(kind, None)
    one = remove(alone, dfl.Remove(GONE), form=PaperCG())
    results[f"{kind}/alone"] = np.asarray(one.delta_alpha)
    keep = np.setdiff1d(np.arange(N), GONE)
    # Both kinds of K meet both numbers of devices, from one device and from a fit on the mesh.
    for count, where in ((2, "one"), (8, "mesh")) if kind == "dense" else ((2, "mesh"), (8, "one")):
        mesh = jax.devices()[:count]
        fitted = alone if where == "one" else make(kind, mesh)
        place = mesh if where == "one" else None
        key, form = f"{kind}/{count}", PaperCG(mesh=place)
        results[key] = np.asarray(remove(fitted, dfl.Remove(GONE), form=form).delta_alpha)
        held = retained_rows(_with_entries(fitted.kernel_op), keep, mesh).bytes_per_device
        results[f"{key}/bytes"] = np.asarray(held)
np.savez(sys.argv[1], **results)
