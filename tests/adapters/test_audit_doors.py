"""What can be given to `audit`, and what it says of input that it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.adapters import HashedText
from dualfluence.adapters._audit import _task_of
from dualfluence.adapters._tables import as_labels, as_matrix, is_text, table_reader
from dualfluence.attribution import evaluate

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5))
Y = (X @ [1.0, 1.0, -1.0, 0.0, 0.0] > 0).astype(int)
BAD = np.array([3, 11, 40])
SPOILED = np.where(np.isin(np.arange(60), BAD), 1 - Y, Y)


class Table(dict):
    """As little of a data frame as there can be."""

    columns = property(lambda self: list(self))

    def to_numpy(self):
        return np.column_stack(list(self.values()))


def area(found):
    return evaluate.mislabel_auc(found.suspicion, np.isin(np.arange(found.num_points), BAD))


TEXTS = ["red apple pie", "green apple", "apple juice", "fast red car", "old car", "car engine"] * 4
SHORT = ["a", "b", "a"]
EQUAL = np.ones((60, 5))
KERNEL = lambda a, b: a @ b.T  # noqa: E731
MODEL = dfl.linearize(lambda p, x: x @ p, np.zeros((5, 3)))

REFUSED = {
    "nothing": (lambda: dfl.audit(), ValueError, "expected x and y"),
    "one class": (lambda: dfl.audit(None, X, ["yes"] * 60), ValueError, "got one: .'yes'"),
    "all equal": (
        lambda: dfl.audit(None, np.ones((60, 2)), Y),
        ValueError,
        "all 60 points are equal",
    ),
    "missing labels": (
        lambda: dfl.audit(None, X[:3], ["a", None, "a"]),
        ValueError,
        r"1 of 3 \(at 1\) is",
    ),
    "blank labels": (
        lambda: dfl.audit(None, X[:3], ["a", " ", "a"]),
        ValueError,
        r"1 of 3 \(at 1\) is missing",
    ),
    "NaN labels as text": (
        lambda: dfl.audit(None, X[:4], np.array(["a", np.nan, "b", "a"])),
        ValueError,
        r"1 of 4 \(at 1\) is missing",
    ),
    "equal to a kernel": (lambda: dfl.audit(KERNEL, EQUAL, Y), ValueError, "60 points are equal"),
    "equal to a network": (lambda: dfl.audit(MODEL, EQUAL, Y), ValueError, "60 points are equal"),
    "kernel of zeros": (
        lambda: dfl.audit(np.zeros((60, 60)), None, Y),
        ValueError,
        "kernel is 0 at the points",
    ),
    "kernel of ones": (
        lambda: dfl.audit(np.ones((60, 60)), None, Y),
        ValueError,
        "60 points have the same features",
    ),
    "NaN for a kernel": (
        lambda: dfl.audit(KERNEL, np.where(X > 2, np.nan, X), Y),
        ValueError,
        "kernel: every entry must be finite",
    ),
    "NaN labels": (
        lambda: dfl.audit(None, X[:3], [0, np.nan, 1]),
        ValueError,
        r"1 of 3 \(at 1\) is missing",
    ),
    "NaN features": (
        lambda: dfl.audit(None, np.where(X > 2, np.nan, X), Y),
        ValueError,
        "x: every entry must be finite",
    ),
    "strings": (
        lambda: dfl.audit(None, TEXTS, [0, 1] * 12),
        TypeError,
        "expected numbers, got strings",
    ),
    "lengths": (lambda: dfl.audit(None, X, Y[:50]), ValueError, "60 rows for 50 labels"),
    "test lengths": (
        lambda: dfl.audit(None, X, Y, x_test=X[:3], y_test=[0, 1]),
        ValueError,
        "x_test has 3 rows for 2",
    ),
    "test alone": (lambda: dfl.audit(None, X, Y, y_test=[0]), ValueError, "y_test came without"),
    "new class": (
        lambda: dfl.audit(None, X, Y, x_test=X[:1], y_test=[7]),
        ValueError,
        r"got \[7\] too",
    ),
    "other columns": (
        lambda: dfl.audit(None, X, Y, x_test=X[:, :2]),
        ValueError,
        "expected 5 features",
    ),
    "few": (lambda: dfl.audit(None, X[:2], [0, 1]), ValueError, "at least 3 points, got 2"),
    "names of points": (lambda: dfl.audit(None, X[:4], list("abcd")), ValueError, "comes once"),
    "two types": (lambda: dfl.audit(None, X[:3], ["a", 1, "a"]), TypeError, "labels of one type"),
    "amounts": (lambda: dfl.audit(None, X, np.arange(60)), ValueError, "task='regression'"),
    "several labels": (
        lambda: dfl.audit(None, X, np.eye(60, 2, dtype=int)),
        ValueError,
        "comes once|one label",
    ),
    "equal numbers": (
        lambda: dfl.audit(None, X, np.full(60, 0.5)),
        ValueError,
        "nothing to predict",
    ),
    "names as numbers": (
        lambda: dfl.audit(None, X[:3], SHORT, task="regression"),
        TypeError,
        "numbers",
    ),
    "word for task": (lambda: dfl.audit(None, X, Y, task="ranking"), ValueError, "audit: task"),
    "threshold": (lambda: dfl.audit(None, X, Y, threshold=7.0), ValueError, "a probability"),
    "near": (lambda: dfl.audit(None, X, Y, near=-1.0), ValueError, "positive distance"),
    "no encoder": (
        lambda: dfl.audit(None, TEXTS, [0, 1] * 12, encoder=3),
        TypeError,
        "must be a function",
    ),
    "short encoder": (
        lambda: dfl.audit(None, TEXTS, [0, 1] * 12, encoder=lambda t: np.ones((2, 2))),
        ValueError,
        "2 rows for 24",
    ),
    "label as y": (lambda: dfl.audit(None, X, "label"), TypeError, "one label per point"),
    "outputs": (lambda: dfl.audit(MODEL, X, Y), ValueError, "3 outputs for 2 classes"),
    "classes": (lambda: dfl.audit(None, X, Y, classes=["a", "b"]), ValueError, "name the outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_said_clearly(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_units_of_features_do_not_matter(factor):
    """Squares of such numbers are 0 or infinite."""
    want, got = dfl.audit(None, X, Y), dfl.audit(None, X * factor, Y)
    np.testing.assert_allclose(got.wrong, want.wrong, rtol=1e-8)


def test_a_fitted_model_has_points_already():
    model = dfl.linearize(lambda p, x: x @ p, np.zeros((5, 1)))
    options = {"loss": dfl.Logistic(), "ridge": 0.1, "progress": False}
    with pytest.raises(ValueError, match="two classes in the Fitted, got only class 1"):
        dfl.audit(dfl.fit(model, X, np.ones((60, 1)), **options))
    fitted = dfl.fit(model, X, Y[:, None] * 1.0, **options)
    for call, words in (
        (lambda: dfl.audit(fitted, X, Y), "leave out x and y"),
        (lambda: dfl.audit(fitted, encoder=len), "has features already"),
        (lambda: dfl.audit(fitted, classes=["one"]), "classes must be 2 names"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"update\.commit"):
        dfl.audit(fitted.edit(dfl.Remove([0]), progress=False))


@pytest.mark.parametrize("bits", [32, 64])
def test_arrays_in_any_precision_give_one_answer(bits):
    with dfl._support.compile.types_of_64_bits(bits == 64):
        found = dfl.audit(None, jnp.asarray(X), SPOILED)
        assert found.wrong.dtype == np.float64
    exact = dfl.audit(None, X.astype(np.float32), SPOILED.astype(np.int8))
    np.testing.assert_allclose(found.wrong, exact.wrong, atol=1e-4)
    assert area(found) > 0.9


def test_labels_may_be_names():
    names = np.array(["no", "yes"])
    given = dfl.audit(None, X, names[SPOILED].tolist())
    np.testing.assert_allclose(given.wrong, dfl.audit(None, X, SPOILED).wrong)
    assert list(given.classes) == ["no", "yes"]


def test_tables_are_read_by_column():
    colour = np.where(Y, "red", "blue").astype(object)
    table = Table({f"x{k}": X[:, k] for k in range(5)} | {"colour": colour, "flag": Y > 0})
    rows = table_reader(table, "x")(table, "x")
    want = np.column_stack([X, colour == "blue", colour == "red", Y])
    np.testing.assert_array_equal(rows, want.astype(float))
    assert area(dfl.audit(None, table, SPOILED)) > 0.9
    late = Table(reversed(table.items()))
    np.testing.assert_array_equal(table_reader(table, "x")(late, "x_test"), rows)
    for bad, words in (
        ({"a": np.array(["x", None], object)}, "column 'a': 1 of 2"),
        ({"a": np.array([1.0, np.nan])}, "column 'a': every entry"),
        ({"a": np.array([f"t{k}" for k in range(101)], object)}, "101 different texts"),
    ):
        with pytest.raises(ValueError, match=words):
            table_reader(Table(bad), "x")
    with pytest.raises(TypeError, match="dtype object"):
        table_reader(Table({"a": np.array([object(), {}], object)}), "x")
    with pytest.raises(ValueError, match=r"'flag'. are missing"):
        dfl.audit(None, table, Y, x_test=Table({k: v for k, v in table.items() if k != "flag"}))
    with pytest.raises(TypeError, match="expected a table like x"):
        dfl.audit(None, table, Y, x_test=X)


def test_text_goes_through_a_frozen_encoder():
    encode = HashedText(64)
    rows = encode(["apple pie", "Apple  pie!", "", "zebra"])
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 0, 1])
    assert rows[0] @ encode(["apples pie"])[0] > rows[0] @ rows[3] + 0.3
    labels = ["fruit"] * 3 + ["car"] * 3
    labels = labels * 4
    labels[4] = "fruit"
    for texts in (TEXTS, np.array(TEXTS), np.array(TEXTS, object)):
        found = dfl.audit(None, texts, labels, encoder=encode)
        assert int(np.argmax(found.suspicion)) == 4
    # With beartype on, as it may be here, the check of types comes first for some of these calls.
    with pytest.raises(TypeError, match=r"got a int|Type-check error"):
        encode(["a", 3])
    with pytest.raises(ValueError, match="at least 2"):
        HashedText(1)


def test_kernels_and_matrices_are_audited_with_squared_error():
    kernel = dfl.audit(lambda a, b: a @ b.T, X, SPOILED, x_test=X[:2])
    matrix = dfl.audit(X @ X.T, None, SPOILED)
    np.testing.assert_allclose(kernel.wrong, matrix.wrong, atol=1e-6)
    assert {f.partner for f in kernel.top(9, "leak")} == {0, 1}
    assert area(kernel) > 0.9


def test_networks_are_audited_with_their_own_loss():
    params = {"w": jnp.zeros((5, 2)), "b": jnp.zeros(2)}
    net = dfl.linearize(lambda p, x: x @ p["w"] + p["b"], params)
    given = dfl.audit(net, X, SPOILED, ridge=0.02)
    fitted = dfl.fit(net, X, SPOILED, loss=dfl.SoftmaxCrossEntropy(), ridge=0.02, progress=False)
    np.testing.assert_allclose(given.wrong, dfl.audit(fitted).wrong, rtol=1e-6)
    assert area(given) > 0.9
    assert "ridge 0.02 (ridge as given)" in given.notes[0]


@pytest.mark.thorough
def test_one_output_trees_and_a_ridge_of_its_own():
    model = dfl.linearize(lambda p, x: x["a"] @ p, jnp.zeros((5, 1)))
    found = dfl.audit(model, {"a": X}, SPOILED, x_test={"a": X[:3]}, y_test=Y[:3])
    assert area(found) > 0.9
    assert "least leave-one-out loss on 60 points" in found.notes[0]
    assert {f.partner for f in found.top(9, "leak")} == {0, 1, 2}
    numbers = dfl.audit(model, {"a": X}, X[:, 0] + 0.1, x_test={"a": X[:3]}, ridge=0.1)
    assert numbers.task == "regression"


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["a", "b"], "classification"),
        ([True, False], "classification"),
        ([0.5, 1.0], "regression"),
        ([1.0, 2.0, 1.0], "classification"),
        (np.arange(1000) % 50, "classification"),
        (np.ones((3, 2)) / 3, "regression"),
    ],
)
def test_the_task_follows_from_the_labels(labels, task):
    assert _task_of(as_labels(labels, "y")) == task


def test_what_is_text():
    assert is_text(["a"])
    assert is_text(np.array(["a", "b"], object))
    assert not is_text([[1, 2]])
    assert not is_text(X)
    assert as_matrix(np.zeros((3, 2, 2)) + 1, "x").shape == (3, 4)
    assert as_labels(jax.numpy.arange(3), "y").tolist() == [0, 1, 2]
