"""Our attribution in parameter space against independent software; writes JSON.

    python -m venv venv-peers
    venv-peers/bin/pip install torch==2.13.0 kronfluence "pydvl[influence]"
    python benchmarks/peers_attribution.py --peer-python venv-peers/bin/python \
        --out benchmarks/results/peers_attribution.json

One network (49-16-10, tanh), 200 points of `mnist-small` averaged to 7 by 7 pixels, 20 queries. Data and
trained weights are carried over in an `.npz` file, and the same script runs in the other environment to
score them there: EK-FAC by kronfluence; Arnoldi, LiSSA and the dense solve by pyDVL. Compared are ranks of
scores (Spearman, per query, mean and smallest) and values (relative difference after the best factor).

EK-FAC: kronfluence draws one label per point from the model where ours takes the expectation over labels.
It is run as it is, with 100 draws per point, and on every pair of point and label with the label's
probability as weight, which is the expectation through its own interface. Its eigenvalues are then means
over `n·c` rows instead of `n`, so that its damping is ours over `c`.

`factor` is what peers leave out: both give `∇ℓ_q H⁻¹ ∇ℓ_i` without the weight `1/n` of the point, and
kronfluence on pairs another `1/c`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

WIDTHS = (49, 16, 10)
RIDGE = 0.05
RANK = 40
SEED = 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=False)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--as-peer", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        run_peers(*args.as_peer)
        return
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
        arrays = make_case()
        np.savez(given, **arrays)
        command = [
            args.peer_python,
            str(Path(__file__).resolve()),
            "--as-peer",
            str(given),
            str(found),
        ]
        subprocess.run(command, check=True, cwd=folder)
        with np.load(found) as file:
            peers = {name: file[name] for name in file.files}
    versions = json.loads(str(peers.pop("versions")))
    record = compare(arrays, peers)
    record["versions"] |= versions
    print(json.dumps(record, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


# In this environment.


def apply(params, x):
    import jax.numpy as jnp

    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def make_case():
    """Data and trained weights, float32."""
    import jax
    import jax.numpy as jnp

    import dualfluence as dfl

    data = dfl.datasets.load("mnist-small")
    x, xq = (
        np.asarray(a, np.float32).reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(len(a), -1)
        for a in (data.x_train[:200], data.x_test[:20])
    )
    y, yq = np.asarray(data.y_train[:200], np.int64), np.asarray(data.y_test[:20], np.int64)
    rng = np.random.default_rng(SEED)
    params = {
        "w1": rng.normal(size=WIDTHS[:2]) / 7,
        "b1": 0.1 * rng.normal(size=WIDTHS[1]),
        "w2": rng.normal(size=WIDTHS[1:]) / 4,
        "b2": 0.1 * rng.normal(size=WIDTHS[2]),
    }
    params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}

    def loss(p):
        f = apply(p, jnp.asarray(x))
        fit = jnp.mean(jax.nn.logsumexp(f, axis=1) - f[jnp.arange(200), y])
        return fit + 0.5 * 1e-3 * sum(jnp.sum(v**2) for v in p.values())

    step = jax.jit(lambda p: jax.tree.map(lambda v, g: v - 0.5 * g, p, jax.grad(loss)(p)))
    for _ in range(2000):
        params = step(params)
    return {"x": x, "y": y, "xq": xq, "yq": yq, **{k: np.asarray(v) for k, v in params.items()}}


def compare(arrays, peers):
    import jax

    jax.config.update("jax_enable_x64", True)
    import dualfluence as dfl
    from dualfluence.attribution.evaluate._measures import spearman
    from dualfluence.primal import CG, EKFAC, Arnoldi, LiSSA

    params = {k: np.asarray(arrays[k], float) for k in ("w1", "b1", "w2", "b2")}
    data = [np.asarray(arrays[k], None if k[0] == "y" else float) for k in ("x", "y", "xq", "yq")]
    model = dfl.linearize(apply, params)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": RIDGE, "linearised": False}

    def ours(solver):
        return dfl.primal.attribute(model, params, *data, solver=solver, **options).values

    ekfac = ours(EKFAC())
    exact = ours(CG(hessian="exact"))
    pairs = {
        "kronfluence EK-FAC, expectation over labels": (ekfac, "kronfluence"),
        "kronfluence EK-FAC, one drawn label per point": (ekfac, "kronfluence_drawn"),
        "kronfluence EK-FAC, 100 drawn labels per point": (ekfac, "kronfluence_drawn_100"),
        "pyDVL Arnoldi": (ours(Arnoldi(rank=RANK, steps=300, hessian="exact")), "arnoldi"),
        "pyDVL LiSSA, 1000 steps each": (ours(LiSSA(hessian="exact")), "lissa"),
        "pyDVL dense solve, batches of 200": (exact, "direct_200"),
        "pyDVL dense solve, batches of 64": (exact, "direct_64"),
    }
    rows = {}
    for name, (a, key) in pairs.items():
        b = peers[key].astype(float)
        ranks = spearman(a, b)
        factor = np.vdot(a, b) / np.vdot(b, b)
        rows[name] = {
            "rank_correlation": float(ranks.mean()),
            "smallest_rank_correlation": float(ranks.min()),
            "relative_difference": float(np.linalg.norm(a - factor * b) / np.linalg.norm(a)),
            "factor": float(factor),
        }
    found = {
        "benchmark": "peers_attribution",
        "config": {
            "network": "-".join(map(str, WIDTHS)) + ", tanh",
            "parameters": int(sum(v.size for v in params.values())),
            "points": 200,
            "queries": 20,
            "ridge": RIDGE,
            "rank": RANK,
            "seed": SEED,
        },
        "ours_changes_with_batch_size": float(_batch_change(model, params, data, options)),
        "rows": rows,
        "versions": {
            "jax": jax.__version__,
            "dualfluence": dfl.__version__,
            "numpy": np.__version__,
        },
    }
    return found


def _batch_change(model, params, data, options):
    """Relative change of our exact scores from one batch to batches of 20."""
    import dualfluence as dfl

    solver = dfl.primal.CG(hessian="exact", rtol=1e-12)
    whole, small = (
        dfl.primal.attribute(model, params, *data, solver=solver, batch_size=size, **options).values
        for size in (200, 20)
    )
    return np.linalg.norm(whole - small) / np.linalg.norm(whole)


# In theirs.


def run_peers(given, found):
    import torch

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    with np.load(given) as file:
        arrays = {k: torch.as_tensor(file[k]) for k in file.files}
    results = {**run_kronfluence(arrays), **run_pydvl(arrays)}
    results["versions"] = np.asarray(json.dumps(peer_versions()))
    np.savez(found, **results)


def peer_versions():
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "kronfluence", "pydvl")}


def make_torch(arrays):
    import torch

    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTHS[0], WIDTHS[1]), torch.nn.Tanh(), torch.nn.Linear(*WIDTHS[1:])
    )
    with torch.no_grad():
        for layer, k in ((net[0], "1"), (net[2], "2")):
            layer.weight.copy_(arrays["w" + k].T)
            layer.bias.copy_(arrays["b" + k])
    return net


def run_kronfluence(arrays):
    import torch
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.nn.functional import cross_entropy, softmax
    from torch.utils.data import ConcatDataset, TensorDataset

    x, y, xq, yq = (arrays[k] for k in ("x", "y", "xq", "yq"))
    c = WIDTHS[-1]
    plain = make_torch(arrays)
    with torch.no_grad():
        probs = softmax(plain(x), dim=1)
    pairs = TensorDataset(
        x.repeat_interleave(c, 0), torch.arange(c).repeat(len(x)), probs.reshape(-1).sqrt()
    )
    train = TensorDataset(x, y, torch.ones(len(x)))
    queries = TensorDataset(xq, yq, torch.ones(len(xq)))

    class Classification(Task):
        draws = False

        def compute_train_loss(self, batch, model, sample=False):
            inputs, labels, roots = batch
            f = model(inputs)
            if sample and self.draws:
                labels = torch.multinomial(softmax(f.detach(), dim=1), 1).flatten()
            return torch.sum(roots * cross_entropy(f, labels, reduction="none"))

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    results = {}
    for name, rows, draws, damping in (
        ("kronfluence", pairs, False, RIDGE / c),
        ("kronfluence_drawn", train, True, RIDGE),
        ("kronfluence_drawn_100", ConcatDataset([train] * 100), True, RIDGE),
    ):
        task = Classification()
        task.draws = draws
        analyzer = Analyzer(
            name, prepare_model(make_torch(arrays), task), task, cpu=True, disable_tqdm=True
        )
        wide = torch.float64
        factors = FactorArguments(
            strategy="ekfac", activation_covariance_dtype=wide, gradient_covariance_dtype=wide,
            per_sample_gradient_dtype=wide, lambda_dtype=wide,
        )  # fmt: skip
        analyzer.fit_all_factors(
            "factors", rows, per_device_batch_size=100, factor_args=factors,
            overwrite_output_dir=True,
        )  # fmt: skip
        analyzer.compute_pairwise_scores(
            "scores", "factors", queries, train, per_device_query_batch_size=20,
            per_device_train_batch_size=100, overwrite_output_dir=True,
            score_args=ScoreArguments(damping_factor=damping),
        )  # fmt: skip
        scores = analyzer.load_pairwise_scores("scores")
        results[name] = scores["all_modules"].numpy()
    return results


def run_pydvl(arrays):
    from pydvl.influence.torch import ArnoldiInfluence, DirectInfluence, LissaInfluence
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    x, y, xq, yq = (arrays[k] for k in ("x", "y", "xq", "yq"))
    x, xq = x.double(), xq.double()
    net = make_torch(arrays).double().eval()

    def scores(method, size, **options):
        model = method(net, cross_entropy, regularization=RIDGE, **options)
        model = model.fit(DataLoader(TensorDataset(x, y), batch_size=size))
        return model.influences(xq, yq, x, y).detach().numpy()

    return {
        "arnoldi": scores(ArnoldiInfluence, 200, rank=RANK),
        "lissa": scores(LissaInfluence, 200, maxiter=1000, scale=10.0, rtol=1e-8),
        "direct_200": scores(DirectInfluence, 200),
        "direct_64": scores(DirectInfluence, 64),
    }


if __name__ == "__main__":
    sys.exit(main())
