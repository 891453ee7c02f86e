"""48 ordinary linear problems in JAX's default float32: what `fit` refuses, true errors, certified bounds.

    python benchmarks/float32.py --out benchmarks/results/float32_cpu.json
    python benchmarks/float32.py --beside OTHER/src      (another version of the library on the same problems)

Eight standard normal features, times 1 or 10; 100 or 450 points; three losses; λ from 1e-1 to 1e-4. The
truth is Newton's method in NumPy and float64, which shares no code with the library. "Refused" counts fits
that raise or do not converge with default arguments; errors are relative to the norm of the parameters.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZES, RIDGES, SCALES = (100, 450), (1e-1, 1e-2, 1e-3, 1e-4), (1.0, 10.0)
LOSSES = ("squared error", "logistic", "softmax")
FEATURES = 8


def newton(x, y, ridge, loss):
    """Minimiser of the mean loss plus `ridge / 2 ‖θ‖²`, `(features, outputs)`, in float64."""
    n, p = x.shape
    c = y.shape[1]
    theta = np.zeros((p, c))

    def pieces(theta):
        f = x @ theta
        if loss == "squared error":
            return ((f - y) ** 2).sum(1) / 2, f - y, np.broadcast_to(np.eye(c), (n, c, c))
        if loss == "logistic":
            s = 1 / (1 + np.exp(-f))
            return (np.logaddexp(0, f) - y * f).sum(1), s - y, (s * (1 - s))[:, :, None]
        top = f.max(1, keepdims=True)
        log_sum = top[:, 0] + np.log(np.exp(f - top).sum(1))
        s = np.exp(f - log_sum[:, None])
        curvature = s[:, :, None] * np.eye(c) - s[:, :, None] * s[:, None, :]
        return log_sum - (y * f).sum(1), s - y, curvature

    def objective(theta):
        return pieces(theta)[0].mean() + ridge / 2 * (theta**2).sum()

    for _ in range(200):
        _, g, h = pieces(theta)
        gradient = x.T @ g / n + ridge * theta
        hessian = np.einsum("ni,nab,nj->iajb", x, h, x).reshape(p * c, p * c) / n
        step = -np.linalg.solve(hessian + ridge * np.eye(p * c), gradient.ravel()).reshape(p, c)
        length = 1.0
        while objective(theta + length * step) > objective(theta) and length > 1e-12:
            length /= 2
        if length <= 1e-12:
            break
        theta = theta + length * step
    return theta


def problems():
    for n, ridge, scale, loss in itertools.product(SIZES, RIDGES, SCALES, LOSSES):
        rng = np.random.default_rng(n)
        x = (scale * rng.normal(size=(n, FEATURES))).astype(np.float32)
        z = x.astype(float) @ rng.normal(size=(FEATURES, 3)) / scale + rng.normal(size=(n, 3)) / 2
        if loss == "squared error":
            y = z[:, :1].astype(np.float32)
        elif loss == "logistic":
            y = (z[:, :1] > 0).astype(np.float32)
        else:
            y = np.eye(3, dtype=np.float32)[z.argmax(1)]
        yield {"n": n, "ridge": ridge, "scale": scale, "loss": loss}, x, y


def measure():
    """One row per problem, printed as JSON."""
    import jax.numpy as jnp

    import dualfluence as dfl

    losses = {
        "squared error": dfl.SquaredError(),
        "logistic": dfl.Logistic(),
        "softmax": dfl.SoftmaxCrossEntropy(),
    }
    rows = []
    for setting, x, y in problems():
        model = dfl.linearize(lambda w, x: x @ w, jnp.zeros((FEATURES, y.shape[1])))
        truth = newton(x.astype(float), y.astype(float), setting["ridge"], setting["loss"])
        begin, refused = time.perf_counter(), ""
        options = {"loss": losses[setting["loss"]], "ridge": setting["ridge"], "progress": False}
        try:
            fitted = dfl.fit(model, x, y, **options)
        except Exception as error:
            refused = type(error).__name__
            fitted = dfl.fit(model, x, y, **options, on_failure="report")
        norm = np.linalg.norm(truth)
        wrong = np.linalg.norm(np.asarray(fitted.params(), float) - truth) / norm
        rows.append(
            {
                **setting,
                "refused": refused,
                "error": float(wrong),
                "bound": float(fitted.certificate.distance_bound / norm),
                "seconds": round(time.perf_counter() - begin, 2),
            }
        )
    print(json.dumps(rows))


def run(source):
    environment = os.environ | {"PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_ENABLE_X64", None)
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    rows = json.loads(done.stdout.splitlines()[-1])
    where = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(where, capture_output=True, text=True, check=False).stdout.strip()
    kept = [row for row in rows if not row["refused"]]
    looseness = [row["bound"] / max(row["error"], 1e-6) for row in kept]
    return {
        "commit": commit,
        "problems": len(rows),
        "refused": len(rows) - len(kept),
        "largest_error": max((row["error"] for row in kept), default=None),
        "largest_bound": max((row["bound"] for row in kept), default=None),
        "below_the_error": sum(row["bound"] < row["error"] for row in kept),
        "largest_bound_over_error_down_to_1e-6": max(looseness, default=None),
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="`src` of another version")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure()
    found = {"dtype": "float32", "machine": "CPU"}
    found["this"] = run(Path(__file__).parents[1] / "src")
    if args.beside:
        found["beside"] = run(args.beside)
    for name in ("this", "beside"):
        if name in found:
            print(name, {k: v for k, v in found[name].items() if k != "rows"})
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
