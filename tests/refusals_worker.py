"""Calls with an option out of range or of a wrong type, and words of the error that each must raise.

A process without a type checker runs them, because that of the tests would speak before the library. It
prints one line of JSON: the calls that were taken, or whose error says something else.
"""

import contextlib
import json
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import attribution, metrics, primal, store, unlearning

KEY = jax.random.key(0)
X, Y = np.random.default_rng(0).normal(size=(4, 2)), np.ones((4, 1))
OPTIONS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
TRAINED = {"loss": dfl.SquaredError(), "ridge": 0.1}
CALLS = []
"""What is called with which option changed, the option, its wrong value, and words of the error."""

WHOLE, FLAG, ONE_OF = "must be a whole number", "must be True or False", "must be "
POSITIVE, FRACTION, FUNCTION = (
    "must be a positive",
    "must lie between 0 and 1",
    "must be a function",
)


def network(w, x):
    return x @ w


def refuse(what, call, **wrong):
    """`call(option=value)` raises an error that says `what: option` and these words."""
    for option, (words, *values) in wrong.items():
        CALLS.extend((f"{what}: {option}", option, value, words, call) for value in values)


def fit(**changes):
    return dfl.fit(model, X, Y, **{**OPTIONS, **changes})


model = dfl.linearize(network, jnp.zeros((2, 1)))
fitted = fit()
update = fitted.edit(dfl.Remove([0]), progress=False)
folder = tempfile.TemporaryDirectory()

refuse(
    "fit", fit,
    solver=("must be an object", "cg", dfl.CG), rtol=(FRACTION, 0, 1), max_steps=(WHOLE, 0, 1.5),
    on_failure=(ONE_OF, "warn", 3), progress=(ONE_OF, 1), tolerance=(POSITIVE, 0, -1.0),
    loss=("must be a dualfluence loss", dfl.SquaredError, lambda f, y: f), sketch=("must be a Sketch", 5),
    kernel=(ONE_OF, 3, "thick"),
)  # fmt: skip
refuse(
    "edit", lambda **options: fitted.edit(dfl.Remove([0]), **options),
    solver=("must be an object", "cg"), steps=(WHOLE, 0, 1.5), until=(POSITIVE, 0, -1),
    drift=(POSITIVE, 0, "x"), rtol=(FRACTION, 2), on_failure=(ONE_OF, "warn"), progress=(ONE_OF, 1),
)  # fmt: skip
refuse(
    "retrain", lambda **options: fitted.retrain(dfl.Remove([0]), **options),
    solver=("must be an object", "cg"), tolerance=(POSITIVE, 0, -1), on_failure=(ONE_OF, "warn"),
    progress=(ONE_OF, 1),
)  # fmt: skip
refuse(
    "from_trained",
    lambda **changes: dfl.from_trained(model, fitted.params(), X, Y, **{**OPTIONS, **changes}),
    tangent=(ONE_OF, "traind", 1), linearised=(FLAG, 1), sketch=("must be a Sketch", 5),
    progress=(ONE_OF, 1), kernel=(ONE_OF, "thick"), loss=("must be a dualfluence loss", 3),
)  # fmt: skip
refuse(
    "kernel_gradient_descent",
    lambda **changes: dfl.kernel_gradient_descent(
        model, X, Y, **{**OPTIONS, "rate": 0.1, "epochs": 2, **changes}
    ),
    rate=(POSITIVE, 0), epochs=(WHOLE, 0), momentum=("must be in [0, 1)", -0.1, 1),
    record_every=(WHOLE, 0), progress=(ONE_OF, 1),
)  # fmt: skip
refuse("kernel_operator", lambda **options: dfl.kernel_operator(model, X, **options),
       progress=(ONE_OF, 1), kernel=(ONE_OF, "thick"))  # fmt: skip
refuse("predict", lambda **options: fitted.predict(X, **options), linearised=(FLAG, 1))
refuse("delta_outputs", lambda **options: update.delta_outputs(X, **options), linearised=(FLAG, 1))
refuse("delta_loss", lambda **options: update.delta_loss(X, Y, **options),
       first_order=(FLAG, 1), include_ridge=(FLAG, 1), linearised=(FLAG, 1))  # fmt: skip
refuse("save", lambda path="f", **options: fitted.save(path, **options),
       path=("must ", 3, " "), include_kernel=(FLAG, 1))  # fmt: skip
refuse("load", lambda path="f", **options: dfl.load(path, model, **options),
       path=("must ", 3, ""), progress=(ONE_OF, 1), loss=("must be a dualfluence loss", 3),
       kernel=("must be an operator", np.eye(4)))  # fmt: skip
refuse(
    "linearize",
    lambda apply_fn=network, **options: dfl.linearize(apply_fn, jnp.zeros((2, 1)), **options),
    apply_fn=(FUNCTION, 3), anchor=(ONE_OF, "zeros"), batch_size=(WHOLE, 0), trainable=(FUNCTION, 3),
)  # fmt: skip
refuse("Sketch", dfl.Sketch, rank=(WHOLE, -1, 0.5), key=("must be one random key", 0))
refuse("Convex", dfl.Convex, fn=(FUNCTION, 3))
refuse(
    "KernelOptions", dfl.KernelOptions,
    form=(ONE_OF, "thick"), operator=("must be an operator", np.eye(2)), refine=(FLAG, 1),
    precision=("must be one of jax.lax.Precision", "high"), num_outputs=(WHOLE, 0),
)  # fmt: skip
refuse("low_rank", lambda rank=1, **options: dfl.low_rank(model, X, rank, **options),
       rank=(WHOLE, 0), method=(ONE_OF, "svd"), num_outputs=(WHOLE, 0),
       key=("must be one random key", 0))  # fmt: skip
refuse(
    "plan", lambda **options: dfl.plan(**{"n": 10, "platform": "cpu", **options}),
    n=(WHOLE, 0), devices=(WHOLE, 0), rank=(WHOLE, 0), products=(WHOLE, 0), disk=(WHOLE, -1),
    bandwidth=(POSITIVE, 0), structure=(ONE_OF, "low"), platform=(ONE_OF, "abacus"), tile=(WHOLE, 0),
)  # fmt: skip
refuse(
    "store", lambda path=folder.name, **options: store.build(model, X, path, **options),
    path=("must ", 3, ""), num_outputs=(WHOLE, 0), tile=(WHOLE, 0), dtype=(ONE_OF, "float8"),
    verify=(FLAG, 1), wait=(FLAG, 1), progress=(ONE_OF, 1),
)  # fmt: skip
refuse("open_store", store.open_store, path=("must ", 3, ""))
refuse("open", lambda path=folder.name, **options: unlearning.open(path, fitted, **options),
       path=("must ", 3, ""), references=("must be one of", "no"), drift=(POSITIVE, 0))  # fmt: skip
refuse("LeadingProbes", attribution.LeadingProbes, m=(WHOLE, 0))
refuse("RandomProbes", lambda m=1, **options: attribution.RandomProbes(m, **options),
       m=(WHOLE, 0), seed=(WHOLE, -1))  # fmt: skip
refuse("attribute", lambda **options: fitted.attribute(X, Y, progress=False, **options),
       refine=(POSITIVE, 0.0), block_size=("must be at least 1", 0))  # fmt: skip
refuse("attribute", lambda **options: fitted.attribute_groups([[0]], X, Y, progress=False, **options),
       refine=(POSITIVE, 0.0))  # fmt: skip
refuse("random_perturbation",
       lambda key=KEY, norm=1.0: metrics.random_perturbation(key, {"w": X}, norm),
       key=("must be one random key", 0), norm=("expected one number", [1.0]))  # fmt: skip
refuse("unlearning_report", lambda predict: metrics.unlearning_report(
           predict, X, Y[:, 0].astype(int), [0], x_test=X, y_test=Y[:, 0].astype(int)),
       predict=(FUNCTION, 3))  # fmt: skip
refuse(
    "influence",
    lambda **changes: primal.influence(
        model, fitted.params(), X, Y, dfl.Remove([0]), **{**TRAINED, **changes}
    ),
    rtol=(FRACTION, 0), max_steps=(WHOLE, 0), linearised=(FLAG, 1), batch_size=(WHOLE, 0),
    loss=("must be a dualfluence loss", 3), on_failure=(ONE_OF, "warn"),
)  # fmt: skip
refuse(
    "attribute",
    lambda **changes: primal.attribute(
        model, fitted.params(), X, Y, X, Y, **{**TRAINED, **changes}
    ),
    linearised=(FLAG, 1), batch_size=(WHOLE, 0), loss=("must be a dualfluence loss", 3),
    on_failure=(ONE_OF, "warn"),
)  # fmt: skip

TRACED = [
    lambda v: dfl.fit(model, X, Y, max_steps=v, **OPTIONS),
    lambda v: dfl.Sketch(key=v),
    lambda v: fit(tolerance=v),
    lambda v: fit(weights=jnp.ones(4) * v),
    lambda v: dfl.linearize(network, v * jnp.ones((2, 1))),
    lambda v: dfl.Remove(v[None]),
    lambda v: dfl.Add(v * X, Y),
    lambda v: fitted.predict(v * X),
]
"""What is refused while JAX traces it."""


def said(call):
    with contextlib.suppress(Warning):
        try:
            call()
        except (TypeError, ValueError) as error:
            return str(error)
    return "no error"


def main():
    wrong = []
    for name, option, value, words, call in CALLS:
        text = said(lambda call=call, option=option, value=value: call(**{option: value}))
        if name not in text or words not in text:
            wrong.append([name, repr(value), words, text[:300]])
    for k, call in enumerate(TRACED):
        text = said(lambda call=call: jax.jit(lambda v: (call(v), 0)[1])(1))
        if "JAX is tracing" not in text:
            wrong.append([f"traced {k}", text[:300]])
    for edit in (None, 3):
        text = said(lambda edit=edit: fitted.edit(edit))
        if f"or a list of them, got {type(edit).__name__}" not in text:
            wrong.append([f"edit({edit})", text])
    print(json.dumps({"calls": len(CALLS), "wrong": wrong}))


if __name__ == "__main__":
    main()
