"""The authors' own code beside ours, on one model: `python benchmarks/authors.py --checkout DIR --out FILE`.

`DIR` is a checkout of the repository of Sun and Valaee's paper (github.com/ZhenhuanSun/ntk_influence).
Nothing of it is in this repository. Three of its modules run here: `utils/influence.py`, `utils/loss.py` and
`utils/train_utils.py`. Their text is that of the checkout, except for the replacements `ONE_DEVICE`, `NO_GPU`
and `NEW_JAX` below, which the record lists.

The experiment around them is this script, which needs no Neural Tangents. It builds the linearised network of
figure 1 with our layers, in the same shape and parameterisation, computes its `K` with our kernel, and trains
it to the optimum. Both sides get the same `K`, the same parameters and the same sets to forget. As in the
authors' experiment, `K` waits on the host, and every timed call goes from the trained model to new
parameters. Matrix products run at JAX's default precision in their code and in full float32 in ours.

Retained and forgotten points come in multiples of 100 here, as in the paper: the batches of 100 in their
parameter space fill up with points of zeros, whose loss enters the mean of the batch.

`--limit` starts no further measurement after so many seconds, by default 120. `--smoke` runs a small network
on any device.
"""

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# `K` waits on the host, which JAX must be allowed to use beside the device.
if (chosen := os.environ.get("JAX_PLATFORMS")) and "cpu" not in chosen.split(","):
    os.environ["JAX_PLATFORMS"] = f"{chosen},cpu"

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import datasets, metrics
from dualfluence.apps.compare._machine import environment
from dualfluence.apps.compare._names import ONE_STEP
from dualfluence.apps.compare._networks import Architecture, make_network
from dualfluence.apps.compare._timing import time_call
from dualfluence.apps.paper._common import EXACT_TOLERANCE, forget_sets
from dualfluence.apps.paper._results import write_json

CLASSES = 10
RIDGE = 1e-2
BATCH = 100
"""Points per forward pass, as in the authors' experiment."""

COLUMNS = 1000
"""Columns of the materialised matrix that are computed at once."""

THEIR_PARAMETER = "authors' parameter space"
THEIR_DUAL = "authors' dual form"
THEIR_SHARDED = "authors' dual form, sharded"
THEIR_MATERIALISED = "authors' dual form, materialised"


@dataclass(frozen=True)
class Change:
    """A replacement in the text of a module, and the reason for it."""

    file: str
    old: str
    new: str
    why: str


INFLUENCE = "utils/influence.py"
ONE_DEVICE = (Change(INFLUENCE, "gpus[1]", "gpus[-1]", "there is no second device"),)
NO_GPU = (Change(INFLUENCE, 'jax.devices("gpu")', "jax.devices()", "there is no GPU"),)
NEW_JAX = (
    Change(
        INFLUENCE,
        "from jax.experimental.shard_map import shard_map",
        "from jax import shard_map",
        "this version of JAX has it there",
    ),
    Change(INFLUENCE, "check_rep=", "check_vma=", "this version of JAX calls it so"),
)


def needed_changes() -> tuple[Change, ...]:
    """The replacements that this machine and its JAX force."""
    changes = ONE_DEVICE if len(jax.devices()) == 1 else ()
    if jax.default_backend() != "gpu":
        changes = (*ONE_DEVICE, *NO_GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            importlib.import_module("jax.experimental.shard_map").shard_map  # noqa: B018
        except (ImportError, AttributeError):
            changes = (*changes, *NEW_JAX)
    return changes


class _Checkout(MetaPathFinder, Loader):
    """Imports `utils` and its modules from a checkout, with replacements in their text."""

    def __init__(self, folder: Path, changes: Sequence[Change]) -> None:
        self.folder, self.changes = folder, changes
        self.digests: dict[str, str] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == "utils":
            return spec_from_loader(fullname, self, is_package=True)
        return spec_from_loader(fullname, self) if fullname.startswith("utils.") else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "utils":
            return
        name = module.__name__.replace(".", "/") + ".py"
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"authors.py: --checkout must be a checkout of the authors' repository, but there is no "
                f"{path}."
            )
        text = path.read_text()
        self.digests[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        for change in self.changes:
            if change.file == name:
                if change.old not in text:
                    raise ValueError(
                        f"authors.py: {path} has no {change.old!r}, which has to be replaced because "
                        f"{change.why}. This checkout may be of another version."
                    )
                text = text.replace(change.old, change.new)
        exec(compile(text, str(path), "exec"), module.__dict__)


class Authors(NamedTuple):
    """The authors' modules, and the digest of each file that was read."""

    influence: Any
    loss: Any
    train_utils: Any
    digests: dict[str, str]


@contextmanager
def _importing(finder: _Checkout) -> Iterator[None]:
    """`finder` comes first; what `utils` was before is there again afterwards."""

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == "utils"]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            yield
    finally:
        sys.meta_path.remove(finder)
        take()
        sys.modules.update(before)


def load_authors(folder: Path, changes: Sequence[Change]) -> Authors:
    """The authors' modules from a checkout, with these replacements in their text."""
    finder = _Checkout(folder, changes)
    with _importing(finder):
        names = ("influence", "loss", "train_utils")
        modules = [importlib.import_module(f"utils.{name}") for name in names]
    return Authors(*modules, finder.digests)


class Case(NamedTuple):
    """The trained model: ours, and in the form that the authors' functions take.

    - `fitted`: ours.
    - `apply`: the linearised network, parameters and points to outputs.
    - `params`, `params_0`: trained, and at the tangent.
    - `x`, `y`: points, and targets with a one at the class.
    - `K`: `(n, n, c, c)`, on the host.
    - `classes`: of the points.
    """

    fitted: Any
    apply: Callable[..., Any]
    params: Any
    params_0: Any
    x: Any
    y: Any
    K: Any
    classes: np.ndarray


def make_case(per_class: int, width: int, seed: int) -> Case:
    """The fully connected network of figure 1 on the first digits, trained to the optimum."""
    part = datasets.subset(
        datasets.load("mnist-small"),
        per_class_train=per_class,
        per_class_test=1,
        classes=range(CLASSES),
    )
    x, classes = jnp.asarray(part.x_train), np.asarray(part.y_train)
    net = make_network(Architecture("fcnn", 3, width))
    params_0 = net.init(jax.random.key(seed), x.shape[1:], outputs=CLASSES)
    model = dfl.linearize(net.apply, params_0)
    fitted = dfl.fit(
        model,
        x,
        classes,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=RIDGE,
        kernel=dfl.KernelOptions(form="dense", refine=False),
        tolerance=EXACT_TOLERANCE,
        on_failure="report",
        progress=False,
    )

    @jax.jit
    def apply(params: Any, x: Any) -> Any:
        moved = jax.tree.map(jnp.subtract, params, params_0)
        f, change = jax.jvp(lambda theta: net.apply(theta, x), (params_0,), (moved,))
        return f + change

    n = x.shape[0]
    K = np.asarray(fitted.kernel_op.entries()).reshape(n, CLASSES, n, CLASSES)
    host = jax.device_put(K.transpose(0, 2, 1, 3), jax.devices("cpu")[0])
    y = jax.nn.one_hot(jnp.asarray(classes), CLASSES, dtype=x.dtype)
    return Case(fitted, apply, fitted.params(), params_0, x, y, host, classes)


Removal = Callable[[np.ndarray], Any]
"""Positions of the points to remove ↦ new parameters."""


def their_methods(code: Authors, case: Case) -> dict[str, Removal]:
    """The authors' functions, called in the order of their experiment."""
    influence = code.influence
    loss_fn = code.loss.make_rce_loss_fn(case.apply, RIDGE)
    outputs = code.train_utils.make_batched_apply(case.apply, batch_size=BATCH)

    def loss_of_outputs(f: Any, y: Any) -> Any:
        return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(f), axis=-1))

    def parameter_space(gone: np.ndarray) -> Any:
        given = (loss_fn, case.params, case.params_0, case.x, case.y, jnp.asarray(gone))
        hvp, rhs = influence.prepare_solve_theta(*given)
        return influence.influence_on_theta(hvp, rhs, case.params)[0]

    def dual(**options: Any) -> Removal:
        def removal(gone: np.ndarray) -> Any:
            rows, f = jnp.asarray(gone), outputs(case.params, case.x)
            H, rhs, known = influence.prepare_solve_delta_alpha(
                loss_of_outputs, f, case.y, rows, RIDGE, case.K, **options
            )
            delta = influence.influence_on_delta_alpha(H, rhs, known, case.x, rows)
            return influence.map_back_to_theta_space(
                case.apply, case.params, case.params_0, case.x, delta
            )

        return removal

    return {
        THEIR_DUAL: dual(shard_K_X_X=False),
        THEIR_PARAMETER: parameter_space,
        THEIR_MATERIALISED: dual(materialize_H_rr=True, batch_size=COLUMNS),
        THEIR_SHARDED: dual(shard_K_X_X=True),
    }


def our_step(case: Case) -> Removal:
    def removal(gone: np.ndarray) -> Any:
        edited = case.fitted.edit(dfl.Remove(gone), on_failure="report", progress=False)
        return edited.params()

    return removal


@dataclass(frozen=True)
class Settings:
    """What is measured.

    - `per_class`: points of each digit.
    - `width`: of the three hidden layers.
    - `percentages`: shares of points to remove.
    - `repeats`: later calls of every method, each on another set of the same size.
    - `seed`: of the network and the sets.
    """

    per_class: int = 200
    width: int = 1024
    percentages: tuple[int, ...] = (10, 90)
    repeats: int = 3
    seed: int = 0


SMOKE = Settings(per_class=20, width=16, percentages=(50,), repeats=1)


def measure(
    checkout: Path,
    settings: Settings,
    limit: float = float("inf"),
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """First and later calls of every method, and its distance to exact retraining.

    `keep` gets the record after every measurement.
    """
    start, changes = time.monotonic(), needed_changes()
    code = load_authors(checkout, changes)
    case = make_case(settings.per_class, settings.width, settings.seed)
    methods = {ONE_STEP: our_step(case), **their_methods(code, case)}
    found: dict[str, Any] = {
        "benchmark": "authors",
        "environment": environment(),
        "settings": asdict(settings) | {"ridge": RIDGE, "columns": COLUMNS},
        "checkout": {"commit": commit_of(checkout), "files": code.digests},
        "changes": [asdict(change) for change in changes],
        "trained_to": case.fitted.certificate.relative_bound,
        "left_out": [],
        "rows": [],
    }
    cases = []
    for percent in settings.percentages:
        sets = forget_sets(case.classes, percent, None, settings.seed, settings.repeats + 1)
        retrained = case.fitted.retrain(dfl.Remove(sets[0]), on_failure="report", progress=False)
        truth = retrained.params()
        row: dict[str, Any] = {
            "percent": percent,
            "removed": len(sets[0]),
            "change": metrics.relative_distance(case.params, truth),
            "retrained_to": retrained.certificate.relative_bound,
            "methods": {},
        }
        found["rows"].append(row)
        cases.append((row, sets, truth))
    # In this order a limit leaves out what one device tells least about.
    for name, method in methods.items():
        for row, sets, truth in cases:
            if time.monotonic() - start > limit:
                found["left_out"].append([name, row["percent"]])
                continue
            jax.clear_caches()
            first = time_call(lambda m=method, s=sets[0]: m(s))
            row["methods"][name] = {
                "first": first.seconds,
                "distance": metrics.relative_distance(first.result, truth),
                "repeat": [time_call(lambda m=method, s=s: m(s)).seconds for s in sets[1:]],
            }
            found["seconds"] = time.monotonic() - start
            print(row["percent"], name, row["methods"][name], flush=True)
            keep(found)
    return found


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout with its history; `None` for files alone."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="of the authors' repository")
    parser.add_argument("--smoke", action="store_true", help="small sizes, on any device")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = SMOKE if args.smoke else Settings()

    def keep(found: dict[str, Any]) -> None:
        if args.out:
            write_json(args.out, found)

    measure(args.checkout, settings, args.limit, keep)


if __name__ == "__main__":
    main()
