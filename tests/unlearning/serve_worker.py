"""A server in a process of its own: `serve_worker.py FOLDER PORT`."""

import sys
from pathlib import Path

import jax
import uvicorn

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

import cases  # noqa: E402
import dualfluence as dfl  # noqa: E402
import problems  # noqa: E402
from dualfluence.apps.serve._app import make_app  # noqa: E402
from dualfluence.apps.serve._token import read_token  # noqa: E402


def problem():
    return problems.linear_problem(300, 1, 12, "squared", ridge=0.2)


def main():
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    model = folder / "model.npz"
    if not model.exists():
        cases.fit(problem()).save(model, include_kernel=True)
    fitted = dfl.load(model, cases.model(problem()), progress=False)
    desk = dfl.unlearning.open(folder / "desk", fitted)
    token = read_token(folder / "desk" / "token")
    uvicorn.run(make_app(desk, token), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main()
