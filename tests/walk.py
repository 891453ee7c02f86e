"""Which modules of the package a request passes, in the order in which it first enters them.

`python tests/walk.py` prints them for a fit, an edit, an attribution and a removal at the desk of a small
network with default options; `--json` prints them for a program. A module counts if one of its functions
runs between the call and its return. The running of its body at import does not count. Only the first
call of a process shows what is traced; later ones find compiled programs.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import dualfluence as dfl

PACKAGE = str(Path(dfl.__file__).parent) + "/"
FLOW = "fitted._fit"


class Walk:
    """Notes modules until its block ends, by names such as `dual._newton`.

    - `modules`: each once, in the order of first entry.
    - `stages`: the other modules of `fitted` that `fitted._fit` calls, each time it turns to another.
    """

    def __init__(self):
        self.modules, self.stages = [], []

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _see(self, frame, event, _):
        name = module(frame) if event == "call" else None
        if name is None:
            return
        if name not in self.modules:
            self.modules.append(name)
        caller = frame.f_back and module(frame.f_back)
        if caller == FLOW and name.startswith("fitted.") and name not in (FLOW, *self.stages[-1:]):
            self.stages.append(name)


def module(frame):
    """The module of a function of the package, or `None` elsewhere."""
    code = frame.f_code
    if code.co_name == "<module>" or not code.co_filename.startswith(PACKAGE):
        return None
    return code.co_filename[len(PACKAGE) :].removesuffix(".py").replace("/", ".")


def network(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def problem(n=20, d=5, width=16, c=3):
    """A small network with its points and classes."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)).astype(np.float32), rng.integers(c, size=n)
    params = [rng.normal(size=s).astype(np.float32) / s[0] ** 0.5 for s in [(d, width), (width, c)]]
    return dfl.linearize(network, [jnp.asarray(p) for p in params]), x, y


def walks():
    """The walk of each request."""
    model, x, y = problem()
    gone = dfl.Remove([1, 4])
    with Walk() as fit:
        fitted = dfl.fit(model, x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=1e-2, progress=False)
    with Walk() as edit:
        fitted.edit(gone, progress=False)
    with Walk() as attribution:
        fitted.attribute(x[:2], y[:2])
    with tempfile.TemporaryDirectory() as folder:
        desk = dfl.unlearning.open(folder, fitted)
        with desk, Walk() as removal:
            desk.remove([1, 4])
    return {"fit": fit, "edit": edit, "attribution": attribution, "removal": removal}


if __name__ == "__main__":
    found = walks()
    if "--json" in sys.argv:
        print(json.dumps({name: [walk.modules, walk.stages] for name, walk in found.items()}))
    else:
        for name, walk in found.items():
            print(f"{name}: {len(walk.modules)} modules\n  " + "\n  ".join(walk.modules))
