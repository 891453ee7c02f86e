"""Calls what solves or factors small systems for many points, at sizes that LAPACK would share."""

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import infinite, primal
from dualfluence.attribution import LeadingProbes, Trajectory

N, P, C, QUERIES = 220, 8, 10, 33


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def main():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N, P)).astype(np.float32), rng.integers(0, C, N)
    params = {
        "in": jnp.asarray(0.3 * rng.normal(size=(P, 20)), jnp.float32),
        "out": jnp.asarray(0.3 * rng.normal(size=(20, C)), jnp.float32),
    }
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}
    queries, quiet = (x[:QUERIES], y[:QUERIES]), {"progress": False}
    groups = {k: np.arange(9 * k, 9 * k + 9) for k in range(20)}
    for model in (
        dfl.linearize(network, params),
        infinite.serial(infinite.Dense(), infinite.Relu(), infinite.Dense()),
    ):
        fitted = dfl.fit(model, x, y, **options)
        fitted.edit(dfl.Remove(np.arange(30)), **quiet)
        fitted.attribute(*queries, **quiet)
        fitted.attribute_groups(groups, *queries, **quiet)
        fitted.ridge_path(np.logspace(-3, 0, 4))
    convex = dfl.Convex(lambda f, t: jnp.sum(jnp.sqrt(1 + (f - t) ** 2)))
    network_of = dfl.linearize(network, params)
    dfl.fit(network_of, x, np.eye(C)[y], **(options | {"loss": convex})).attribute(
        x[:5], np.eye(C)[y[:5]], **quiet
    )
    dfl.audit(None, x, y)
    given = {key: options[key] for key in ("loss", "ridge")}
    for solver in (primal.KFAC(), primal.EKFAC()):
        primal.attribute(network_of, params, x, y, *queries, solver=solver, **given)
    later = jax.tree.map(lambda a: 1.1 * a, params)
    run = Trajectory(network, [params, later], steps=[1, 10], learning_rate=[0.1, 0.1])
    for probes in (None, LeadingProbes(3)):
        run.attribute(x, y, *queries, probes=probes, **quiet)


if __name__ == "__main__":
    main()
