"""Every structure of `K` with every solver and every edit: the dense answer, or a refusal that is listed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structures import STRUCTURES, C, N, known

import dualfluence as dfl
import gates
from dualfluence.operators import DenseOperator
from dualfluence.solvers import AbstractDualSolver

RIDGE = 0.2
Y = np.random.default_rng(5).normal(size=(N + 2, C))
SOLVERS = {"auto": dfl.Auto(), "cholesky": dfl.Cholesky(), "cg": dfl.CG()}
EDITS = {
    "remove": lambda x: dfl.Remove([1, 4]),
    "relabel": lambda x: dfl.Relabel([2], Y[N : N + 1]),
    "reweight": lambda x: dfl.Reweight([0, 3], [0.5, 2.0]),
    "replace": lambda x: dfl.Replace([2], x[N : N + 1], Y[N : N + 1]),
    "add": lambda x: dfl.Add(x[N:], Y[N:]),
}


def edited_set(name):
    """Which points, with which targets and weights, are left after an edit."""
    rows, y, s = np.arange(N), Y[:N].copy(), np.ones(N)
    if name == "remove":
        s[[1, 4]] = 0
    elif name == "relabel":
        y[2] = Y[N]
    elif name == "reweight":
        s[[0, 3]] = 0.5, 2.0
    elif name == "replace":
        rows = np.r_[0, 1, 3:N, N]
        y, s = Y[rows], np.ones(N)
    else:
        rows, y, s = np.arange(N + 2), Y, np.ones(N + 2)
    return rows, y, s


def ridge_regression(K, name, queries):
    """Outputs at `queries` of training on the edited set: `f = K_q (K + λ/w)⁻¹ y`, by NumPy."""
    rows, y, s = edited_set(name)
    rows, y, w = rows[s > 0], y[s > 0], s[s > 0] / s.sum()
    A = K[rows][:, :, rows].reshape(len(rows) * C, -1) + np.diag(np.repeat(RIDGE / w, C))
    alpha = np.linalg.solve(A, y.reshape(-1))
    return (K[queries][:, :, rows].reshape(len(queries) * C, -1) @ alpha).reshape(-1, C)


LONG = ("bordered", "mixed", "sharded matrix-free", "a stranger's")
QUICK = {(name, list(SOLVERS)[k % len(SOLVERS)]) for k, name in enumerate(STRUCTURES)
         if name not in LONG}  # fmt: skip
"""Most structures once, and every solver with some of them; `test_structures.py` has the numbers of all."""


@pytest.mark.parametrize(
    ("name", "solver"), gates.table(list(itertools.product(STRUCTURES, SOLVERS)), QUICK)
)
def test_edits_are_exact_retraining_for_every_structure_and_solver(name, solver, tmp_path):
    case = STRUCTURES[name](tmp_path)
    options = {"loss": dfl.SquaredError(), "ridge": RIDGE, "kernel": case.op, "progress": False}
    if solver in case.refuses:
        with pytest.raises(ValueError, match="devices"):
            dfl.fit(case.model, case.x, Y[:N], solver=SOLVERS[solver], **options)
        return
    fitted = dfl.fit(case.model, case.x, Y[:N], solver=SOLVERS[solver], **options)
    K = known(case)
    # A float32 K is exact in its own entries alone, and queries come from a float32 network.
    narrow = case.op.narrow.dtype != jnp.float64
    for edit, make in EDITS.items():
        if edit in case.refuses:
            with pytest.raises(dfl.UnsupportedStructure, match="low_rank"):
                fitted.edit(make(case.points), solver=SOLVERS[solver], progress=False)
            continue
        update = fitted.edit(make(case.points), solver=SOLVERS[solver], progress=False)
        queries = np.arange(4)
        got = update.predict(jnp.asarray(case.points[queries]))
        want = ridge_regression(K, edit, queries)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if narrow else 1e-9, err_msg=edit)


def test_the_list_has_every_solver_a_user_can_name():
    named = {cls for cls in AbstractDualSolver.__subclasses__() if hasattr(dfl, cls.__name__)}
    assert named == {type(s) for s in SOLVERS.values()} - {dfl.Auto}


class TestAStrangersOperator:
    """One with the abstract methods alone, and a kernel function for queries."""

    @pytest.fixture
    def case(self, tmp_path):
        return STRUCTURES["a stranger's"](tmp_path)

    def fit(self, case, op=None, **how):
        return dfl.fit(
            case.model,
            case.x,
            np.arange(N) % C,
            loss=dfl.SoftmaxCrossEntropy(),
            ridge=RIDGE,
            kernel=dfl.KernelOptions(operator=case.op if op is None else op, **how),
            progress=False,
        )

    def test_is_fitted_edited_read_out_saved_and_loaded(self, case, tmp_path):
        dense = DenseOperator(case.op.dense(), C)
        own, other = (self.fit(case, op) for op in (case.op, dense))
        assert "random directions" in " ".join(own.stats.notes)
        own.save(tmp_path / "own.npz")
        loaded = dfl.load(tmp_path / "own.npz", case.model, kernel=case.op)
        assert type(loaded.kernel_op) is type(case.op)
        for edit in (dfl.Remove([1]), dfl.Add(case.points[N:], np.array([0, 1]))):
            want = other.edit(edit, until=1e-9).predict(case.x)
            for fitted in (own, loaded):
                got = fitted.edit(edit, until=1e-9).predict(case.x)
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-8)

    def test_says_exactly_what_it_lacks(self, case, tmp_path):
        fitted = self.fit(case)
        gone = fitted.edit(dfl.Remove([1]), until=1e-9).commit()
        lacking = {
            "Toeplitz has no wide_mv": lambda: self.fit(
                case, type(case.op)(case.op.column.astype(jnp.float32), C), refine=True
            ),
            "Toeplitz has no with_precision": lambda: self.fit(
                case, precision=jax.lax.Precision.DEFAULT
            ),
            "Toeplitz has no spread": lambda: fitted.on(jax.devices()[:1]),
            "a Toeplitz keeps entries of removed points": gone.purge,
            "a Toeplitz has no entries in one place": lambda: fitted.save(
                tmp_path / "k.npz", include_kernel=True
            ),
        }
        for message, call in lacking.items():
            with pytest.raises(dfl.UnsupportedStructure, match=message):
                call()
