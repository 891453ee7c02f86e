"""The demo's page: plots and a table in one self-contained HTML file."""

import base64
import html
import io
from pathlib import Path
from typing import Any

from ..._support.files import write_atomically
from ..compare._look import STYLES
from ..compare._names import RETRAINED
from ._run import METHODS

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#111;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}
table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #ddd}
th:nth-child(2),td:nth-child(2){text-align:left}
tr.first td{border-top:2px solid #888}img{width:100%}.note{color:#444;font-size:.9rem}
"""


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the page for `run_demo`'s result; nothing is left behind if it fails."""
    page = _page(result).encode()
    write_atomically(path, lambda file: file.write(page))


def _page(result: dict[str, Any]) -> str:
    config, machine, fit = result["config"], result["machine"], result["fit"]
    rows = "\n".join(_row(o) for o in result["outcomes"])
    size = config["points"] * config["outputs"]
    picture = base64.b64encode(_plots(result)).decode()
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>dualfluence demo</title>
<style>{STYLE}</style></head><body>
<h1>Removing training points without retraining</h1>
<p>A linearised {html.escape(config["network"])} network ({config["parameters"]:,} parameters) was
fitted to {config["points"]} MNIST digits (softmax cross-entropy, λ = {config["ridge"]:g}) in
{fit["steps"]} Newton steps and {fit["products"]} products with its kernel of size {size:,}. Then
parts of the training set were removed, and each method estimated the parameters that retraining
would give.</p>
<img alt="Time, distance, certificate and forget accuracy against the share removed"
src="data:image/png;base64,{picture}">
<h2>Numbers</h2>
<table><thead><tr><th>removed</th><th>method</th><th>time</th><th>error / change</th>
<th>certified</th><th>iterations</th><th>forget acc.</th><th>test acc.</th></tr></thead>
<tbody>{rows}</tbody></table>
<h2>How to read this</h2>
<p class="note"><b>Time</b> is a repeated call until the new parameters are ready (median; compilation
apart). <b>Error</b> is ‖θ − θ_retrained‖ over ‖θ_before − θ_retrained‖: 100 % is what doing nothing costs.
<b>Certified</b> is the computed upper bound on the same quantity; it needs no retraining. One step is the
influence function; each further step roughly squares the error. The paper's form and parameter space run
conjugate gradients to a residual of 1e-8 or for 500 iterations, as published. Ours takes all points, or
where half of them or more are gone a block in one of a few sizes, so that later requests find it compiled;
small blocks are factorised, which takes no iterations.
Measured on {html.escape(machine["device"])}, JAX {machine["jax"]}, {html.escape(config["dtype"])},
{result["seconds"]:.0f} s in all.</p></body></html>"""


def _row(o: dict[str, Any]) -> str:
    cert = "" if o["certificate"] is None else percent(o["certificate"])
    first = ' class="first"' if o["method"] == RETRAINED else ""
    share = f"{o['percent']:g} %" if o["method"] == RETRAINED else ""
    iterations = "" if o["iterations"] is None else o["iterations"]
    return (
        f"<tr{first}><td>{share}</td><td>{html.escape(o['method'])}</td>"
        f"<td>{_seconds(o['timing']['repeat'])}</td><td>{percent(o['error'])}</td><td>{cert}</td>"
        f"<td>{iterations}</td><td>{o['forget_accuracy']:.3f}</td><td>{o['test_accuracy']:.3f}</td></tr>"
    )


def percent(share: float) -> str:
    """A share as a percentage with two digits, never in exponents."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _plots(result: dict[str, Any]) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    panels = (
        (axes[0, 0], lambda o: o["timing"]["repeat"], "time per request (s)", True),
        (axes[0, 1], lambda o: o["error"], "distance to retraining / change", True),
        (axes[1, 0], lambda o: o["certificate"], "certified distance / change", True),
        (axes[1, 1], lambda o: o["forget_accuracy"], "accuracy on removed points", False),
    )
    for axis, value, label, log in panels:
        for method in METHODS:
            points = [(o["percent"], value(o)) for o in result["outcomes"] if o["method"] == method]
            points = [(x, y) for x, y in points if y is not None and (y > 0 or not log)]
            # The distance of retraining to itself says nothing.
            if points and not (method == RETRAINED and "distance" in label):
                xs, ys = zip(*points, strict=True)
                axis.plot(xs, ys, label=method, alpha=0.9, **STYLES[method])
        axis.set_xlabel("removed (% of training points)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()
