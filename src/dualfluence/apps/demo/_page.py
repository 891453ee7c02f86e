"""The page of the demo: digits and labels in pictures, times, plots and a table, in one HTML file."""

import html
import io
from pathlib import Path
from typing import Any

import numpy as np

from ... import datasets
from ..compare._look import STYLES
from ..compare._names import ONE_STEP, RETRAINED
from ..page._document import CARDS, card, png_image, strip, write_document
from ._run import METHODS

STYLE = (
    CARDS
    + """
.wide{overflow-x:auto}table{width:100%}th,td{padding:.3rem .6rem}
th:nth-child(2),td:nth-child(2){text-align:left}
b.helpful{color:#0072B2}b.harmful{color:#B34700}
tr.first td{border-top:2px solid #888}.plots img{width:100%}.lead{font-size:1.15rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:.5rem}
@media (max-width:30rem){.strip{grid-template-columns:1fr}.card{width:4.6rem}}
"""
)


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the page for `run_demo`'s result; nothing is left behind if it fails."""
    write_document(path, "dualfluence demo", _body(result), STYLE)


def _body(result: dict[str, Any]) -> str:
    config, machine, fit = result["config"], result["machine"], result["fit"]
    rows = "\n".join(_row(o) for o in result["outcomes"])
    size = config["points"] * config["outputs"]
    plots = "".join(
        png_image(picture, f"{name} against the share removed")
        for name, picture in _plots(result).items()
    )
    return f"""
<h1>Which digits made these answers, and which labels are wrong?</h1>
{_story(result["story"], config)}
<h2>Cost compared with retraining</h2>
<p class="lead">{gain_in_words(result["gain"], "<b>{}</b>")}</p>
<h2>Points removed, method by method</h2>
<p class="lead">{_conclusion(result)}</p>
<p>The model is a linearised {html.escape(config["network"])} network ({config["parameters"]:,} parameters)
fitted to {config["points"]} MNIST digits (softmax cross-entropy, λ = {config["ridge"]:g}) in
{fit["steps"]} Newton steps and {fit["products"]} products with its kernel of size {size:,}. Parts of the
training set were removed, and each method estimated the parameters that retraining would give.</p>
<div class="plots">{plots}</div>
<h2>Numbers</h2>
<div class="wide"><table><thead><tr><th>removed</th><th>method</th><th>time</th><th>error / change</th>
<th>certified</th><th>iterations</th><th>forget acc.</th><th>test acc.</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<h2>How to read this</h2>
<p class="note"><b>Time</b> is a repeated call until the new parameters are ready (median, without
compilation). <b>Error</b> is ‖θ − θ_retrained‖ divided by ‖θ_before − θ_retrained‖;
doing nothing has an error of 100 %.
<b>Certified</b> is the computed upper bound on the same quantity; it needs no retraining. One step is the
influence function; each further step roughly squares the error. The paper's form and parameter space run
conjugate gradients to a residual of 1e-8 or for 500 iterations, as published. Measured on
{html.escape(machine["device"])}, JAX {machine["jax"]}, {html.escape(config["dtype"])},
{result["seconds"]:.0f} s in all.</p>"""


def _conclusion(result: dict[str, Any]) -> str:
    """The removal nearest to a tenth, in one sentence."""
    nearest = min((o["percent"] for o in result["outcomes"]), key=lambda p: abs(p - 10))
    both = {o["method"]: o for o in result["outcomes"] if o["percent"] == nearest}
    one, again = both[ONE_STEP], both[RETRAINED]
    return (
        f"Deleting {one['removed']} of {result['config']['points']} training digits took "
        f"<b>{_seconds(one['timing']['repeat'])}</b> where retraining took "
        f"{_seconds(again['timing']['repeat'])}; the new parameters are off by "
        f"<b>{percent(one['error'])}</b> of the change that the deletion makes. The certificate, which needs "
        f"no retraining, says at most {percent(one['certificate'])}."
    )


def _story(story: dict[str, Any], config: dict[str, Any]) -> str:
    data = datasets.load("mnist-small")
    strips = "".join(_strip(query, data) for query in story["queries"])
    labels = story["labels"]
    wrong = sum(suspect["wrong"] for suspect in labels["suspects"])
    suspects = "".join(
        card(
            data.x_train[s["index"]],
            f"labelled {s['given']}<br>model: {s['said']}<br><b>{_verdict(s)}</b>",
            "harmful" if s["wrong"] else "query",
            f"#{s['index']}",
        )
        for s in labels["suspects"]
    )
    right, shown = 100 * story["test_accuracy"], len(labels["suspects"])
    return f"""<p>A network was fitted to {config["points"]} digits and recognises {right:.0f} % of 2,000
new ones. Two of those, framed in black, are shown with the training digits that helped the answer
most (<b class="helpful">helpful</b>: without one the loss rises by the number below it) and those that harmed
it most (<b class="harmful">harmful</b>: without one the loss falls).</p>{strips}
<h2>Which labels are wrong?</h2>
<p>{labels["flipped"]} of {config["points"]} labels were made wrong on purpose. Each label was compared
with the model trained without its digit; one call left out all digits in turn. Of the {shown} most
suspicious, shown here, <b>{wrong} are wrong</b> (area under the curve {labels["auc"]:.3f};
0.5 is chance).</p>
<div class="row">{suspects}</div>"""


def gain_in_words(gain: dict[str, Any], bold: str = "{}") -> str:
    """A comparison of leaving out every point with training without each, in a few sentences."""
    n, each, ratio = gain["points"], gain["each"], f"{gain['ratio']:.2g} times as long"
    return (
        f"Computing the effect of each of {n} digits on these answers took "
        f"{bold.format(_seconds(gain['repeat']))} in one call ({_seconds(gain['first'])} the first "
        f"time, with compilation). Training without one digit took {_seconds(each)}, although it "
        f"reused the kernel (median of {gain['retrained']} digits drawn at random); for all {n} "
        f"that is {_seconds(n * each)}, {bold.format(ratio)}. At those {gain['retrained']} "
        f"digits the effects differ from retraining by {percent(gain['error'])} of their size."
    )


def _verdict(suspect: dict[str, Any]) -> str:
    return f"truth {suspect['truth']} {'✗' if suspect['wrong'] else '✓'}"


def _strip(query: dict[str, Any], data: Any) -> str:
    right = "✓" if query["answer"] == query["label"] else "✗"
    caption = f"truth {query['label']}<br>model: <b>{query['answer']} {right}</b>"
    shown = card(np.asarray(data.x_test[query["test_index"]]), caption, "query", "question")

    def cards(kind: str) -> str:
        return "".join(
            card(
                data.x_train[p["index"]],
                f"label {p['label']}<br><b>{p['effect']:+.2g}</b>",
                kind,
                f"#{p['index']}",
            )
            for p in query[kind]
        )

    return strip(shown, cards("helpful"), cards("harmful"))


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
    if value >= 10:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _plots(result: dict[str, Any]) -> dict[str, bytes]:
    """One picture a panel, so that a narrow page shows them below each other."""
    import matplotlib

    matplotlib.use("Agg")

    panels = {
        "time per request (s)": (lambda o: o["timing"]["repeat"], True),
        "distance to retraining / change": (lambda o: o["error"], True),
        "certified distance / change": (lambda o: o["certificate"], True),
        "accuracy on removed points": (lambda o: o["forget_accuracy"], False),
    }
    return {label: _plot(result, label, *how) for label, how in panels.items()}


def _plot(result: dict[str, Any], label: str, value: Any, log: bool) -> bytes:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 4.4), layout="constrained")
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
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()
