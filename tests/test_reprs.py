"""What objects print: one screen, no weights and no data, and the same escaped in notebooks."""

import html
import re

import equinox as eqx
import jax
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import attribution, primal, unlearning
from dualfluence.store._format import Header

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(33, 3)), np.arange(33) % 2
LOSS = dfl.SoftmaxCrossEntropy()
ONE_SCREEN = 1000


def dot(x1, x2):
    return x1 @ x2.T


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    report = dfl.kernels.KernelReport((), ())
    header = (4, 1, 1, 2, "float32", "float32", "print", ())
    net = dfl.adapters.from_equinox(eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0)))
    quiet = {"progress": False}
    # A kernel of one output compiles little.
    fitted = dfl.fit(dot, X, Y[:, None] * 1.0, loss=dfl.SquaredError(), ridge=0.1, **quiet)
    update = fitted.edit(dfl.Remove([0]), **quiet)
    scores = attribution.Attribution(RNG.normal(size=(2, 33)), of="loss")
    group = {"names": ("a",), "sizes": (2,), "values": np.ones((2, 1)), "sums": np.ones((2, 1))}
    group |= {"of": "loss", "direction": 1, "distance_bound": np.ones(1)}
    path = dict.fromkeys(("ridges", "leave_one_out", "gcv", "training", "dof"), np.arange(1.0, 9.0))
    masks = attribution.evaluate.random_masks(33, 4, seed=0)
    truth = attribution.evaluate.Truth(masks, RNG.normal(size=(2, 4, 2)))
    linear = net.linearized
    move = linear.split(linear.params)[0]
    moved = (linear, net.params, move, fitted.data, LOSS, 0.1, True, fitted.stats)
    return {
        "Fitted": fitted,
        "Update": update,
        "Certificate": fitted.certificate,
        "Stats": fitted.stats,
        "Attribution": scores,
        "GroupAttribution": attribution.GroupAttribution(**group),
        "RidgePath": attribution.RidgePath(**path, exact=True),
        "Measured": attribution.evaluate.lds(scores, masks, truth.targets),
        "Truth": truth,
        "RemovalCurve": attribution.evaluate.RemovalCurve(*RNG.normal(size=(4, 50))),
        "Plan": dfl.plan(1000, 10, 10_000, platform="cpu", memory=2**30, disk=2**30),
        "PrimalUpdate": primal.PrimalUpdate(*moved),
        "Adapted": net,
        "Trajectory": attribution.Trajectory(net, [net.params] * 9, [*range(1, 10)], 0.1),
        "GradDot": attribution.GradDot(net, net.params),
        "GradCos": attribution.GradCos(net, net.params),
        "TracIn": attribution.TracIn(net, [net.params] * 9),
        "TRAK": attribution.TRAK(net, [net.params] * 9),
        "TrainingSet": fitted.data,
        "Dataset": dfl.datasets.load("mnist-small"),
        "Published": unlearning.Published(net.params, 0.1, 0.2, 0.5, 1e-5, False),
        "EmpiricalKernel": dfl.kernels.EmpiricalKernel(np.ones((3, 2, 3, 2)), report),
        "Store": dfl.store.Store(tmp_path_factory.mktemp("repr"), Header(*header)),
    }


def test_a_repr_is_one_screen_without_weights_or_data(shown):
    for name, value in shown.items():
        text = repr(value)
        assert name in text or type(value).__name__ in text or name == "Measured", text
        assert len(text) <= ONE_SCREEN, f"{name}: {len(text)} characters"
        # Arrays, in NumPy's words or JAX's.
        assert not re.search(r"array\(|Array\(|\[\[", text), text


def test_a_plan_is_read_at_a_glance(shown):
    text = repr(shown["Plan"])
    assert len(text) < 500
    assert text.splitlines()[1].split()[0] == "taken"
    assert "does not fit" in repr(dfl.plan(10**6, 10, platform="cpu", memory=2**20, disk=2**20))


def test_a_notebook_shows_the_same_table(shown):
    for name, value in shown.items():
        page = value._repr_html_()
        title, *rows = repr(value).splitlines()
        assert html.escape(title) in page, name
        assert page.count("<tr>") == len(rows)
        for row in rows:
            assert html.escape(row.split(maxsplit=1)[1]) in page


def test_text_of_others_is_escaped():
    from dualfluence._support.show import html_table

    page = html_table("<b>", [("a & b", "<script>alert(1)</script>")])
    assert "<script>" not in page
    assert page.startswith("<div><strong>&lt;b&gt;</strong>")
    scores = attribution.Attribution(np.zeros((1, 2)), of="<img src=x>")
    assert "<img" not in scores._repr_html_()


@pytest.mark.parametrize("n", [1, 3, 5, 33])
def test_the_top_of_few_points_is_all_of_them(n):
    values = np.arange(2.0 * n).reshape(2, n)
    for k in (5, 10):
        top = attribution.Attribution(values, of="loss").top(k)
        assert top.helpful.indices.shape == (2, min(k, n))
        np.testing.assert_array_equal(top.helpful.indices[0], np.arange(n)[::-1][:k])
        np.testing.assert_array_equal(top.harmful.indices[0], np.arange(n)[:k])
        np.testing.assert_array_equal(top.helpful.values[1], values[1, ::-1][:k])


def test_one_query_is_not_queries():
    text = repr(attribution.Attribution(np.zeros((1, 1)), of="loss"))
    assert "1 query × 1 training point," in text


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (-1, ValueError)])
def test_the_top_none_is_refused(k, error):
    with pytest.raises(error, match="top: k must be a whole number, at least 1"):
        attribution.Attribution(np.zeros((1, 3)), of="loss").top(k)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (5, TypeError, "open_store: path must be a string or a Path, got int"),
        (None, TypeError, "got NoneType"),
        ("", ValueError, "must name a file or folder"),
    ],
)
def test_a_store_is_opened_by_its_path(path, error, words):
    with pytest.raises(error, match=words):
        dfl.store.open_store(path)
