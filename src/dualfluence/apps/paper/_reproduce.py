"""Run experiments, then draw figures and write a report from their JSON files."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ... import datasets
from ..._support.files import check_writable
from ..._support.options import ProgressFn
from ...datasets._files import given_folder
from . import _run_fig1, _run_fig2, _run_fig3, _run_fig4, _run_linear, _run_linear_ten, _run_own
from ._common import Context, LoadFn
from ._config import NAMES, OWN, Config, Fig1, Fig4, Own, configure
from ._results import OutOfBudget, ResultsFolder, Run, read_results

RUNNERS: dict[str, Callable[[Any, Context], None]] = {
    "fig1": _run_fig1.run,
    "fig2": _run_fig2.run,
    "fig3": _run_fig3.run,
    "fig4": _run_fig4.run,
    "linear": _run_linear.run,
    "linear-ten": _run_linear_ten.run,
    OWN: _run_own.run,
}


def reproduce(
    name: str,
    *,
    scale: str = "smoke",
    out: str | Path = "results",
    data_dir: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    budget: float | None = None,
    overrides: dict[str, Any] | None = None,
    plots_only: bool = False,
    progress: bool | ProgressFn = True,
    load: LoadFn = datasets.load,
) -> bool:
    """Run one of the paper's experiments, or all, and write JSON, figures and a report.

    **Arguments:**

    - `name`: `"fig1"` to `"fig4"`, `"linear"`, `"linear-ten"` or `"all"`. `"all"` runs
      everything for which the data are present and reports what it leaves out. A single experiment
      needs all its data.
    - `scale`: `"paper"` for the published settings, `"smoke"` for a run of minutes on two cores.
    - `out`: folder for `<name>.json`, `<name>.png` and `report.html`.
    - `data_dir`: folder with MNIST and CIFAR-10; see `datasets.load`.
    - `resume`: continue from the results of an interrupted run in `out`.
    - `seed`: of initialisation, removals and queries.
    - `budget`: seconds after which no new piece is started; finished results are drawn, and a later
      call with `resume` does the rest.
    - `overrides`: fields of the configuration to replace, e.g. `{"percentages": (10, 90)}`.
    - `plots_only`: redraw from the JSON files in `out`; computes nothing.
    - `load`: the function that loads data sets.

    **Returns:** whether every requested experiment is complete.
    """
    names = NAMES if name == "all" else (name,)
    folder = Path(out)
    configs = {n: configure(n, scale, overrides) for n in names}
    complete = True
    if plots_only and not any(read_results(folder, n) for n in names):
        raise FileNotFoundError(
            f"reproduce: nothing to draw in {folder}; expected {', '.join(f'{n}.json' for n in names)}. "
            "Run without plots_only first."
        )
    if not plots_only:
        missing: dict[str, str] = {}
        if load is datasets.load:
            missing = _check_data(configs, data_dir, progress, may_miss=name == "all")
            for why in missing.values():
                print(f"reproduce continues without a data set: {why}", file=sys.stderr, flush=True)
        for each in names:
            check_writable(folder / f"{each}.json")
        store = ResultsFolder(folder, resume=resume, budget=budget)
        for each, config in configs.items():
            run = Run(store, each, scale, config, seed)
            here, run.left_out = _runnable(config, missing)
            run.complete = not run.left_out
            for part in run.left_out:
                print(f"{each}: left out: {part}", file=sys.stderr, flush=True)
            if here is not None:
                _execute(run, here, Context(run, seed, progress, data_dir, load))
            complete = complete and run.complete
            _draw(folder, [each], progress)
    _draw(folder, names if plots_only else [], progress)
    _report(folder, progress)
    return complete


def experiment(
    config: Own,
    *,
    out: str | Path = "results",
    data_dir: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    budget: float | None = None,
    progress: bool | ProgressFn = True,
    load: LoadFn = datasets.load,
) -> bool:
    """Run an experiment of one's own with the machinery of the paper's figures.

    It trains the network and retrains it once without each set to forget. It compares four methods:
    parameter space, the paper's dual form with the exact Hessian, the same with the Hessian of all
    points, and our method.

    **Arguments:**

    - `config`: the network, data, training and sets to forget.
    - `out`: folder for `own.json`, `own.png` and `report.html`.
    - the rest: as in `reproduce`.

    **Returns:** whether it is complete.
    """
    if not isinstance(config, Own):
        raise TypeError(f"experiment: config must be an Own, got {type(config).__name__}.")
    folder = Path(out)
    check_writable(folder / f"{OWN}.json")
    if load is datasets.load:
        _check_data({OWN: config}, data_dir, progress, may_miss=False)
    run = Run(ResultsFolder(folder, resume=resume, budget=budget), OWN, "own", config, seed)
    _execute(run, config, Context(run, seed, progress, data_dir, load))
    _draw(folder, [OWN], progress)
    _report(folder, progress)
    return run.complete


def _execute(run: Run, config: Config, context: Context) -> None:
    try:
        with jax.default_matmul_precision(config.matmul_precision):
            RUNNERS[run.name](config, context)
    except OutOfBudget:
        run.complete = False
        context.say("time budget spent; run again with --resume for the rest")
    except KeyboardInterrupt:
        print(f"{run.name}: interrupted; --resume continues from {run.store.out}", file=sys.stderr)
        raise
    run.finish()


def _check_data(
    configs: dict[str, Config], data_dir: Any, progress: bool | ProgressFn, *, may_miss: bool
) -> dict[str, str]:
    """Ask for every data set before the first hour is spent; those that are not here, and why."""
    given_folder(data_dir)  # an error if it is named but not there, even if it is not needed
    needed: set[tuple[str, tuple[int, ...]]] = set()
    for config in configs.values():
        parts = [r.data for r in config.rows] if isinstance(config, Fig1 | Fig4) else [config.data]
        needed |= {(part.dataset, part.classes) for part in parts}
    missing = {}
    for dataset, classes in sorted(needed):
        try:
            datasets.load(dataset, classes=classes, data_dir=data_dir, progress=progress)
        except OSError as error:  # no file, no network
            if not may_miss:
                raise
            missing[dataset] = str(error)
    return missing


def _runnable(config: Config, missing: dict[str, str]) -> tuple[Config | None, tuple[str, ...]]:
    """The part of an experiment whose data sets are here, and the rest in words."""
    if not isinstance(config, Fig1 | Fig4):
        why = missing.get(config.data.dataset)
        return (config, ()) if why is None else (None, (f"all of it: {why.splitlines()[0]}",))
    missing = {dataset: why.splitlines()[0] for dataset, why in missing.items()}
    rows = tuple(row for row in config.rows if row.data.dataset not in missing)
    gone = (row for row in config.rows if row.data.dataset in missing)
    words = tuple(f"{row.name}: {missing[row.data.dataset]}" for row in gone)
    return replace(config, rows=rows) if rows else None, words


def _draw(folder: Path, names: Any, progress: bool | ProgressFn) -> None:
    from ._draw import draw  # needs matplotlib, the `cli` extra

    for name in names:
        results = read_results(folder, name)
        if results is not None:
            path = draw(results, folder)
            if progress is not False:
                print(f"{name}: {path}", flush=True)


def _report(folder: Path, progress: bool | ProgressFn) -> None:
    from ._report import write_report

    path = write_report(folder)
    if progress is not False:
        print(f"report: {path}", flush=True)
