"""Scores of training points and the measures of scores, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
import oracles
from dualfluence import attribution
from dualfluence.attribution import evaluate

from .rows_fits import trained
from .table import each, jacobian, network, outputs, raises, row


def gradients(at, params, x, y, name):
    """`J_iᵀ∇ℓ_i`, `(n, p)`."""
    grad = oracles.LOSSES[name](outputs(params, x), y)[1]
    return np.einsum("nap,na->np", jacobian(params, x), grad)


def pair(at, params, weight=True):
    """Gradients of queries and training points, the latter with weights `1/n`."""
    train = gradients(at, params, at.x, at.probabilities, at.loss_name) / at.n
    return gradients(at, params, at.xq, at.query_probabilities, at.loss_name), train


@row(*each("attribution", "GradDot GradCos TracIn", "attribute"), "attribution.gradient_dot")
def products_of_gradients(at):
    args = (at.x, at.classes, at.xq, at.query_classes)
    query, train = pair(at, at.params)
    dot = attribution.GradDot(network, at.params).attribute(*args, loss=at.loss)
    at.close(dot.values, query @ train.T, 5)
    same = attribution.gradient_dot(network, at.params, *args, loss=at.loss)
    np.testing.assert_array_equal(same, dot.values)
    cos = attribution.GradCos(network, at.params).attribute(*args, loss=at.loss)
    size = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(train, axis=1)[None]
    at.close(cos.values, query @ train.T / size, 5)
    other_q, other = pair(at, at.other)
    total = 0.1 * query @ train.T + 0.2 * other_q @ other.T
    rates = [0.1, 0.2]
    tracin = attribution.TracIn(network, [at.params, at.other], rates).attribute(
        *args, loss=at.loss
    )
    at.close(tracin.values, total, 5)


@row(*each("attribution", "TRAK", "attribute"), shared=True)
def trak_by_hand(at):
    if at.c == 1:
        return  # class labels of one class have no margin
    args = (at.x, at.labels, at.xq, at.query_labels)

    def margin(x, labels):
        f, own = outputs(at.params, x), np.eye(at.c)[labels]
        p = np.exp(np.where(own > 0, -np.inf, f - f.max(1, keepdims=True)))
        p = p / p.sum(1, keepdims=True)
        s = np.exp(f - f.max(1, keepdims=True))
        missing = 1 - ((s / s.sum(1, keepdims=True)) * own).sum(1)
        return np.einsum("nap,na->np", jacobian(at.params, x), own - p), missing

    (phi, missing), (phi_q, _) = margin(at.x, at.labels), margin(at.xq, at.query_labels)
    K = phi @ phi.T
    K = K + 1e-2 * np.mean(np.diagonal(K)) * np.eye(at.n)
    want = (phi_q @ phi.T @ np.linalg.inv(K)) * missing
    found = attribution.TRAK(network, [at.params]).attribute(*args)
    at.close(found.values, want, 50)
    projected = attribution.TRAK(network, [at.params, at.other], projection=8).attribute(*args)
    np.testing.assert_equal(projected.values.shape, (at.q, at.n))
    assert np.isfinite(projected.values).all()


@row(*each("attribution", "Trajectory", "attribute checkpoint model num_checkpoints ridge"))
@row("attribution.attribute_runs", shared=True)
def scores_of_a_run(at):
    run = attribution.Trajectory(network, [at.params, at.other], [10, 20], 0.1, momentum=0.5)
    np.testing.assert_equal(run.num_checkpoints, 2)
    np.testing.assert_allclose(run.ridge(1), 0.5 / (attribution.KAPPA * 0.1 * 20))
    at.close(run.checkpoint(1)["W1"], at.other["W1"])
    at.close(run.model(1).base_outputs(at.x), outputs(at.other, at.x))
    args = (at.x, at.classes, at.xq, at.query_classes)
    found = run.attribute(*args, loss=at.loss, combine="mean")
    total = 0
    for k, params in enumerate((at.params, at.other)):
        J, Jq = jacobian(params, at.x), jacobian(params, at.xq)
        _, g, hess = oracles.LOSSES[at.loss_name](outputs(params, at.x), at.probabilities)
        H = np.einsum("nap,nab,nbr->pr", J, hess, J) / at.n + run.ridge(k) * np.eye(J.shape[2])
        v = oracles.LOSSES[at.loss_name](outputs(params, at.xq), at.query_probabilities)[1]
        train = np.einsum("nap,na->pn", J, g) / at.n
        scores = np.einsum("qap,qa->qp", Jq, v) @ np.linalg.solve(H, train)
        total = total + scores / np.sqrt(np.mean(scores**2, axis=1, keepdims=True)) / 2
    at.close(found.values, total, 30)
    two = attribution.attribute_runs([run, run], *args, loss=at.loss)
    np.testing.assert_equal(two.values.shape, (at.q, at.n))
    assert np.isfinite(two.values).all()
    if at.c > 1:
        assert np.isfinite(run.attribute(*args, method="projected").values).all()


@row("attribution.LeadingProbes.directions", "attribution.RandomProbes.directions")
@row("attribution.LeadingProbes", "attribution.RandomProbes")
def directions_of_outputs(at):
    f, rank = jnp.asarray(outputs(at.params, at.x), at.dtype), at.c - (at.c > 1)
    targets = at.loss.prepare_targets(at.classes, at.c, at.x.dtype)
    factor = at.loss.hess_factor(f, targets, jnp.full(at.n, 1 / at.n, at.dtype))
    P = np.asarray(attribution.LeadingProbes(rank).directions(factor, f, jax.random.key(0)))
    hess = oracles.LOSSES[at.loss_name](f, at.probabilities)[2] / at.n
    at.close(np.einsum("nam,nbm->nab", P, P), hess)
    drawn = attribution.RandomProbes(2).directions(factor, f, jax.random.key(0))
    np.testing.assert_equal(drawn.shape, (at.n, at.c, 2))
    run = attribution.Trajectory(network, [at.params], [10], 0.1)
    args = (at.x, at.classes, at.xq, at.query_classes)
    exact = run.attribute(*args, loss=at.loss, probes=None)
    for probes in (rank, attribution.LeadingProbes(rank)):
        at.close(run.attribute(*args, loss=at.loss, probes=probes).values, exact.values, 30)
    drawn = run.attribute(*args, loss=at.loss, probes=attribution.RandomProbes(1))
    assert np.isfinite(drawn.values).all()
    assert "random" in " ".join(drawn.notes)


@row(*each("attribution", "Attribution", "top num_points num_queries save load with_features"))
@row(*each("attribution", "Attribution", "self_influence to_pandas plot to_html"))
@row("attribution.Top", "attribution.Ranked")
def what_scores_can_do(at):
    values = np.asarray(at.array(at.q, at.n, seed=41))
    own = np.asarray(at.array(at.n, seed=42))
    made = attribution.Attribution(values=values, of="loss", own=own)
    np.testing.assert_equal((made.num_queries, made.num_points), values.shape)
    k = min(3, at.n)
    top = made.top(k)
    assert isinstance(top, attribution.Top)
    assert isinstance(top.helpful, attribution.Ranked)
    order = np.argsort(-values, axis=1, kind="stable")
    np.testing.assert_array_equal(top.helpful.indices, order[:, :k])
    np.testing.assert_array_equal(top.harmful.indices, order[:, ::-1][:, :k])
    np.testing.assert_array_equal(top.harmful.values, np.sort(values, axis=1)[:, :k])
    np.testing.assert_array_equal(made.self_influence(), own)
    path = at.folder / "scores.npz"
    shown = made.with_features(x=np.asarray(at.x), xq=np.asarray(at.xq))
    shown.save(path, include_features=True)
    back = attribution.Attribution.load(path)
    np.testing.assert_array_equal(back.values, values)
    np.testing.assert_array_equal(back.x, at.x)
    np.testing.assert_equal(back.values.dtype, at.dtype)
    try:
        import pandas
    except ImportError:
        with raises(ImportError, "pip install pandas"):
            made.to_pandas()
    else:
        assert isinstance(made.to_pandas(), pandas.DataFrame)
    assert shown.plot(k=k).axes
    texts = [
        [f"{name} {i}" for i in range(size)] for name, size in (("point", at.n), ("query", at.q))
    ]
    made.to_html(at.folder / "page.html", texts=texts[0], queries=texts[1])
    page = (at.folder / "page.html").read_text()
    np.testing.assert_equal(page.count("<section>"), at.q)
    assert f"point {order[0, 0]}</li>" in page or values[0].max() <= 0
    assert "queries" in repr(made)


@row("attribution.Attribution.top", "attribution.Attribution.plot")
def the_top_of_few_points(at):
    """With default arguments, whatever the number of points."""
    values = np.asarray(at.array(at.q, at.n, seed=41))
    made = attribution.Attribution(values=values, of="loss").with_features(
        x=np.asarray(at.x), xq=np.asarray(at.xq)
    )
    np.testing.assert_equal(made.top().helpful.indices.shape, (at.q, min(10, at.n)))
    assert made.plot().axes


@row(*each("attribution.evaluate", "Measured", ""), "attribution.evaluate.lds")
@row("attribution.evaluate.loo_correlation", "attribution.evaluate.mislabel_auc")
@row("attribution.evaluate.noise_ceiling", "attribution.evaluate.random_masks")
@row("attribution.evaluate.plot_measured", "attribution.evaluate.plot_removal")
@row("attribution.evaluate.removal_curve", "attribution.evaluate.RemovalCurve")
def measures_of_scores(at):
    if at.n < 3:
        with raises(ValueError, "random_masks"):
            evaluate.random_masks(1, 5, seed=0)
        return
    scores = np.asarray(at.array(at.q, at.n, seed=43), float)
    masks = evaluate.random_masks(at.n, 12, seed=0)
    np.testing.assert_array_equal(masks.sum(1), round(at.n / 2))
    # Models that lose exactly what the scores say: every ranking is right.
    targets = -(masks.astype(float) @ scores.T)
    found = evaluate.lds(scores, masks, targets)
    assert isinstance(found, evaluate.Measured)
    np.testing.assert_allclose(found.value, 1)
    np.testing.assert_allclose(evaluate.lds(scores, masks, -targets).value, -1)
    noisy = scores + 0.5 * np.asarray(at.array(at.q, at.n, seed=44), float)
    rows = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores, noisy, strict=True)]
    found = evaluate.loo_correlation(scores, noisy)
    np.testing.assert_allclose(found.value, np.mean(rows))
    wrong = np.arange(at.n) % 2 == 0
    suspicion = scores[0]
    wins = suspicion[wrong][:, None] > suspicion[~wrong][None]
    np.testing.assert_allclose(evaluate.mislabel_auc(suspicion, wrong), wins.mean())
    repeats = np.stack([targets, targets, targets, targets])
    ceiling = evaluate.noise_ceiling(repeats)
    np.testing.assert_allclose(ceiling.value, 1)
    assert evaluate.plot_measured({"scores": found}, ceiling=ceiling).axes
    retrain = lambda masks: -(masks.astype(float) @ scores.T)  # noqa: E731
    curve = evaluate.removal_curve(scores, retrain, [0, 1])
    assert isinstance(curve, evaluate.RemovalCurve)
    mean = scores.mean(0)
    np.testing.assert_allclose(curve.helpful[1] - curve.helpful[0], mean.max())
    np.testing.assert_allclose(curve.harmful[1] - curve.harmful[0], mean.min())
    assert evaluate.plot_removal(curve).axes


@row("attribution.evaluate.Truth", "attribution.evaluate.Truth.targets")
@row(
    "attribution.evaluate.retrain_linearised", "attribution.evaluate.retrain_networks", shared=True
)
def retrained_truth(at):
    masks = np.ones((1, 1), bool) if at.n < 2 else evaluate.random_masks(at.n, 2, seed=1)
    found = evaluate.retrain_linearised(at.fitted, masks, at.xq, at.yq, relative=at.rtol / 10)
    assert isinstance(found, evaluate.Truth)
    want = []
    for keep in masks:
        f = at.f0q + at.Jq @ trained(at, weights=keep.astype(float))
        want.append(0.5 * np.sum((f - np.asarray(at.yq, float)) ** 2, axis=1))
    at.close(found.targets, want, 10)

    def train(key, rows):
        x, y = at.x[rows], at.y[rows]
        return jnp.linalg.solve(x.T @ x + jnp.eye(at.d, dtype=at.dtype), x.T @ y)

    def measure(W):
        return jnp.sum((at.xq @ W - at.yq) ** 2, axis=1)

    networks = evaluate.retrain_networks(train, measure, masks, seeds=[0, 1])
    direct = [measure(train(jax.random.key(0), np.flatnonzero(keep))) for keep in masks]
    at.close(networks.targets, np.stack(direct))
    np.testing.assert_equal(networks.seeds, (0, 1))
    assert isinstance(dfl.SquaredError(), dfl.losses.AbstractLoss)
