"""How well planted label errors are found, by `dualfluence.audit` and by others; writes JSON and a plot.

    python benchmarks/audit.py --smoke                                         # a minute, needs no file
    python benchmarks/audit.py --data-dir DATA --out benchmarks/results/audit_cpu.json
    python benchmarks/audit.py --out benchmarks/results/audit_cpu.json --draw  # the plot, from the JSON

Needs scikit-learn and cleanlab. A tenth of the training labels is made wrong: uniformly, by class pair, or
in groups of five neighbours. Five seeds draw points and errors. For each method the record has the area under
the ROC curve, the precision among as many points as are wrong, seconds, and the accuracy of a linear model
(R² for numbers) that is fitted without that many of the most suspicious points. Intervals are 95 % by
Student's t over seeds. With --data-dir there are two more data sets: MNIST, and `descriptions`, one line for
each package of Debian. These have errors of their own beside the planted ones, which count as false
alarms; in `own noise` none is planted and the most suspicious 5 % go. Models of other methods are chosen on
seed 99, which is not reported. `audit` is called with its defaults, and once more with a ridge model whose
penalty is chosen on errors by neighbourhood of seeds 95 to 99, one for all classes and one for all numbers.

A run that was stopped goes on where it was: --out keeps every finished case. --merge puts together parts of a
run that have different --seeds or --sets.
"""

import argparse
import json
import os
import time
from pathlib import Path

# One core for products: on a busy machine threads wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cleanlab
import numpy as np
import sklearn
from cleaning.data import PLANT, SHARE, TEXT_COLUMNS, draw_case, pools, read_descriptions
from cleaning.methods import (
    OURS,
    STIFFNESS,
    choose,
    linear_models,
    methods,
    run,
    stiff,
    strong_models,
)
from measure import num_cores

import dualfluence as dfl
from dualfluence.apps.compare._machine import environment
from dualfluence.attribution.evaluate import mislabel_auc

SEEDS, TUNING = 5, 99
STIFF_SEEDS = (95, 96, 97, 98, 99)
T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t, by the number of seeds."""

PARTS = ("linear", "strong")
"""The base models of other methods, chosen for each data set."""

EDGES = np.linspace(0, 1, 11)
"""Of the bins in which stated probabilities are compared with shares."""

DROPPED = 0.05
"""Share of the most suspicious points that go where no error is planted."""

OWN_POINTS = 1000
TEXTS = 10_000


def tuned(pool, smoke):
    """The base models, chosen on a seed of their own."""
    case = draw_case(pool, "uniform", TUNING, pool.chosen_on)
    linear = linear_models(pool.is_classes)
    strong = strong_models(pool.is_classes, pool.x.shape[1])
    if smoke:
        linear = dict(list(linear.items())[-2:-1])
        strong = dict(list(strong.items())[:1])
    chosen = {"linear": choose(linear, case), "strong": choose(strong, case)}
    found = {
        part: {"model": name, "cross_validated": errors} for part, (name, errors) in chosen.items()
    }
    return found | {"points": len(case.given)}


def choose_stiff(sets, smoke):
    """One `alpha` for all sets of classes and one for numbers, by the mean area under the curve."""
    tried, seeds = (STIFFNESS[::3], STIFF_SEEDS[:1]) if smoke else (STIFFNESS, STIFF_SEEDS)
    chosen = {}
    for part, is_classes in (("classes", True), ("numbers", False)):
        cases = [
            draw_case(pool, "by neighbourhood", seed, pool.chosen_on)
            for pool in sets.values()
            for seed in seeds
            if pool.is_classes == is_classes
        ]
        if not cases:
            continue
        means = {
            alpha: float(np.mean([mislabel_auc(stiff(alpha)(c)[0], c.wrong) for c in cases]))
            for alpha in tried
        }
        chosen[part] = {"alpha": max(means, key=lambda a: means[a]), "auc": means}
    return chosen


def models_of(pool, settings):
    linear = linear_models(pool.is_classes)[settings["linear"]["model"]]
    strong = strong_models(pool.is_classes, pool.x.shape[1])[settings["strong"]["model"]]
    return linear, strong


def quality(model, case, kept):
    """Accuracy, or R², at the test points of a linear model fitted to a part of the points."""
    return float(model.fit(case.x[kept], case.given[kept]).score(case.x_test, case.y_test))


def without(count, at):
    kept = np.ones(count, bool)
    kept[at] = False
    return kept


def planted(pool, settings, alpha, kind, seed):
    """All methods on one draw."""
    case = draw_case(pool, kind, seed)
    linear, strong = models_of(pool, settings)
    n, wrong = len(case.given), case.wrong
    count, rows = int(wrong.sum()), {}
    for name, method in methods(linear, strong, alpha, seed, pool.is_classes).items():
        found = run(method, case)
        first = np.argsort(-found.suspicion, kind="stable")[:count]
        row = {
            "auc": mislabel_auc(found.suspicion, wrong),
            "precision": float(wrong[first].mean()),
            "seconds": found.seconds,
            "cpu_seconds": found.cpu_seconds,
            "cleaned": quality(linear, case, without(n, first)),
        }
        rows[name] = row | own_threshold(found, case, linear)
    rest = {
        "nothing removed": quality(linear, case, np.ones(n, bool)),
        "the planted removed": quality(linear, case, ~wrong),
    }
    return {"points": n, "test_points": len(case.y_test), "wrong": count, "rows": rows} | rest


def own_threshold(found, case, linear):
    """What a method flags itself: how much of it is wrong, and how much of it should be."""
    if found.flagged is None:
        return {}
    at, wrong = found.flagged, case.wrong
    row = {
        "flagged": len(at),
        "flagged_wrong": int(wrong[at].sum()),
        "cleaned_by_own_threshold": quality(linear, case, without(len(wrong), at)),
    }
    if found.wrong is not None:
        inside = np.clip(np.digitize(found.wrong, EDGES) - 1, 0, len(EDGES) - 2)
        sums = lambda values: np.bincount(inside, values, len(EDGES) - 1).tolist()  # noqa: E731
        row["expected_wrong"] = float(found.wrong[at].sum())
        row["bins"] = [sums(np.ones(len(wrong))), sums(found.wrong), sums(wrong.astype(float))]
    return row


def own_noise(pool, settings, alpha, seed, points):
    """No planted error: what is gained at the test points, whose labels have errors too."""
    case = draw_case(pool, None, seed, points)
    linear, strong = models_of(pool, settings)
    n, count, rows = len(case.given), round(DROPPED * len(case.given)), {}
    order = {}
    for name, method in methods(linear, strong, alpha, seed, True).items():
        found = run(method, case)
        first = np.argsort(-found.suspicion, kind="stable")[:count]
        order[name] = set(first.tolist())
        rows[name] = {
            "cleaned": quality(linear, case, without(n, first)),
            "seconds": found.seconds,
            "cpu_seconds": found.cpu_seconds,
            "shared_with_ours": len(order[name] & order[OURS]) / count,
        }
    random = np.random.default_rng(seed).permutation(n)[:count]
    return {
        "points": n,
        "removed": count,
        "rows": rows,
        "nothing removed": quality(linear, case, np.ones(n, bool)),
        "as many at random": quality(linear, case, without(n, random)),
    }


def time_texts(folder, count):
    """One call with its defaults, from strings to findings."""
    texts, labels = read_descriptions(folder, "train")
    cpu, wall = time.process_time(), time.perf_counter()
    found = dfl.audit(None, texts[:count], labels[:count], encoder=dfl.adapters.HashedText())
    return {
        "texts": count,
        "columns": TEXT_COLUMNS,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "load": os.getloadavg()[0],
        "findings": found.counts,
    }


def interval(values):
    """Mean, and 95 % interval by Student's t."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return [mean, mean, mean]
    half = T[count] * float(np.std(values, ddof=1)) / count**0.5
    return [mean, mean - half, mean + half]


def summary(cases):
    """For each data set and kind of error, each method's numbers over the seeds."""
    table = {}
    for key in dict.fromkeys(case["key"] for case in cases):
        runs = [case for case in cases if case["key"] == key]
        rows = {}
        for name in runs[0]["rows"]:
            of = [run["rows"][name] for run in runs]
            rows[name] = {
                what: interval([row[what] for row in of])
                for what in ("auc", "precision", "seconds", "cpu_seconds", "cleaned")
                if what in of[0]
            }
            if "cleaned_by_own_threshold" in of[0]:
                values = [row["cleaned_by_own_threshold"] for row in of]
                rows[name]["cleaned_by_own_threshold"] = interval(values)
            if name != OURS:
                for what in ("auc", "precision", "cleaned"):
                    if what in of[0]:
                        gaps = [r["rows"][OURS][what] - r["rows"][name][what] for r in runs]
                        rows[name][f"ours_minus_this_{what}"] = interval(gaps)
        ends = ("nothing removed", "the planted removed", "as many at random")
        rest = {end: interval([run[end] for run in runs]) for end in ends if end in runs[0]}
        sizes = {
            k: runs[0][k] for k in ("points", "test_points", "wrong", "removed") if k in runs[0]
        }
        table[key] = {"seeds": len(runs)} | sizes | rest | {"rows": rows}
    return table


def calibration(cases, numbers):
    """Stated probabilities and true shares, in bins and among what each run flags.

    For classes without `descriptions`, whose own errors nobody has counted.
    """
    used = [
        case
        for case in cases
        if not case["key"].startswith("descriptions")
        and case["key"].startswith("diabetes") == numbers
    ]
    result = {}
    for name in dict.fromkeys(n for c in used for n, r in c["rows"].items() if "bins" in r):
        by_kind = {}
        for kind in dict.fromkeys(c["key"].split(": ")[1] for c in used):
            rows = [(c["key"], c["rows"][name]) for c in used if c["key"].endswith(f": {kind}")]
            count, expected, wrong = np.sum([row["bins"] for _, row in rows], axis=0)
            runs = [
                [key, row["flagged"], row["expected_wrong"], row["flagged_wrong"]]
                for key, row in rows
            ]
            by_kind[kind] = {
                "bins": [count.tolist(), expected.tolist(), wrong.tolist()],
                "flagged": sum(r[1] for r in runs),
                "expected": sum(r[2] for r in runs),
                "wrong": sum(r[3] for r in runs),
                "runs": runs,
            }
        result[name] = by_kind
    return result


def save(record, path):
    """Everything that follows from the cases, and the record as a whole."""
    record["cases"].sort(key=lambda case: case["seed"])
    record["table"] = summary(record["cases"])
    for part, numbers in (("classes", False), ("numbers", True)):
        record[f"calibration_{part}"] = calibration(record["cases"], numbers)
    if path is not None:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(path)


def bench(args, record):
    """Every case that is not in the record yet, whole seeds first."""

    sets = pools(args.data_dir, args.smoke, args.sets)
    for name, pool in sets.items():
        if name not in record["settings"]:
            record["settings"][name] = tuned(pool, args.smoke)
            print(name, *(record["settings"][name][part]["model"] for part in PARTS), flush=True)
            save(record, args.out)
    if "stiff" not in record:
        record["stiff"] = choose_stiff(sets, args.smoke)
        print({part: found["alpha"] for part, found in record["stiff"].items()}, flush=True)
        save(record, args.out)
    if args.data_dir is not None and not args.smoke and "texts" not in record:
        record["texts"] = time_texts(args.data_dir, TEXTS)
        print(record["texts"], flush=True)
        save(record, args.out)
    done = {(case["key"], case["seed"]) for case in record["cases"]}
    for seed in args.seeds:
        for name, pool in sets.items():
            kinds = [*PLANT[pool.is_classes], *(["own noise"] if name == "descriptions" else [])]
            for kind in kinds:
                key = f"{name}: {kind}"
                if (key, seed) in done:
                    continue
                settings = record["settings"][name]
                alpha = record["stiff"]["classes" if pool.is_classes else "numbers"]["alpha"]
                if kind == "own noise":
                    points = 300 if args.smoke else OWN_POINTS
                    found = own_noise(pool, settings, alpha, seed, points)
                else:
                    found = planted(pool, settings, alpha, kind, seed)
                record["cases"].append({"key": key, "seed": seed} | found)
                save(record, args.out)
                print_case(key, seed, found)
    return record


def print_case(key, seed, found):
    cells = [
        f"{name} {row.get('auc', row['cleaned']):.4f} ({row['cpu_seconds']:.1f} s)"
        for name, row in found["rows"].items()
    ]
    print(f"{seed} {key}: {'; '.join(cells)}", flush=True)


def new_record(smoke):
    return {
        "share_wrong": SHARE,
        "scale": "smoke" if smoke else "full",
        "dtype": "features and solves float64; audit keeps its own precision, JAX at its default of float32",
        "cores": num_cores(),
        "threads_of_products": os.environ["OPENBLAS_NUM_THREADS"],
        "versions": {"scikit-learn": sklearn.__version__, "cleanlab": cleanlab.__version__},
        "environment": environment(),
        "settings": {},
        "cases": [],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few points, two seeds")
    parser.add_argument("--data-dir", type=Path, help="holds mnist/ and debian-descriptions/")
    parser.add_argument("--seeds", type=int, nargs="+", help="by default 0 to 4")
    parser.add_argument("--sets", nargs="+", help="names of data sets; by default all")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="add cases of records")
    parser.add_argument("--draw", action="store_true", help="only the plot, from the JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.seeds = args.seeds or list(range(2 if args.smoke else SEEDS))
    if (args.draw or args.merge) and args.out is None:
        parser.error("--draw and --merge need --out")
    known = args.out is not None and args.out.exists()
    record = json.loads(args.out.read_text()) if known else new_record(args.smoke)
    for other in args.merge:
        known = {(case["key"], case["seed"]) for case in record["cases"]}
        cases = json.loads(other.read_text())["cases"]
        record["cases"] += [case for case in cases if (case["key"], case["seed"]) not in known]
    if args.merge:
        save(record, args.out)
    elif not args.draw:
        record = bench(args, record)
    if args.out is not None:
        from cleaning.plot import draw  # matplotlib only where it draws

        draw(record, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
