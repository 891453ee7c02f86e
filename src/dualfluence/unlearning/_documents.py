"""One request as two documents: `certificate.json` for programs, one page of HTML for people."""

import html
import json
from pathlib import Path

from .._support.files import write_whole
from .._support.types import AnyPath, Json

GUARANTEE = (
    "The model is within the stated distance, in its parameters (for a kernel: in the norm of "
    "its function space), of the model that training from scratch on the retained points would "
    "give. The bound includes rounding, estimated to first order."
)

NOT_COVERED = (
    "Networks that are not linear in their parameters. The statement is about the linearised "
    "model.",
    "Parameters at which a network was linearised, if they were trained on the removed points.",
    "Copies elsewhere: backups, logs, caches, exports, and the operator's own data.",
    "Models and predictions already published.",
    "Choices that were made with the removed points: architecture, ridge, features, which "
    "points to keep.",
)


def write_documents(line: Json, folder: AnyPath) -> dict[str, Path]:
    """Write a line of the ledger as two documents, `certificate-….json` and a page `certificate-….html`,
    into `folder`, and return their paths."""
    stem = f"certificate-{line['sequence']:08d}"
    paths = {kind: Path(folder) / f"{stem}.{kind}" for kind in ("json", "html")}
    document = {"line": line, "guarantee": GUARANTEE, "not_covered": list(NOT_COVERED)}
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    write_whole(paths["json"], text)
    page = _page(line)
    write_whole(paths["html"], page)
    return paths


def sign_documents(folder: AnyPath, signature: AnyPath, private_key: AnyPath) -> None:
    """Sign a folder of documents with an elliptic-curve key by the `model-signing` package.

    `model_signing verify key FOLDER --signature FILE --public_key KEY` checks it.
    """
    # Every file of the folder is signed: one that comes later would make the signature invalid.
    if Path(signature).resolve().is_relative_to(Path(folder).resolve()):
        raise ValueError(
            "sign_documents: the signature must be outside the folder that it signs, got "
            f"{signature}."
        )
    try:
        from model_signing import signing  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "sign_documents: signatures need the package model-signing, which is an extra. Install it "
            "with: pip install 'dualfluence[signing]'"
        ) from error
    config = signing.Config().use_elliptic_key_signer(private_key=Path(private_key))
    config.sign(Path(folder), Path(signature))


def _page(line: Json) -> str:
    claim = line["certificate"]
    bound = "none" if claim["distance_bound"] is None else f"{claim['distance_bound']:.6g}"
    rows = {
        "Request": f"{line['kind']}, {line['count']} points",
        "Line": line["sequence"],
        "Time": line["time"],
        "Distance to retraining at most": bound,
        "Size of the model ‖θ − θ₀‖": f"{claim['parameter_norm']:.6g}",
        "Rounding, part of the bound": f"{claim['rounding'] / claim['ridge']:.3g}",
        "How": line["how"],
        "Model before": line["model_before"],
        "Model after": line["model_after"],
        "Points left": line["retained"],
        "Commitment to features and targets": line["points"],
        "Hash of this line": line["hash"],
        "Hash of the line before": line["before"],
        "Software": ", ".join(f"{name} {value}" for name, value in line["software"].items()),
        "Device": line["device"],
    }
    cells = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    missing = "\n".join(f"<li>{html.escape(text)}</li>" for text in NOT_COVERED)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Certificate {line["sequence"]}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem}}
th{{text-align:left;padding-right:1rem;vertical-align:top}}td{{word-break:break-all}}</style></head>
<body><h1>Certificate of a request</h1>
<p>{html.escape(GUARANTEE)}</p>
<table>
{cells}
</table>
<h2>Not covered</h2>
<ul>
{missing}
</ul>
<p>Check it: <code>dualfluence verify LEDGER --model MODEL --network MODULE:FUNCTION</code></p>
</body></html>
"""
