"""Commands: thin wrappers that print tables and write files.

Each command imports what it needs when it runs, so that `--help` starts at once.
"""

import json
import platform as host
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._version import __version__
from ..attribute._commands import register as register_attribute
from ..explore._commands import register as register_explore
from ..serve._commands import register as register_serve

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

app = typer.Typer(no_args_is_help=True)
GIB = 2**30
MAX_SEED = 2**32 - 1
"""JAX takes seeds of 32 bits in 32-bit mode."""

BENCHMARKS = ("core", "kernels", "attribution")


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"dualfluence {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """What would this model be if some training points had been different?"""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("dualfluence-report"),
    points: Annotated[int, typer.Option(min=20, max=2000, help="Training images.")] = 300,
    ridge: Annotated[float, typer.Option(help="λ of the ridge.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the network.")] = 0,
) -> None:
    """Explain predictions, find wrong labels, remove points, and compare with exact retraining."""
    from ..._support.files import check_writable
    from .. import demo as demonstration
    from ..paper._results import write_json

    page, numbers, console = out / "index.html", out / "demo.json", _console()
    check_writable(page)
    with console.status("starting") as status:
        result = demonstration.run_demo(
            points=points, ridge=ridge, seed=seed, report=lambda text: status.update(f"{text} …")
        )
    console.print(_demo_table(result))
    console.print(demonstration.gain_in_words(result["gain"]), soft_wrap=True)
    write_json(numbers, result)
    demonstration.write_page(result, page)
    console.print(
        f"{result['seconds']:.0f} s in all. Report: {page}  Numbers: {numbers}", soft_wrap=True
    )


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help=" or ".join(BENCHMARKS))] = "core",
    out: Annotated[Path | None, typer.Option(help="JSON file; by default only printed.")] = None,
    points: Annotated[int, typer.Option(min=20, max=2000, help="Training images.")] = 500,
    repeats: Annotated[int, typer.Option(min=1, help="Repeated calls of the fast methods.")] = 7,
    large: Annotated[bool, typer.Option(help="kernels: also the sizes that take minutes.")] = False,
    peer_python: Annotated[
        str | None, typer.Option(help="kernels: a Python with Neural Tangents, timed alongside.")
    ] = None,
) -> None:
    """Measure the methods of the README side by side in one run.

    `kernels` and `attribution` are scripts in the folder `benchmarks` of the repository and need a checkout.
    """
    if what not in BENCHMARKS:
        raise typer.BadParameter(f"expected one of {', '.join(BENCHMARKS)}, got {what!r}")
    from ..._support.files import check_writable
    from .. import bench as benchmarks
    from ..paper._results import write_json

    if out is not None:
        check_writable(out)
    if what != "core":
        options = [f"--repeats={repeats}", *([] if out is None else [f"--out={out}"])]
        options += [f"--points={points}"] if what == "attribution" else ["--large"] * large
        options += [] if peer_python is None else [f"--peer-python={peer_python}"]
        raise typer.Exit(_run_script(what, options))
    console = _console()
    with console.status("benchmark core …"):
        result = benchmarks.bench_core(points=points, repeats=repeats)
    console.print_json(json.dumps(result))
    if out is not None:
        write_json(out, result)
        console.print(f"written to {out}")


def _run_script(what: str, options: list[str]) -> int:
    """A benchmark of the repository in a process of its own; returns its exit code."""
    script = Path(__file__).parents[4] / "benchmarks" / f"{what}.py"
    if not script.exists():
        raise typer.BadParameter(
            f"bench {what}: {script} not found. It is part of the repository, not of the package: run from "
            "a checkout."
        )
    return subprocess.run([sys.executable, str(script), *options], check=False).returncode


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(help="fig1, fig2, fig3, fig4, linear, linear-ten or all")
    ] = "all",
    scale: Annotated[str, typer.Option(help="smoke (minutes on two cores) or paper.")] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("dualfluence-results"),
    data_dir: Annotated[Path | None, typer.Option(help="Folder with MNIST and CIFAR-10.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the results in the folder.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of networks, removals and queries.")
    ] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which no new part is started.")
    ] = None,
    percentages: Annotated[
        str | None, typer.Option(help="Percentages to remove, e.g. 10,50,90.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of every training.")] = None,
    per_class: Annotated[
        int | None, typer.Option(min=1, help="Training points of each class.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed calls of every method after its first.")
    ] = None,
    released_repeats: Annotated[
        int | None, typer.Option(min=0, help="Timed calls of the methods as released; 0: none.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Further seeds for fig1 to fig4, e.g. 1,2,3.")
    ] = None,
    cold: Annotated[
        bool | None, typer.Option("--cold/--no-cold", help="First calls of fig1 in new processes.")
    ] = None,
    matmul_precision: Annotated[
        str | None, typer.Option(help="Precision of matrix products, e.g. highest.")
    ] = None,
    plots_only: Annotated[bool, typer.Option(help="Redraw from the JSON files.")] = False,
) -> None:
    """Run the paper's experiments, draw its figures, and compare with the published values."""
    only = None if percentages is None else _whole_numbers(percentages)
    from .. import paper as experiments

    if name not in (*experiments.NAMES, "all") or scale not in experiments.SCALES:
        raise typer.BadParameter(
            f"expected {', '.join(experiments.NAMES)} or all at scale "
            f"{' or '.join(experiments.SCALES)}, got {name!r} at {scale!r}"
        )
    overrides = {
        "percentages": only,
        "epochs": epochs,
        "per_class": per_class,
        "repeats": repeats,
        "released_repeats": released_repeats,
        "cold": cold,
        "seeds": None if seeds is None else _whole_numbers(seeds),
        "matmul_precision": matmul_precision,
    }
    finished = experiments.reproduce(
        name,
        scale=scale,
        out=out,
        data_dir=data_dir,
        resume=resume,
        seed=seed,
        budget=budget,
        overrides=overrides,
        plots_only=plots_only,
    )
    if not finished:
        raise typer.Exit(3)


@app.command()
def experiment(
    forget: Annotated[
        list[str],
        typer.Option(help="Percentages by class, e.g. 3:10,8:50. Repeat it for further sets."),
    ],
    data: Annotated[
        str, typer.Option(help="Data set: mnist-small, mnist or cifar10.")
    ] = "mnist-small",
    classes: Annotated[str, typer.Option(help="Classes to take.")] = "3,8",
    per_class: Annotated[int, typer.Option(min=1, help="Training points of each class.")] = 100,
    per_class_test: Annotated[int, typer.Option(min=1, help="Test points of each class.")] = 100,
    network: Annotated[str, typer.Option(help="Network: fcnn or cnn.")] = "fcnn",
    depth: Annotated[int, typer.Option(min=1, help="Hidden layers or blocks.")] = 2,
    width: Annotated[int, typer.Option(min=1, help="Units or channels of each layer.")] = 256,
    linearised: Annotated[bool, typer.Option(help="Train the linearisation instead.")] = False,
    loss: Annotated[str, typer.Option(help="Loss: squared or softmax.")] = "squared",
    ridge: Annotated[float, typer.Option(help="λ of the ridge.")] = 1e-2,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of every training.")] = 1000,
    momentum: Annotated[float, typer.Option(min=0, help="Momentum of the descent.")] = 0.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Points in a batch; by default all.")
    ] = None,
    decay_steps: Annotated[int, typer.Option(min=1, help="Steps between decays of the rate.")] = 1,
    decay_rate: Annotated[float, typer.Option(help="Factor of the rate at a decay.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls after the first.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("dualfluence-results"),
    data_dir: Annotated[Path | None, typer.Option(help="Folder with MNIST and CIFAR-10.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the results in the folder.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of network and removals.")
    ] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which no new part is started.")
    ] = None,
) -> None:
    """Train a network of your own choice, forget parts of its classes, and compare every method."""
    labels, sets = _whole_numbers(classes), tuple(_shares(text) for text in forget)
    from .. import paper as experiments
    from ..compare._networks import Architecture
    from ..paper._config import check_kinds

    try:
        check_kinds(network, loss)
        config = experiments.Own(
            data=experiments.Data(data, labels, per_class, per_class_test),
            network=Architecture(network, depth, width),  # pyright: ignore[reportArgumentType]
            training=experiments.Minibatches(
                loss=loss,  # pyright: ignore[reportArgumentType]
                ridge=ridge,
                rate=rate,
                epochs=epochs,
                momentum=momentum,
                batch_size=batch_size,
                decay_steps=decay_steps,
                decay_rate=decay_rate,
            ),
            forget=sets,
            linearised=linearised,
            repeats=repeats,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    finished = experiments.experiment(
        config, out=out, data_dir=data_dir, resume=resume, seed=seed, budget=budget
    )
    if not finished:
        raise typer.Exit(3)


def _shares(text: str) -> tuple[tuple[int, float], ...]:
    """`3:10,8:50` as pairs of a class and its percentage."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(label), float(percent)) for label, percent in pairs)
    except ValueError:
        raise typer.BadParameter(
            f"expected classes with percentages, e.g. 3:10,8:50, got {text!r}"
        ) from None


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers separated by commas, e.g. 10,50,90, got {text!r}"
        ) from None


@app.command()
def plan(
    points: Annotated[int, typer.Argument(min=1, help="Training points n.")],
    outputs: Annotated[int, typer.Option(min=1, help="Outputs c.")] = 1,
    parameters: Annotated[int, typer.Option(min=0, help="Trainable parameters; 0 if none.")] = 0,
    structure: Annotated[
        str, typer.Option(help="dense, or kronecker at infinite width.")
    ] = "dense",
    dtype: Annotated[str, typer.Option(help="Dtype of the kernel.")] = "float32",
    devices: Annotated[int, typer.Option(min=1, help="Devices that share K.")] = 1,
    memory_gib: Annotated[
        float, typer.Option(min=0, help="Memory of each device; 0 for this machine's.")
    ] = 0.0,
    platform: Annotated[
        str | None, typer.Option(help="cpu, gpu or tpu, to plan for another machine.")
    ] = None,
) -> None:
    """Estimate the cost of each form of the kernel, and name the one that fit would choose."""
    from ..._plan import plan_command

    status = plan_command(
        points,
        outputs,
        parameters,
        structure=structure,
        dtype=dtype,
        devices=devices,
        memory_gib=memory_gib,
        platform=platform,
    )
    raise typer.Exit(status)


@app.command()
def info() -> None:
    """Describe this installation and its defaults on this machine."""
    import jax
    from rich.table import Table

    from ..._support.memory import memory_budget, total_memory
    from ..compare._machine import describe_machine

    table = Table(show_header=False, box=None)
    for name, value in describe_machine().items():
        table.add_row(name, str(value))
    table.add_row("platform", host.platform())
    table.add_row("x64", "on" if jax.config.read("jax_enable_x64") else "off (float32)")
    table.add_row("memory", f"{total_memory() / GIB:.1f} GiB")
    budget = memory_budget()
    table.add_row(
        "dense K up to", f"{budget / GIB:.1f} GiB: n·c ≤ {int((budget / 4) ** 0.5):,} in float32"
    )
    _console().print(table)


def _console() -> "Console":
    from rich.console import Console

    return Console()


def _demo_table(result: dict[str, Any]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..compare._names import RETRAINED
    from ..demo import percent

    config = result["config"]
    title = f"{config['network']}, {config['points']} images, λ = {config['ridge']:g}, {config['dtype']}"
    caption = "error: distance to retraining, as a share of the change; forget, test: accuracies"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("gone", justify="right", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("time", "error", "certified", "forget", "test"):
        table.add_column(name, justify="right", no_wrap=True)
    for o in result["outcomes"]:
        new = o["method"] == RETRAINED
        cert = "" if o["certificate"] is None else percent(o["certificate"])
        if new and table.row_count:
            table.add_section()
        table.add_row(
            f"{o['percent']:g} %" if new else "",
            o["method"],
            f"{1000 * o['timing']['repeat']:.4g} ms",
            percent(o["error"]),
            cert,
            f"{o['forget_accuracy']:.3f}",
            f"{o['test_accuracy']:.3f}",
        )
    return table


# Commands that live with what they show; their modules import what is heavy when they run.
register_attribute(app)
register_serve(app)
register_explore(app)
