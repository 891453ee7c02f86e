"""Random bad calls of the public functions: `python tests/fuzz_input/harness.py --calls 2000`.

Each takes one call that works, bends one argument of it, or two, and holds the outcome against
what the corruption declares: what cannot be meant must be refused, by a ValueError, a TypeError or
an error of the library's own, with words that name the argument, within seconds. What may be meant
(such as huge numbers) may fail later, by an error of the same classes, or give a finite answer.
Prints the counts
and every violation as JSON; the exit status is 1 if there is one.
"""

import argparse
import json
import re
import signal
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

SECONDS = 60
"""No single call may take longer; most fail in less than a millisecond, a compilation takes seconds."""


class Hang(BaseException):
    """A call that did not come back in time."""


class Outcome(NamedTuple):
    label: str
    verdict: str
    """`refused`, `accepted`, or a violation: what went wrong."""
    detail: str = ""


def ring(signum: int, frame: Any) -> None:
    raise Hang


def judge(entry: Any, bent: dict[str, Any]) -> Outcome:
    """One call with the arguments in `bent`, each a `(corruption, value)`."""
    from corruptions import ACCEPT, REFUSE, Traced

    label = f"{entry.name}({', '.join(f'{k}: {c.name}' for k, (c, _) in bent.items())})"
    given = {name: value for name, (_, value) in bent.items()}
    must = {c.must for c, _ in bent.values()}
    traced = [name for name, value in given.items() if isinstance(value, Traced)]
    words = "|".join(["JAX is tracing"] + [entry.arguments[name].words for name in bent])
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        result = _inside_jit(entry.call, given, traced) if traced else entry.call(**given)
    except Hang:
        return Outcome(label, "hang")
    except Exception as error:
        return _judge_error(label, error, words if REFUSE in must else "", must == {ACCEPT})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if REFUSE in must:
        return Outcome(label, "silently accepted")
    return Outcome(label, "accepted" if is_finite(result) else "not finite")


def is_finite(result: Any) -> bool:
    """Whether what came back, dual variables or outputs, is made of numbers."""
    values = getattr(result, "alpha", result)
    return not isinstance(values, (float, jax.Array)) or bool(np.isfinite(values).all())


def _inside_jit(call: Any, given: dict[str, Any], traced: list[str]) -> None:
    def inside(*values: Any) -> int:
        call(**{**given, **dict(zip(traced, values, strict=True))})
        return 0

    jax.jit(inside)(*(given[name].value for name in traced))


def _judge_error(label: str, error: Exception, words: str, fine: bool) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    own = type(error).__module__.startswith("dualfluence")
    if not (type(error) in (ValueError, TypeError) or own):
        return Outcome(label, "wrong class of error", text)
    if fine:
        return Outcome(label, "good value refused", text)
    if not re.search(words, str(error), re.IGNORECASE):
        return Outcome(label, "argument not named", text)
    return Outcome(label, "refused", text)


def run(calls: int, seed: int) -> dict[str, Any]:
    """So many calls: every combination once in random order, then anew, then pairs among them."""
    from corruptions import KINDS
    from entries import entries

    rng = np.random.default_rng(seed)
    combinations = [
        (entry, name, corruption)
        for entry in entries()
        for name, argument in entry.arguments.items()
        for corruption in KINDS[argument.kind]
    ]
    outcomes = []
    order: list[int] = []
    for number in range(calls):
        order = order or list(rng.permutation(len(combinations)))
        entry, name, corruption = combinations[order.pop()]
        bent = {name: (corruption, corruption.bend(entry.arguments[name].good, rng))}
        if number % 5 == 4:
            other = list(entry.arguments)[rng.integers(len(entry.arguments))]
            argument = entry.arguments[other]
            second = KINDS[argument.kind][rng.integers(len(KINDS[argument.kind]))]
            if other != name:
                bent[other] = (second, second.bend(argument.good, rng))
        outcomes.append(judge(entry, bent))
    return _summary(outcomes, len(combinations), seed)


def _summary(outcomes: list[Outcome], combinations: int, seed: int) -> dict[str, Any]:
    bad = [o for o in outcomes if o.verdict not in ("refused", "accepted")]
    return {
        "calls": len(outcomes),
        "combinations": combinations,
        "seed": seed,
        "x64": bool(jax.dtypes.canonicalize_dtype(float) == np.float64),
        "verdicts": dict(Counter(o.verdict for o in outcomes)),
        "violations": [o._asdict() for o in bad],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--x64", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.x64)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, ring)
    summary = run(given.calls, given.seed)
    print(json.dumps(summary, indent=1))
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
