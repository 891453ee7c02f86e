"""The library's view of the NumPy problems: models, losses, edits and distances for tests."""

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
import oracles
import problems

LOSSES = {
    "squared": dfl.SquaredError(),
    "softmax": dfl.SoftmaxCrossEntropy(),
    "logistic": dfl.Logistic(),
}


def model(p: problems.Problem, dtype=jnp.float64) -> dfl.Linearized:
    return dfl.linearize(problems.apply, jnp.zeros(p.J.shape[2], dtype))


def fit(p: problems.Problem, *, dtype=jnp.float64, weights=None, **options) -> dfl.Fitted:
    return dfl.fit(
        model(p, dtype),
        jnp.asarray(p.x, dtype),
        p.y,
        loss=LOSSES[p.loss_name],
        ridge=p.ridge,
        weights=p.sample_weights if weights is None else weights,
        progress=False,
        **options,
    )


def retrain(p: problems.Problem, sample_weights, x=None, y=None) -> np.ndarray:
    """Exact parameters for other weights, features or targets, from the NumPy oracle."""
    x, y = (p.x if x is None else x), (p.y if y is None else y)
    w = oracles.normalise(np.asarray(sample_weights, float))
    return oracles.retrain(x[..., :-1], x[..., -1], y, w, p.ridge, oracles.LOSSES[p.loss_name])


def without(p: problems.Problem, gone) -> np.ndarray:
    s = p.sample_weights.copy()
    s[np.asarray(gone)] = 0
    return s


def relative(got, want, scale=None) -> float:
    """`‖got − want‖ / ‖want‖`, or over another scale."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want if scale is None else scale))


def mlp_params(key, sizes, dtype=jnp.float64):
    keys = jax.random.split(key, len(sizes))
    return [
        jax.random.normal(k, (a, b), dtype) / np.sqrt(a)
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]


def mlp(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


def same_state(one: dfl.Fitted, other: dfl.Fitted) -> bool:
    """Whether two states are equal bit by bit, numbers in words included."""
    return same_bits(one, other) and one.certificate == other.certificate


def same_bits(one: dfl.Fitted, other: dfl.Fitted) -> bool:
    """The same but for the certificate, which a file does not bring along."""
    pairs = [(one.x, other.x), (one.data.targets, other.data.targets), (one.alpha, other.alpha)]
    pairs += [(one.data.sample_weights, other.data.sample_weights), (one.outputs, other.outputs)]
    pairs += [(one.kernel_diagonal, other.kernel_diagonal)]
    words = (one.ridge, one.stats) == (other.ridge, other.stats)
    words = words and float(one.state.drift) == float(other.state.drift)
    return words and all(np.array_equal(a, b) for a, b in pairs)
