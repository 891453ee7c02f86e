"""The authors' code beside ours: a checkout is imported, changed where it must be, and called as it expects.

The checkout here is made up: modules with the authors' signatures, each of which solves its system by dense
algebra. So every method must end where the influence function ends.
"""

import json
import sys

import pytest

import benchmark

pytestmark = pytest.mark.host

authors = benchmark.load("authors")

LOSS = """
import jax, jax.numpy as jnp
from jax.flatten_util import ravel_pytree

def make_rce_loss_fn(apply_fn, lam=0.0):
    def loss_fn(params, params_p, xs, ys):
        risk = -jnp.mean(jnp.sum(ys * jax.nn.log_softmax(apply_fn(params, xs)), axis=-1))
        apart = ravel_pytree(params)[0] - ravel_pytree(params_p)[0]
        return risk + 0.5 * lam * jnp.sum(apart**2)
    return loss_fn
"""

TRAIN_UTILS = """
def make_batched_apply(apply_fn, batch_size):
    return lambda params, xs: apply_fn(params, xs)
"""

INFLUENCE = """
import jax, jax.numpy as jnp, numpy as np
from jax.flatten_util import ravel_pytree
from utils.loss import make_rce_loss_fn
from utils.train_utils import make_batched_apply

def split(n, forget_indices):
    return np.setdiff1d(np.arange(n), np.asarray(forget_indices)), np.asarray(forget_indices)

def prepare_solve_theta(loss_fn, params, params_p, xs, ys, forget_indices, batch_size=100):
    keep, gone = split(len(xs), forget_indices)
    _, back = ravel_pytree(params)
    share = len(gone) / len(xs)
    at = lambda rows: lambda v: loss_fn(back(v), params_p, xs[rows], ys[rows])
    theta = ravel_pytree(params)[0]
    H = (1 - share) * jax.hessian(at(keep))(theta)
    return lambda v: H @ v, share * jax.grad(at(gone))(theta)

def influence_on_theta(H_fn, rhs, params, maxiter=500, tol=1e-8):
    theta, back = ravel_pytree(params)
    H = jax.vmap(H_fn)(jnp.eye(len(theta)))
    step = jnp.linalg.solve(H, rhs)
    return back(theta + step), back(step)

def prepare_solve_delta_alpha(loss_fnl, fs, ys, forget_indices, lam, K_X_X, *, materialize_H_rr=False,
                              shard_K_X_X=False, batch_size=None):
    gpus = jax.devices("gpu")
    fs, ys = jax.device_put((fs, ys), gpus[1])
    assert K_X_X.shape == (len(fs), len(fs), *2 * fs.shape[1:])
    assert (batch_size is None) != materialize_H_rr
    n, c = fs.shape
    keep, gone = split(n, forget_indices)
    weights = jnp.zeros(n).at[keep].set(1 / len(keep))
    pointwise = lambda f, y: loss_fnl(f[None], y[None])
    W = jax.vmap(jax.hessian(pointwise))(fs, ys) * weights[:, None, None]
    g = jax.vmap(jax.grad(pointwise))(fs, ys) * weights[:, None]
    alpha = -jax.vmap(jax.grad(pointwise))(fs, ys) / (n * lam)
    K = jnp.asarray(np.asarray(K_X_X)).transpose(0, 2, 1, 3)
    WK = jnp.einsum("iab,ibjd->iajd", W, K).reshape(n * c, n * c)
    return (lam * jnp.eye(n * c) + WK, -(g + lam * alpha)), jnp.zeros((len(keep), c)), None

def influence_on_delta_alpha(H_rr, rhs, delta_alpha_f, xs, forget_indices, eps=1e-2, maxiter=500, tol=1e-8):
    A, b = H_rr
    return jnp.linalg.solve(A, b.ravel()).reshape(b.shape)

def map_back_to_theta_space(apply_fn, params, params_p, xs, delta_alpha, batch_size=100):
    _, pull = jax.vjp(lambda p: apply_fn(p, xs), params_p)
    return jax.tree.map(jnp.add, params, pull(delta_alpha)[0])
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "utils"
    folder.mkdir(parents=True)
    for name, text in (("loss", LOSS), ("train_utils", TRAIN_UTILS), ("influence", INFLUENCE)):
        (folder / f"{name}.py").write_text(text)
    return folder.parent


@pytest.mark.thorough
def test_every_method_ends_where_the_influence_function_ends(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(authors, "NEW_JAX", ())
    small = authors.Settings(per_class=1, width=2, percentages=(50,), repeats=1)
    kept = []
    found = authors.measure(checkout, small, keep=lambda now: kept.append(json.dumps(now)))
    (row,) = found["rows"]
    methods = row["methods"]
    assert set(methods) == {
        authors.ONE_STEP,
        authors.THEIR_DUAL,
        authors.THEIR_PARAMETER,
        authors.THEIR_SHARDED,
        authors.THEIR_MATERIALISED,
    }
    ours = methods[authors.ONE_STEP]["distance"]
    assert 1e-3 < ours < row["change"]
    for name, values in methods.items():
        # The methods solve one system; float32 solves of it differ by far less than the step errs.
        assert values["distance"] == pytest.approx(ours, rel=1e-2), name
        assert values["first"] > 0
        assert len(values["repeat"]) == 1
    assert len(kept) == len(methods)
    assert set(found["checkout"]["files"]) == {
        f"utils/{name}.py" for name in ("influence", "loss", "train_utils")
    }
    assert found["left_out"] == []
    assert {change["old"] for change in found["changes"]} >= {"gpus[1]"}


def test_modules_are_changed_in_memory_alone(checkout):
    before = {path: path.read_text() for path in (checkout / "utils").iterdir()}
    code = authors.load_authors(checkout, (*authors.ONE_DEVICE, *authors.NO_GPU))
    assert callable(code.influence.prepare_solve_theta)
    assert {path: path.read_text() for path in (checkout / "utils").iterdir()} == before
    assert not [name for name in sys.modules if name.split(".")[0] == "utils"]
    assert len(code.digests) == 3


def test_another_module_called_utils_stays(checkout, monkeypatch):
    mine = type(sys)("utils")
    monkeypatch.setitem(sys.modules, "utils", mine)
    authors.load_authors(checkout, authors.ONE_DEVICE)
    assert sys.modules["utils"] is mine


def test_a_checkout_without_the_text_to_change_is_an_error(checkout):
    path = checkout / "utils" / "influence.py"
    path.write_text(path.read_text().replace("gpus[1]", "gpus[0]"))
    with pytest.raises(ValueError, match=r"no 'gpus\[1\]'.*another version"):
        authors.load_authors(checkout, authors.ONE_DEVICE)


def test_a_folder_that_is_no_checkout_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*influence\.py"):
        authors.load_authors(tmp_path, ())
    assert not [name for name in sys.modules if name.split(".")[0] == "utils"]


def made_up():
    methods = {
        authors.ONE_STEP: {"first": 1.5, "repeat": [0.006, 0.005, 0.004], "distance": 1e-5},
        authors.THEIR_DUAL: {"first": 16.0, "repeat": [1.5, 1.7, 1.6], "distance": 3e-4},
    }
    few = {authors.ONE_STEP: methods[authors.ONE_STEP]}
    rows = [
        {"percent": 10, "change": 1e-2, "methods": methods},
        {"percent": 90, "change": 2e-2, "methods": few},
    ]
    return {"rows": rows, "changes": [vars(change) for change in authors.ONE_DEVICE]}


def test_the_results_page_has_a_table_once_there_is_a_record(monkeypatch):
    import make_numbers

    monkeypatch.setattr(make_numbers, "recorded", lambda name: False)
    assert make_numbers.authors() == "No run on a GPU is recorded yet.\n"
    monkeypatch.setattr(make_numbers, "recorded", lambda name: name == "authors_h200")
    monkeypatch.setattr(make_numbers, "record", lambda name: made_up())
    lines = make_numbers.authors().splitlines()
    assert lines[2] == "| ours, one step | 1.5 s | 5.0 ms | 1.0e-05 | 1.5 s | 5.0 ms | 1.0e-05 |"
    assert lines[3] == "| authors' dual form | 16 s | 1.6 s | 3.0e-04 | – | – | – |"
    assert "`gpus[1]` is `gpus[-1]`, because there is no second device" in lines[-1]
    assert {line.count("|") for line in lines[:4]} == {8}
