"""Deletions and attributions of sentences with certificates, on real one-line texts; writes JSON.

    python benchmarks/text_certified.py --data FOLDER --out text_certified.json
    python benchmarks/text_certified.py --smoke                # a minute, sentences of Python's help

FOLDER holds train.tsv.gz and test.tsv.gz, a label and a text on each line: 13,730 descriptions of Debian
packages with ten sections. The encoder is frozen: hashed words, or with --encoder wordllama the mean of
pretrained token embeddings (pip install wordllama). The head is linear, softmax, ridge 1e-3, float32, K
matrix-free. Every answer is compared with training from zero without the sentences, in float32 too: its own
bound, `retraining_bound`, is part of the distance.
"""

import argparse
import gzip
import importlib.util
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence.apps.compare._machine import describe_machine

RIDGE, SEED, UNTIL = 1e-3, 0, 1e-3


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--data", type=Path)
    options.add_argument("--encoder", choices=["hashed", "wordllama"], default="hashed")
    options.add_argument("--size", type=int, default=256)
    options.add_argument("--removed", type=int, nargs="+", default=[1, 10, 100])
    options.add_argument("--queries", type=int, default=10)
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    train, test = sentences_of_python() if given.smoke else read(given.data)
    names, y = np.unique(train[0], return_inverse=True)
    yq = np.searchsorted(names, test[0])
    start = time.perf_counter()
    x, xq = encoded(given, train[1]), encoded(given, test[1])
    result = {
        "machine": describe_machine(),
        "encoder": f"{given.encoder}, {x.shape[1]} numbers",
        "sentences": len(x),
        "labels": len(names),
        "ridge": RIDGE,
        "encoding_seconds": time.perf_counter() - start,
    }
    head = dfl.linearize(lambda w, x: x @ w, jnp.zeros((x.shape[1], len(names)), jnp.float32))
    loss = dfl.SoftmaxCrossEntropy()
    fit = lambda: dfl.fit(  # noqa: E731
        head, x, y, loss=loss, ridge=RIDGE, kernel="matrix-free", progress=False
    )
    fitted, seconds = timed(fit)
    result["fit"] = {
        "seconds": seconds,
        "accuracy": float((np.asarray(fitted.predict(xq)).argmax(1) == yq).mean()),
        "relative_bound": float(fitted.certificate.relative_bound),
        "parameter_norm": float(jnp.linalg.norm(fitted.params())),
    }
    print(json.dumps(result["fit"]), flush=True)
    rng = np.random.default_rng(SEED)
    result["removals"] = []
    for count in given.removed:
        edit = dfl.Remove(rng.permutation(len(x))[:count])
        update, seconds = timed(lambda edit=edit: fitted.edit(edit, until=UNTIL, progress=False))
        again, repeated = timed(lambda edit=edit: fitted.retrain(edit))
        row = {
            "removed": count,
            "seconds": seconds,
            "retraining_seconds": repeated,
            "bound": float(update.certificate.distance_bound),
            "distance_to_retraining": float(dfl.metrics.distance(update.params(), again.params())),
            "retraining_bound": float(again.certificate.distance_bound),
            "certified": bool(update.certificate.certified),
            "moved": float(dfl.metrics.distance(update.params(), fitted.params())),
        }
        result["removals"].append(row)
        print(json.dumps(row), flush=True)
    result["attribution"] = attributed(fitted, head, x, y, xq[: given.queries], yq, loss)
    print(json.dumps(result["attribution"]), flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def attributed(fitted, head, x, y, xq, yq, loss):
    """First-order effects of all sentences; the strongest of each query beside leaving it out."""
    asked = yq[: len(xq)]
    found, seconds = timed(
        lambda: dfl.primal.attribute(head, fitted.params(), x, y, xq, asked, loss=loss, ridge=RIDGE)
    )
    rows = []
    for q, i in enumerate(found.top(1).helpful.indices[:3, 0]):
        without = fitted.edit(dfl.Remove([int(i)]), until=UNTIL, progress=False)
        true = float(without.delta_loss(xq[q : q + 1], asked[q : q + 1])[0])
        rows.append({"first_order": float(found.values[q, i]), "left_out": true})
    return {"queries": len(xq), "seconds": seconds, "strongest": rows}


def timed(call):
    start = time.perf_counter()
    value = jax.block_until_ready(call())
    return value, time.perf_counter() - start


def encoded(given, texts):
    if given.encoder == "hashed":
        return dfl.adapters.HashedText(given.size)(texts).astype(np.float32)
    # Read from the package itself: its own loader looks for the tokenizer on the network.
    home = Path(importlib.util.find_spec("wordllama").origin).parent
    raw = (home / "weights" / "l2_supercat_256.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    (entry,) = (v for k, v in json.loads(raw[8 : 8 + size]).items() if k != "__metadata__")
    begin, end = (8 + size + k for k in entry["data_offsets"])
    kind = {"F16": np.float16, "F32": np.float32}[entry["dtype"]]
    words = np.frombuffer(raw[begin:end], kind).reshape(entry["shape"]).astype(np.float32)
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(home / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    found = [read.encode(text, add_special_tokens=False).ids for text in texts]
    rows = np.stack([words[ids].mean(axis=0) if ids else np.zeros(256) for ids in found])
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)).astype(np.float32)


def read(folder):
    found = []
    for part in ("train", "test"):
        with gzip.open(folder / f"{part}.tsv.gz", "rt", encoding="utf-8") as file:
            found.append(tuple(zip(*(line.rstrip("\n").split("\t") for line in file), strict=True)))
    return found


def sentences_of_python():
    from pydoc_data.topics import topics

    rows = [
        (name, part)
        for name in ("class", "import", "numbers", "assignment")
        for part in dict.fromkeys(" ".join(p.split()) for p in topics[name].split("."))
        if len(part.split()) > 4
    ]
    order = np.random.default_rng(SEED).permutation(len(rows))
    train, test = order[20:], order[:20]
    return [tuple(zip(*(rows[i] for i in part), strict=True)) for part in (train, test)]


if __name__ == "__main__":
    main()
