"""Tables of `attribution_lds.py` for the recipes of `lds_networks.py`: two questions, one truth for each.

`mean`: the loss after training on a random half, mean over seeds that all halves share. `run`: the loss of
the scored run itself, repeated on a random half with everything else as it was: first parameters, batches,
dropout. Every method scores the same run on all points, whose seed is none of those of the mean.

Constants (dampings of EK-FAC and TRAK) are chosen for each question on another run, other halves and other
queries. The datamodel chooses its ridge by cross-validation on its own retrainings. SOURCE, replay and
`Trajectory` have nothing to choose.
"""

import json
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from lds_estimators import Segment, datamodel, ekfac, make_replay, source
from lds_networks import SHARES, Training, exact_losses, load, recipe_at, segment_stops
from lds_recipes import pick
from rivals import TRAK_DAMPINGS

from dualfluence._support.archive import digest_of_all
from dualfluence.attribution import (
    GradCos,
    GradDot,
    LeadingProbes,
    TracIn,
    Trajectory,
    attribute_runs,
    evaluate,
)
from dualfluence.attribution._pieces import Pieces
from dualfluence.attribution._rivals import trak_terms

SEEDS = {
    "subsets": 0,
    "subsets to choose on": 1,
    "subsets of TRAK's halves": 2,
    "subsets of the datamodel of the mean, first": 100,
    "subsets of the datamodel of the run": 99,
    "truth of the mean, first": 0,
    "scored runs, first": 1000,
    "run to choose on": 1900,
    "halves of TRAK, first": 2000,
    "datamodel of the mean, first": 3000,
}
"""Of JAX for training, of NumPy for subsets."""

BLOCKS = 10
"""Seeds of the datamodel of the mean, each with as many subsets of its own."""

PROBES = 3
"""Leading directions of outputs that `Trajectory` keeps; all of them if there are at most three classes."""

RIDGES = 10.0 ** np.arange(-5, 2)
"""Dampings of EK-FAC."""

QUESTIONS = ("mean", "run")


class Part:
    """One run, halves and queries; constants are chosen on one part and reported on another."""

    def __init__(self, name, seed, subset_seed, subsets, queries):
        self.name, self.seed, self.queries = name, seed, queries
        self.subset_seed, self.subsets = subset_seed, subsets
        self.targets = {}


class Estimands:
    """One recipe: truths, runs, scores, table."""

    def __init__(self, name, scale, source_of_data, classes, work):
        self.name = name
        self.recipe, self.scale = recipe_at(name, scale)
        arrays, self.origin = load(self.recipe, scale, source_of_data, classes)
        n, q = self.scale["points"], self.scale["queries"]
        if len(arrays[0]) < n or len(arrays[2]) < 2 * q:
            raise SystemExit(
                f"{name}: expected {n} training and {2 * q} test images, got {len(arrays[0])} and "
                f"{len(arrays[2])}."
            )
        x, y = jnp.asarray(arrays[0][:n], jnp.float32), jnp.asarray(arrays[1][:n], jnp.int32)
        xq = jnp.asarray(arrays[2][: 2 * q], jnp.float32)
        yq = jnp.asarray(arrays[3][: 2 * q], jnp.int32)
        self.training = Training(self.recipe, x, y, int(max(y.max(), yq.max())) + 1)
        first = Part("report", SEEDS["scored runs, first"], SEEDS["subsets"],
                     self.scale["subsets"], (xq[:q], yq[:q]))  # fmt: skip
        other = Part("choice", SEEDS["run to choose on"], SEEDS["subsets to choose on"],
                     self.scale["choosing"], (xq[q:], yq[q:]))  # fmt: skip
        self.parts = {"report": first, "choice": other}
        self.folder = work / f"{name}-{scale}"
        same = [self.recipe, self.scale, digest_of_all((x, y, xq, yq))]
        self.title = json.dumps(same, sort_keys=True)
        self.pieces = Pieces(self.folder / "scores", self.title)
        self.runs, self.seconds, self.table = {}, {}, {}
        t = self.training
        self.trained_on = jax.jit(jax.vmap(t.on_rows))
        self.losses_of = jax.jit(
            jax.vmap(lambda p, xq, yq: exact_losses(t.apply(p, xq), yq), (0, None, None))
        )
        self.replayed = make_replay(
            lambda weights, key, xq, yq: exact_losses(
                t.apply(t.learn(key, weights, again=True), xq), yq
            ),
            at_once=self.scale["replayed"],
        )
        self.result = {
            "data": self.origin,
            "recipe": dict(self.recipe),
            "scale": dict(self.scale),
            "seeds": SEEDS,
            "reported": {"run": first.seed, "queries": f"test rows 0 to {q - 1}"},
            "constants chosen on": {"run": other.seed, "queries": f"test rows {q} to {2 * q - 1}"},
            "steps": self.training.total,
            "ceiling": {},
            "table": self.table,
            "seconds": self.seconds,
        }

    def timed(self, label, call):
        """Pieces that an earlier command has left take no time; the record keeps their first seconds."""
        start = time.perf_counter()
        value = jax.block_until_ready(call())
        spent = round(time.perf_counter() - start, 2)
        kept = self.folder / "seconds.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        known[label] = max(spent, known.get(label, 0.0))
        self.folder.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".part").write_text(json.dumps(known, indent=1))
        kept.with_suffix(".part").replace(kept)
        self.seconds[label] = known[label]
        print(f"[{self.name}] {label}: {spent} s", flush=True)
        return value

    # Truth

    def retrained(self, label, part, masks, seeds, at_once=None):
        """`(m, q)` losses of the part's queries after training on each mask with its seed.

        Slices of `at_once` models are kept, and a killed command goes on after the last of them.
        """
        rows = np.stack([np.flatnonzero(mask) for mask in masks])
        jobs = digest_of_all((masks, np.asarray(seeds)))
        pieces = Pieces(self.folder / re.sub(r"\W+", "-", label), self.title + jobs)
        size, found = at_once or self.scale["at_once"], []
        for start in range(0, len(rows), size):
            # The last slice repeats its last model: one shape, one compilation.
            own = np.minimum(np.arange(start, start + size), len(rows) - 1)

            def losses(own=own):
                models = self.models(rows[own], [seeds[i] for i in own])
                values = np.asarray(self.losses_of(models, *part.queries))
                if not np.isfinite(values).all():
                    raise FloatingPointError(f"{label}: training diverged.")
                return values

            found.append(pieces.get(f"slice-{start:06d}", losses))
        return np.concatenate(found)[: len(rows)]

    def models(self, rows, seeds):
        """Parameters of many models, stacked."""
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        return self.trained_on(keys, jnp.asarray(rows))

    def truth(self):
        n = self.scale["points"]
        for part in self.parts.values():
            part.masks = evaluate.random_masks(n, part.subsets, seed=part.subset_seed)
            first, count = SEEDS["truth of the mean, first"], self.scale["seeds"]
            seeds = np.repeat(np.arange(first, first + count), len(part.masks))
            again = np.tile(part.masks, (count, 1))
            label = f"truth, mean, {part.name}"
            found = self.timed(label, partial(self.retrained, label, part, again, seeds))
            repeats = found.reshape(count, len(part.masks), -1)
            part.targets["mean"] = repeats.mean(axis=0)
            own = np.full(len(part.masks), part.seed)
            label = f"truth, run, {part.name}"
            once = self.timed(label, partial(self.retrained, label, part, part.masks, own))
            part.targets["run"] = once
            if part.name == "report":
                # Nothing is random, but another number of models at once rounds otherwise.
                label, fewer = "truth, run, again", max(1, self.scale["at_once"] * 2 // 5)
                call = partial(self.retrained, label, part, part.masks, own, fewer)
                both = np.stack([once, self.timed(label, call)])
                part.targets["run"] = both.mean(axis=0)
                for question, repeats_of in (("mean", repeats), ("run", both)):
                    ceiling = evaluate.noise_ceiling(repeats_of)
                    self.result["ceiling"][question] = {
                        "value": ceiling.value,
                        "interval": list(ceiling.interval),
                    }

    def run(self, seed):
        """Checkpoints and states of a run on all points, by step."""
        if seed not in self.runs:
            t = self.training
            ends = {k for _, _, kept in segment_stops(t.total) for k in kept}
            stops = sorted(ends | set(t.stops(SHARES)))
            learn = partial(t.checkpoints, jax.random.key(seed), stops)
            self.runs[seed] = self.timed(f"run {seed}", learn)
        return self.runs[seed]

    def last(self, seed):
        return self.run(seed)[self.training.total][0]

    # Methods: of seeds of runs and of a part's queries, scores for every setting that is tried

    def data(self, part):
        return self.training.x, self.training.y, *part.queries

    def trajectory(self, seed, stops=None):
        t = self.training
        stops = t.stops(SHARES) if stops is None else stops
        states = [self.run(seed)[stop] for stop in stops]
        return Trajectory(t.apply, [p for p, _ in states], **t.record(states, stops))

    def ours(self, seeds, part, **options):
        """Scores of `Trajectory`; its steps are `stops`."""
        stops = options.pop("stops", None)
        runs = [self.trajectory(seed, stops) for seed in seeds]
        probes = None if self.training.num_classes <= PROBES else LeadingProbes(PROBES)
        options |= {"probes": probes, "progress": False}
        return {"": attribute_runs(runs, *self.data(part), **options).values}

    def plain(self, kind, seeds, part):
        """Products of gradients."""
        apply_fn, total = self.training.apply, 0.0
        for seed in seeds:
            if kind is TracIn:
                stops = self.training.stops(SHARES)
                ends = [self.training.time(a, b) for a, b in zip([0, *stops], stops, strict=False)]
                method = TracIn(apply_fn, [self.run(seed)[stop][0] for stop in stops], ends)
            else:
                method = kind(apply_fn, self.last(seed))
            total = total + method.attribute(*self.data(part)).values
        return {"": total}

    def trak(self, models, part):
        """Both factors of TRAK are summed over models before they are multiplied."""
        totals, missing = np.zeros(()), 0.0
        for params in models:
            solved, short = trak_terms(
                self.training.apply, params, *self.data(part), dampings=TRAK_DAMPINGS
            )
            totals, missing = totals + np.stack(solved), missing + short
        return {f"ρ = {d:g}": t * missing for d, t in zip(TRAK_DAMPINGS, totals, strict=True)}

    def trak_halves(self, seeds, part):
        """Models of random halves, the same for both parts: `seeds` does not matter."""
        count, first = self.scale["halves"], SEEDS["halves of TRAK, first"]
        masks = evaluate.random_masks(
            self.scale["points"], count, seed=SEEDS["subsets of TRAK's halves"]
        )
        own = np.minimum(np.arange(max(count, self.scale["at_once"])), count - 1)
        rows = np.stack([np.flatnonzero(row) for row in masks])
        stacked = self.models(rows[own], [first + i for i in own])
        return self.trak([pick(stacked, i) for i in range(count)], part)

    def ekfac(self, seeds, part):
        found = 0.0
        for seed in seeds:
            scores = ekfac(self.training.apply, self.last(seed), RIDGES, *self.data(part))
            found = found + np.stack(scores)
        return {f"damping {ridge:g}": one for ridge, one in zip(RIDGES, found, strict=True)}

    def source(self, seeds, part):
        t, total = self.training, 0.0
        for seed in seeds:
            segments = []
            for start, end, stops in segment_stops(t.total):
                states = [self.run(seed)[stop] for stop in stops]
                record = t.record(states, stops)
                segments.append(
                    Segment(
                        [p for p, _ in states],
                        t.time(start, end),
                        record["weight_decay"],
                        record.get("preconditioner"),
                    )
                )
            total = total + source(t.apply, segments, *self.data(part))
        return {"": total}

    def replay(self, seeds, part):
        ones = jnp.ones(len(self.training.x), self.training.x.dtype)
        return {"": sum(self.replayed(ones, jax.random.key(s), *part.queries) for s in seeds)}

    # Tables

    def kept(self, label, part, call):
        """Scores of every setting, from the folder if an earlier command made them."""
        piece = re.sub(r"\W+", "-", f"{label}, {part.name}")
        listed = self.folder / "scores" / f"{piece}.json"

        def values():
            made = call()
            listed.parent.mkdir(parents=True, exist_ok=True)
            listed.write_text(json.dumps(list(made)))
            return np.stack([np.asarray(v, float) for v in made.values()])

        array = self.timed(f"{label}, {part.name}", lambda: self.pieces.get(piece, values))
        return dict(zip(json.loads(listed.read_text()), array, strict=True))

    def measured(self, scores, part, question):
        return evaluate.lds(scores, part.masks, part.targets[question])

    def report(self, label, models, scores, questions, settings=None):
        row = {"models": models, "seconds": self.seconds.get(f"{label}, report")}
        for question in questions:
            own = scores[question] if isinstance(scores, dict) else scores
            m = self.measured(own, self.parts["report"], question)
            row[question] = {"lds": m.value, "interval": list(m.interval)}
            if settings and settings.get(question):
                row[question]["setting"] = settings[question]
            low, high = m.interval
            print(f"{self.name:6s} {question:5s} {label:44s} {m.value:.4f} [{low:.3f}, {high:.3f}]",
                  flush=True)  # fmt: skip
        self.table[label] = row

    def compare(self, label, call, models, questions=QUESTIONS):
        """Scores at the setting that is best on the other run, halves and queries; several runs after one."""
        report, choice = self.parts["report"], self.parts["choice"]
        scores = self.kept(label, report, partial(call, [report.seed], report))
        best = dict.fromkeys(questions, next(iter(scores)))
        if len(scores) > 1:
            tried = self.kept(label, choice, partial(call, [choice.seed], choice))
            for question in questions:
                best[question] = max(
                    tried, key=lambda s, w=question: self.measured(tried[s], choice, w).value
                )
        chosen = {question: scores[best[question]] for question in questions}
        self.report(label, models, chosen, questions, best)
        return best

    def several(self, label, call, best):
        """The mean of several runs, which says nothing of one run."""
        count = self.scale["runs"]
        seeds = range(SEEDS["scored runs, first"], SEEDS["scored runs, first"] + count)
        part = self.parts["report"]
        label = f"{label}, {count} runs"
        scores = self.kept(label, part, partial(call, list(seeds), part))
        self.report(label, count, scores[best["mean"]], ("mean",), best)

    def both(self, label, call):
        self.several(label, call, self.compare(label, call, 1))

    def datamodels(self, question):
        """Retrainings that are none of the truth's: other halves, and for the mean other seeds."""
        part, counts = self.parts["report"], self.scale["datamodel"]
        if question == "mean":
            each = -(-max(counts) // BLOCKS)
            blocks = np.repeat(np.arange(BLOCKS), each)
            seeds = SEEDS["datamodel of the mean, first"] + blocks
            first = SEEDS["subsets of the datamodel of the mean, first"]
            subsets = [first + b for b in range(BLOCKS)]
        else:
            each = max(counts)
            blocks, seeds = np.zeros(each, int), np.full(each, part.seed)
            subsets = [SEEDS["subsets of the datamodel of the run"]]
        n = self.scale["points"]
        masks = np.concatenate([evaluate.random_masks(n, each, seed=s) for s in subsets])
        label = f"datamodel, {question}"
        targets = self.timed(label, partial(self.retrained, label, part, masks, seeds))
        place = np.tile(np.arange(each), len(subsets))
        for count in counts:
            # A smaller number has a share of every block.
            rows = place < max(2, round(count / len(subsets)))
            label = f"datamodel, {int(rows.sum())} retrainings"
            fit = partial(datamodel, masks[rows], targets[rows], blocks[rows])
            start = time.perf_counter()
            found = fit()
            self.seconds[f"{label}, {question}, regression"] = round(time.perf_counter() - start, 2)
            setting = {question: f"ridge {found.ridge:.2g}, explains {found.explained:.3f}"}
            before = self.table.get(label, {})
            self.report(label, int(rows.sum()), found.scores, (question,), setting)
            self.table[label] = before | self.table[label]

    def steps(self):
        """What there is to do, in the order of its worth."""
        yield "truth", self.truth
        yield "ours", partial(self.both, "Trajectory", self.ours)
        label = 'Trajectory, question="point"'
        yield label, partial(self.compare, label, partial(self.ours, question="point"), 1)
        label = "Trajectory, last checkpoint alone"
        yield (
            label,
            partial(self.compare, label, partial(self.ours, stops=[self.training.total]), 1),
        )
        for name, kind in {
            "gradient dot": GradDot, "gradient cosine": GradCos, "TracIn": TracIn,
        }.items():  # fmt: skip
            yield name, partial(self.both, name, partial(self.plain, kind))
        yield "EK-FAC", partial(self.both, "EK-FAC", self.ekfac)
        yield "SOURCE", partial(self.both, "SOURCE", self.source)
        trak = lambda seeds, part: self.trak([self.last(seed) for seed in seeds], part)  # noqa: E731
        yield "TRAK", partial(self.both, "TRAK", trak)
        label = f"TRAK, {self.scale['halves']} halves"
        halves = self.scale["halves"]
        yield label, partial(self.compare, label, self.trak_halves, halves)
        yield "replay", partial(self.both, "replay", self.replay)
        for question in QUESTIONS:
            yield f"datamodel, {question}", partial(self.datamodels, question)


def markdown(result):
    """The table of a recipe, rows by their LDS for the mean."""

    def cell(row, question):
        if question not in row:
            return "–"
        low, high = row[question]["interval"]
        return f"{row[question]['lds']:.3f} [{low:.3f}, {high:.3f}]"

    lines = [
        "| method | models trained | LDS, mean over seeds | LDS, one run |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(result["table"].items(), key=lambda item: -item[1]["mean"]["lds"]):
        lines.append(f"| {name} | {row['models']} | {cell(row, 'mean')} | {cell(row, 'run')} |")
    ceilings = [f"{result['ceiling'][q]['value']:.3f}" for q in QUESTIONS]
    return "\n".join([*lines, f"| noise ceiling | – | {ceilings[0]} | {ceilings[1]} |"])
