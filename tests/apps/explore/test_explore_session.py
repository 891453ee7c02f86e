"""What the page is told is what the library says."""

import base64
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.explore._session import Session, Stale
from dualfluence.apps.page._scene import Scene

pytestmark = pytest.mark.host


def softmax(f):
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def cross_entropy(f, y):
    return -np.log(softmax(f)[np.arange(len(y)), y])


def check_state(state, scene, model):
    """The state against the library's own model, read out with NumPy."""
    f = np.asarray(model.predict(scene.xq))
    np.testing.assert_allclose(state["answers"], softmax(f), rtol=1e-12)
    np.testing.assert_allclose(state["losses"], cross_entropy(f, scene.yq), rtol=1e-10)
    cert = model.certificate
    assert state["certificate"]["distance_bound"] == cert.distance_bound
    assert state["certificate"]["relative_bound"] == cert.relative_bound
    assert state["stats"]["converged"] == model.stats.converged


def test_removal_is_that_of_the_library(session, edited):
    state = session.remove([3, 17])
    check_state(state, session.scene, edited(session.scene.fitted, dfl.Remove([3, 17])))
    assert state["removed"] == [3, 17]


def test_relabelling_is_that_of_the_library(session, edited):
    state = session.relabel([4, 5], 9)
    check_state(state, session.scene, edited(session.scene.fitted, dfl.Relabel([4, 5], [9, 9])))
    assert state["labels"][4] == state["labels"][5] == 9
    assert set(state["relabelled"]) <= {4, 5}


def test_edits_follow_each_other_and_a_step_comes_nearer(session, edited):
    session.remove([3])
    session.relabel([5], 1)
    last = session.state()["certificate"]["distance_bound"]
    state = session.refine()
    first = edited(session.scene.fitted, dfl.Remove([3])).commit()
    check_state(state, session.scene, edited(first, dfl.Relabel([5], [1])).edit([]))
    assert state["certificate"]["distance_bound"] < 0.1 * last
    assert [a["what"] for a in state["history"]] == ["fit", "remove", "relabel", "step"]


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.thorough), -1])
def test_another_ridge_is_a_fit_with_it_on_what_is_left(session, place):
    scene, ridge = session.scene, session.start["ridges"][place]
    assert ridge in (scene.fitted.ridge / 100, scene.fitted.ridge * 100)
    session.remove([3])
    before = session.state()
    state = session.change_ridge(ridge)
    first = scene.fitted
    y = np.asarray(first.data.targets).argmax(axis=1)
    scratch = dfl.fit(
        first.network,
        first.x,
        y,
        loss=first.loss,
        ridge=ridge,
        kernel=first.kernel_op,
        progress=False,
    ).retrain(dfl.Remove([3]), progress=False)
    f = np.asarray(scratch.predict(scene.xq))
    # A share of 1e-6 of the parameters may be left undone.
    np.testing.assert_allclose(state["answers"], softmax(f), atol=1e-5)
    assert state["certificate"]["relative_bound"] <= 1e-6
    assert state["ridge"] == session.certificate()["model"]["ridge"] == ridge
    assert state["history"][-1]["ridge"] == ridge
    assert state["removed"] == [3]
    assert session.undo() == before


def test_edits_are_kept_as_far_as_there_is_memory_for_them(session, monkeypatch):
    monkeypatch.setattr("dualfluence.apps.explore._session.FEWEST_EDITS", 2)
    monkeypatch.setattr("dualfluence.apps.explore._session.HELD_BYTES", 1)
    session.remove([0])
    session.remove([1])
    for refused in (
        lambda: session.remove([2]),
        lambda: session.change_ridge(session.start["ridges"][0]),
    ):
        with pytest.raises(ValueError, match="limit of 2 edits is reached"):
            refused()
    assert session.state()["removed"] == [0, 1]


def test_undo_and_reset_restore_exactly(session):
    states = [session.state()]
    states.append(session.remove([0, 1, 2]))
    states.append(session.relabel([8], 0))
    session.refine()
    assert session.undo() == states[2]
    assert session.undo() == states[1]
    session.relabel([9], 0)
    assert session.reset() == states[0]
    assert session.fitted is session.scene.fitted
    with pytest.raises(ValueError, match="nothing was done"):
        session.undo()


def test_a_preview_is_the_removal_and_changes_nothing(session):
    before = session.state()
    preview = session.preview([7, 8])
    assert session.state() == before
    assert session.remove([7, 8])["losses"] == preview["losses"]


def test_warming_up_changes_nothing(session):
    before = session.state()
    session.warm_up()
    assert session.state() == before


@pytest.mark.thorough
def test_scores_are_those_of_the_library(session, edited):
    session.remove([11])
    scene, scores = session.scene, session.scores()
    model = edited(scene.fitted, dfl.Remove([11])).edit([], drift=1e-6).commit()
    want = model.attribute(scene.xq, scene.yq, progress=False)
    effects = np.frombuffer(base64.b64decode(scores["effects"]), "<f4").reshape(want.values.shape)
    np.testing.assert_allclose(effects, want.values, rtol=1e-6, atol=1e-12)  # float32
    np.testing.assert_allclose(scores["own"], want.self_influence(), rtol=1e-8, atol=1e-12)
    y = np.asarray(model.data.targets).argmax(axis=1)
    # A point that is gone has no model without it; the page does not show its number.
    there = np.arange(len(y)) != 11
    f = np.asarray(want.outputs_without)
    np.testing.assert_allclose(
        np.array(scores["without"])[there], cross_entropy(f, y)[there], rtol=1e-8
    )
    assert (np.array(scores["said"]) == f.argmax(axis=1)).all()


@pytest.mark.thorough
def test_scores_are_of_the_optimum_however_far_an_edit_is_from_it(session):
    """One step from elsewhere would give every point what the edit before it left undone."""
    scene = session.scene
    gone = scene.named_groups["class 5"]
    session.remove(gone.tolist())
    got = np.frombuffer(base64.b64decode(session.scores()["effects"]), "<f4")
    retrained = scene.fitted.retrain(dfl.Remove(gone), progress=False).commit()
    want = retrained.attribute(scene.xq, scene.yq, progress=False).values
    # A share of 1e-6 of the parameters is left undone, and its effect on a loss is of that order.
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-4 * np.abs(want).max())


def test_scores_are_of_the_version_that_was_asked_for(session):
    first = session.state()["version"]
    second = session.remove([0])["version"]
    assert session.scores(first)["version"] == first
    assert session.scores()["version"] == second
    assert session.scores(first)["own"] != session.scores()["own"]
    session.undo()
    with pytest.raises(Stale):
        session.scores(second)


def test_groups_leave_out_what_is_left_of_them(session):
    scene = session.scene
    labels = np.asarray(scene.labels(scene.fitted.data.targets))
    ones = np.flatnonzero(labels == 1)
    session.remove([int(ones[0])])
    found = session.groups()
    place = found["names"].index("class 1")
    assert found["sizes"][place] == ones.size - 1
    model = session.fitted.edit([], drift=1e-6).commit()
    want = model.edit(dfl.Remove(ones[1:])).delta_loss(scene.xq, scene.yq)
    np.testing.assert_allclose(np.array(found["effects"])[:, place], want, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found["mean"][place], np.mean(want), rtol=1e-6, atol=1e-9)


def test_the_certificate_is_a_document_of_its_own(session, edited):
    session.remove([2, 30])
    document = json.loads(json.dumps(session.certificate(), allow_nan=False))
    cert = edited(session.scene.fitted, dfl.Remove([2, 30])).certificate
    assert document["removed"] == [2, 30]
    assert document["certificate"]["distance_bound"] == cert.distance_bound
    bound = (document["certificate"]["gradient_norm"] + document["certificate"]["rounding"]) / 1e-2
    assert bound == pytest.approx(cert.distance_bound, rel=1e-12)
    assert document["history"][-1]["points"] == [2, 30]
    assert len(document["model"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([40], "must be in"),
        ([-1], "must be in"),
        ([5, 5], "repeat"),
        (list(range(40)), "no point is left|every point|all"),
    ],
)
def test_a_bad_selection_is_refused_and_changes_nothing(session, points, words):
    before = session.state()
    with pytest.raises(ValueError, match=words):
        session.remove(points)
    assert session.state() == before


@pytest.mark.parametrize("label", [10, -1, 2.5])
def test_a_label_that_is_no_class_is_refused(session, label):
    with pytest.raises(ValueError, match="expected a class"):
        session.relabel([0], label)


def table_scene(loss, y, yq):
    rng = np.random.default_rng(0)
    x, xq = rng.normal(size=(12, 3)), rng.normal(size=(4, 3))
    model = dfl.linearize(lambda w, x: x @ w, np.zeros((3, 1)))
    fitted = dfl.fit(model, x, y, loss=loss, ridge=0.1, progress=False)
    return Scene(fitted, xq, yq, "numbers", "A line")


@pytest.mark.thorough
def test_numbers_are_answers_too():
    rng = np.random.default_rng(1)
    y, yq = rng.normal(size=(12, 1)), rng.normal(size=(4, 1))
    session = Session(table_scene(dfl.SquaredError(), y, yq))
    state = session.relabel([2], 1.5)
    x, xq = np.asarray(session.scene.fitted.x), session.scene.xq
    y[2] = 1.5
    w = np.linalg.solve(x.T @ x / 12 + 0.1 * np.eye(3), x.T @ y / 12)  # exact: squared error
    np.testing.assert_allclose(state["answers"], xq @ w, rtol=1e-9)
    assert session.start["kind"] == "number"
    assert session.start["points"]["sheet"] is None
    json.dumps(session.content(), allow_nan=False)


@pytest.mark.thorough
def test_two_classes_by_one_output_are_classes(edited):
    y = (np.arange(12) % 2).astype(float)[:, None]
    session = Session(table_scene(dfl.Logistic(), y, y[:4]))
    state = session.relabel([0], 1)
    f = np.asarray(
        edited(session.scene.fitted, dfl.Relabel([0], [[1.0]])).predict(session.scene.xq)
    )
    p = 1 / (1 + np.exp(-f))
    np.testing.assert_allclose(state["answers"], np.concatenate([1 - p, p], axis=1), rtol=1e-9)
    assert session.start["classes"] == ["0", "1"]


@pytest.mark.thorough
def test_a_network_without_a_certificate_says_so():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(10, 2)), rng.normal(size=(10, 1))

    def network(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    start = {"a": rng.normal(size=(2, 3)), "b": rng.normal(size=(3, 1))}
    model = dfl.linearize(network, start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is far from stationary, which is not the point here
        fitted = dfl.from_trained(model, start, x, y, loss=dfl.SquaredError(), ridge=0.5)
    session = Session(Scene(fitted, x[:3], y[:3], "numbers", "A small network"))
    state = json.loads(json.dumps(session.remove([1]), allow_nan=False))
    assert state["certificate"]["distance_bound"] is None
    assert state["history"][-1]["relative_bound"] is None
    assert "no certificate" in session.start["limits"][0]
