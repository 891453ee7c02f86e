"""The places where parameters enter, against gradients by automatic differentiation."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.primal._kronecker import block_kinds
from dualfluence.primal._places import Places

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import networks

pytestmark = pytest.mark.thorough


def _places(name):
    apply, params, x = networks.NETWORKS[name]()
    model = dfl.linearize(apply, params).bound(x)
    return model, Places(model, x), x


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_products_in_the_order_of_the_leaves_are_the_gradients(name):
    model, places, x = _places(name)
    theta, frozen = model.split(model.params)
    leaves = jax.tree.leaves(theta)
    rest = [a for a in jax.tree.leaves(frozen) if hasattr(a, "dtype")]
    rng = np.random.default_rng(0)
    cotangents = jnp.asarray(rng.normal(size=(2, places.num_outputs)))
    for xi in x[:2]:
        lefts, rights, whole = places.point([*leaves, *rest, xi], cotangents, jnp.float64)
        for r, u in enumerate(cotangents):
            want = [np.asarray(g).ravel() for g in jax.tree.leaves(model.vjp(xi[None], u[None]))]
            got = {k: np.asarray(v[r]) for (k, _, _), v in zip(places.whole, whole, strict=True)}
            for place, a, g in zip(places.places, lefts, rights, strict=True):
                rows = jax.nn.one_hot(a, place.sizes[2]) if place.looks_up else a
                block = jnp.einsum("bsm,bsn->bmn", rows, g[r])
                got |= {k: np.asarray(flat) for k, flat in place.scatter(block)}
                back = place.gather([got.get(k) for k in range(len(leaves))])
                np.testing.assert_array_equal(back, block)
            assert sorted(got) == list(range(len(leaves)))
            for k, flat in got.items():
                np.testing.assert_allclose(flat, want[k], rtol=1e-10, atol=1e-12, err_msg=str(k))


def test_every_parameter_is_told_its_block():
    kinds = {name: block_kinds(_places(name)[1]) for name in ("cnn", "attention", "integers")}
    assert kinds["cnn"] == {
        "C1": "kronecker", "C2": "kronecker", "C3": "kronecker", "C4": "kronecker",
        "W": "kronecker", "b": "kronecker", "c1": "exact",
    }  # fmt: skip
    # Used as a table and, transposed, as a dense layer: no common factors.
    assert kinds["attention"]["E"] == "exact"
    assert kinds["attention"]["qkv"] == "kronecker"
    assert kinds["integers"] == {"W": "kronecker", "unused": "unused"}
