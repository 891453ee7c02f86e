"""The desk for deletion requests, what it writes, and what forgetting is measured by."""

import importlib.util
import json
import math
from statistics import NormalDist

import numpy as np

import dualfluence as dfl
from dualfluence import unlearning

from .rows_fits import certified, same_model, trained
from .table import each, flat, raises, row


def within_drift(at, model, delta):
    """Without `until` an answer is certified to one per cent of `‖θ − θ₀‖`, and may be that far off."""
    certificate = model.certificate
    assert certificate.distance_bound <= 1.05e-2 * np.linalg.norm(delta)
    certified(at, model, delta)


@row(*each("unlearning", "Desk", "remove relabel correct add preview retrain model certificate"))
@row(*each("unlearning", "Desk", "close checkpoint record_publication head"), "unlearning.open")
@row(
    *each("unlearning", "Answer", "params predict"), *each("unlearning", "Report", "valid summary")
)
@row("unlearning.verify", shared=True)
def a_desk(at):
    path, y = at.folder / "desk", np.asarray(at.y, float)
    desk = unlearning.open(path, at.fitted)
    assert isinstance(desk, unlearning.Desk)
    np.testing.assert_equal(desk.head, desk.ledger.last_hash)
    same_model(at, desk.model, trained(at))
    answer = desk.relabel("0", at.yq[:1], until=None)
    assert isinstance(answer, unlearning.Answer)
    y = np.concatenate([np.asarray(at.yq[:1], float), y[1:]])
    same_model(at, answer, trained(at, y=y), 5)
    ghost = desk.preview("0", kind="relabel", targets=at.y[:1])
    assert ghost.sequence is None
    same_model(at, ghost, trained(at), 5)
    same_model(at, desk.model, trained(at, y=y), 5)
    more = {
        "J": np.concatenate([at.J, at.Jq[:1]]),
        "f0": np.concatenate([at.f0, at.f0q[:1]]),
        "y": np.concatenate([y, np.asarray(at.yq[:1], float)]),
    }
    within_drift(at, desk.add(["new"], at.xq[:1], at.yq[:1]), trained(at, **more))
    left = np.concatenate([[0.0], np.ones(at.n)])
    answer = desk.remove("0")
    within_drift(at, answer, trained(at, weights=left, **more))
    moved = {
        "J": np.concatenate([more["J"], at.Jq[1:2]]),
        "f0": np.concatenate([more["f0"], at.f0q[1:2]]),
        "y": np.concatenate([more["y"], np.asarray(at.yq[1:2], float)]),
    }
    left = np.concatenate([left, [1.0]])
    left[at.n] = 0.0
    corrected = desk.correct("new", at.xq[1:2], at.yq[1:2])
    within_drift(at, corrected, trained(at, weights=left, **moved))
    same_model(at, desk.retrain(), trained(at, weights=left, **moved), 5)
    assert np.isfinite(desk.certificate.distance_bound)
    desk.record_publication({"mu": 0.1})
    file = desk.checkpoint(at.folder / "checkpoint.npz", include_kernel=True)
    desk.close()
    found = unlearning.verify(path, file)
    assert isinstance(found, unlearning.Report)
    assert found.valid, found.summary()
    assert "distance to retraining" in found.summary()


@row(*each("unlearning", "Engine", "accept fitted propose retrained"), shared=True)
def an_engine(at):
    engine = unlearning.Engine(at.fitted)
    same_model(at, engine.fitted, trained(at))
    same_model(at, engine.retrained().fitted, trained(at), 5)
    if at.n == 1:
        with raises(ValueError, "every point has been removed"):
            engine.propose([dfl.Remove([0])])
        return
    left = np.concatenate([[0.0], np.ones(at.n - 1)])
    work = engine.propose([dfl.Remove([0])])
    same_model(at, engine.fitted, trained(at))
    engine.accept(work)
    within_drift(at, engine.fitted, trained(at, weights=left))


@row(*each("unlearning", "Ledger", "append close last_hash check_head"), "unlearning.LedgerError")
@row(
    "unlearning.erase_references",
    "unlearning.write_documents",
    "unlearning.sign_documents",
    shared=True,
)
def a_ledger_and_its_documents(at):
    folder = at.folder / "ledger"
    with unlearning.open(folder, at.fitted) as desk:
        desk.relabel("0", at.yq[:1])
        line = desk.ledger.lines[-1]
        with raises(unlearning.LedgerError, "in use by another writer"):
            unlearning.Ledger(folder / "ledger.jsonl")
    papers = unlearning.write_documents(line, at.folder / "papers")
    np.testing.assert_equal(json.loads(papers["json"].read_text())["line"]["hash"], line["hash"])
    assert "Certificate" in papers["html"].read_text()
    unlearning.erase_references(folder / "ledger.jsonl", [line["sequence"]])
    again = unlearning.Ledger(folder / "ledger.jsonl")
    again.check_head(line["hash"])
    with raises(unlearning.LedgerError, "0" * 12):
        again.check_head("0" * 64)
    np.testing.assert_equal(again.last_hash, line["hash"])
    assert again.lines[-1]["references"] is None
    with raises(unlearning.LedgerError, "it has no count"):
        again.append(kind="note")
    np.testing.assert_equal(len(again.lines), line["sequence"])
    again.close()
    if importlib.util.find_spec("model_signing") is None:
        with raises(ImportError, r"dualfluence\[signing\]"):
            unlearning.sign_documents(at.folder / "papers", at.folder / "signature", "key")
    with raises(ValueError, "outside the folder"):
        unlearning.sign_documents(at.folder / "papers", at.folder / "papers" / "inside", "key")


@row(*each("unlearning", "Publisher", "outputs params spent"), "unlearning.Published")
@row("unlearning.BudgetSpent", shared=True)
def publications(at):
    with unlearning.open(at.folder / "publisher", at.fitted) as desk:
        sigma = 20 * desk.certificate.distance_bound
        publisher = unlearning.Publisher(desk, epsilon=1.0, delta=1e-5, sigma=sigma)
        np.testing.assert_equal(publisher.spent, 0.0)
        found = publisher.params()
        assert isinstance(found, unlearning.Published)
        np.testing.assert_allclose(found.mu, desk.certificate.distance_bound / sigma)
        noise = flat(found.value) - flat(desk.model.params())
        assert np.linalg.norm(noise) < 6 * sigma * math.sqrt(noise.size)
        outputs = publisher.outputs(at.xq)
        at.typed(outputs.value)
        np.testing.assert_allclose(publisher.spent, math.hypot(found.mu, outputs.mu))
        poor = unlearning.Publisher(desk, epsilon=1e-3, delta=1e-9, sigma=sigma)
        with raises(unlearning.BudgetSpent, "larger sigma"):
            for _ in range(3):
                poor.params()


@row(
    "unlearning.delta_of",
    "unlearning.epsilon_of",
    "unlearning.mu_of",
    "unlearning.sigma_of",
    once=True,
)
def budgets(at):
    normal, mu, epsilon = NormalDist(), 0.7, 1.5
    x = np.linspace(-12, 12, 400_001)
    p, q = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0.0))
    delta = (
        np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x)
        if hasattr(np, "trapezoid")
        else np.trapz(np.maximum(p - math.exp(epsilon) * q, 0), x)
    )
    np.testing.assert_allclose(unlearning.delta_of(epsilon, mu), delta, rtol=1e-5)
    np.testing.assert_allclose(unlearning.mu_of(epsilon, delta), mu, rtol=1e-5)
    np.testing.assert_allclose(unlearning.epsilon_of(mu, delta), epsilon, rtol=1e-5)
    np.testing.assert_allclose(unlearning.sigma_of(2.0, epsilon, delta), 2.0 / mu, rtol=1e-5)
    assert normal is not None


@row("unlearning.klom", "unlearning.margins", "unlearning.membership_auc")
def measures_of_forgetting(at):
    f, labels = np.asarray(at.y), at.labels
    if at.c == 1:
        want = np.where(labels > 0, 1, -1) * f[:, 0]
    else:
        want = [
            row[k] - np.log(np.exp(np.delete(row, k)).sum())
            for row, k in zip(f, labels, strict=True)
        ]
    at.close(unlearning.margins(f, labels), want)
    a = np.asarray(at.array(40, at.n, seed=71), float)
    np.testing.assert_allclose(unlearning.klom(a, a), 0, atol=1e-12)
    b = a + 0.5
    edges = np.linspace(min(a[:, 0].min(), b[:, 0].min()), max(a[:, 0].max(), b[:, 0].max()), 21)
    p, q = (np.histogram(v[:, 0], edges)[0] / 40 for v in (a, b))
    terms = [u * math.log(u / max(v, 1e-5)) for u, v in zip(p, q, strict=True) if u > 0]
    np.testing.assert_allclose(unlearning.klom(a, b)[0], sum(terms))
    wins = (b[0][:, None] > a[1][None]) + 0.5 * (b[0][:, None] == a[1][None])
    np.testing.assert_allclose(unlearning.membership_auc(b[0], a[1]), wins.mean())
