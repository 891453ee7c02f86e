"""The plan's bytes are the bytes that are used, and what cannot fit is refused with advice."""

import shutil
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measured import compiled_peaks

import dualfluence as dfl
from dualfluence._plan import PREDICTED_WITHIN, TIMED_WITHIN, plan_command
from dualfluence.attribution import RandomProbes, Trajectory
from dualfluence.operators import DenseOperator, KroneckerOperator, LowRankOperator

GIB = 2**30


def test_bytes_in_memory_are_as_predicted():
    made = dfl.plan(50, 3, 1000, dtype="float32", rank=20, memory=GIB)
    dense = DenseOperator(jnp.zeros((150, 150), jnp.float32), 3)
    low = LowRankOperator(jnp.zeros((50, 3, 20), jnp.float32))
    assert made["dense"].num_bytes == dense.num_bytes == dense.matrix.nbytes
    assert made["low-rank"].num_bytes == low.num_bytes
    assert made["matrix-free"].num_bytes == 0
    kronecker = dfl.plan(50, 3, structure="kronecker", dtype="float64", memory=GIB)
    assert kronecker["kronecker"].num_bytes == KroneckerOperator(jnp.zeros((50, 50)), 3).num_bytes


@pytest.mark.parametrize("tile", [7, 16, 100])
def test_bytes_on_disk_are_as_predicted(tmp_path, tile):
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    kernel = lambda a, b: np.asarray(a) @ np.asarray(b).T  # noqa: E731
    store = dfl.store.build(kernel, x, tmp_path / "k", tile=tile, progress=False)
    made = dfl.plan(50, 1, structure="kronecker", tile=tile, memory=GIB)
    assert made["stored"].num_bytes == store.num_bytes
    files = sum(f.stat().st_size for f in (tmp_path / "k" / "kernel").iterdir())
    padded = -(-50 // min(tile, 50)) * min(tile, 50)  # chunks at the edge are stored whole
    assert store.num_bytes <= files <= store.num_bytes * (padded / 50) ** 2 + 4096


def test_choice_follows_memory_and_says_why():
    paper = {"n": 10_000, "c": 10, "num_params": 2_900_000}
    large = dfl.plan(**paper, memory=139 * GIB)
    assert large.chosen == "dense"
    assert large["dense"].num_bytes == 40_000_000_000
    assert large.require("dense").fits
    small = dfl.plan(**paper, memory=16 * GIB)
    assert small.chosen == "matrix-free"
    assert "over" in small.reason
    with pytest.raises(dfl.PlanError, match=r"37.3 GiB.*matrix-free"):
        small.require("dense")
    shared = dfl.plan(**paper, memory=16 * GIB, devices=8)
    assert shared.chosen == "dense"
    assert dfl.plan(200_000, structure="kronecker", memory=16 * GIB).chosen == "none"
    assert not dfl.plan(200_000, memory=GIB, disk=GIB)["stored"].fits


def test_table_and_exit_status(capsys):
    assert plan_command(10_000, 10, 2_900_000, memory_gib=139.0) == 0
    assert "dense*" in capsys.readouterr().out
    assert plan_command(10_000_000, 10, memory_gib=1.0) == 1


def test_fit_refuses_before_allocating(monkeypatch):
    monkeypatch.setattr("dualfluence._plan.total_memory", lambda: 1000)
    model = dfl.linearize(lambda p, x: x @ p, jnp.ones((2, 1)))
    x = np.random.default_rng(0).normal(size=(40, 2))
    options = {"loss": dfl.SquaredError(), "ridge": 1.0}
    with pytest.raises(dfl.PlanError, match="matrix-free"):
        dfl.fit(model, x, x[:, :1], kernel="dense", **options)
    with pytest.raises(dfl.PlanError, match="store"):
        dfl.fit(lambda a, b: a @ b.T, x, x[:, :1], **options)
    assert dfl.fit(model, x, x[:, :1], kernel="matrix-free", **options).stats.converged


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 3, "rank": 0}, {"n": 3, "structure": "sparse"}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="plan: "):
        dfl.plan(**bad)


def test_times_follow_the_speed_of_this_machine_or_of_another():
    here = dfl.plan(4000, 1)
    assert "measured" in here.assumptions
    there = dfl.plan(4000, 1, platform="gpu")
    assert "assumed" in there.assumptions
    assert there["dense"].seconds < here["dense"].seconds or jnp.ones(1).device.platform != "cpu"
    given = dfl.plan(4000, 1, bandwidth=1e9, products=10)
    np.testing.assert_allclose(given["dense"].seconds, 10 * 4000**2 * 4 / 1e9)
    with pytest.raises(ValueError, match="platform"):
        dfl.plan(10, platform="abacus")


NET = dfl.infinite.serial(dfl.infinite.Dense(), dfl.infinite.Relu(), dfl.infinite.Dense())


def network(params, x):
    return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2]


def measure(form, n, c, width, folder):
    """The largest of a fit's compiled programs, and what a product with a store holds outside them."""
    rng = np.random.default_rng(0)
    shapes = ((20, width), (width, width), (width, c))
    model = dfl.linearize(network, [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes])
    x, y = rng.normal(size=(n, 20)).astype(np.float32), rng.integers(0, c, n)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "max_steps": 1, "progress": False}
    options |= {"on_failure": "report"}
    outside = 0
    with compiled_peaks() as peaks:
        if form in ("dense", "matrix-free"):
            dfl.fit(model, x, y, kernel=form, **options)
        elif form == "low-rank":
            dfl.fit(dfl.low_rank(model, x, 200), x, y, **options)
        elif form == "kronecker":
            wide = dfl.KernelOptions(num_outputs=c)
            dfl.fit(NET, x, y, kernel=wide, solver=dfl.CG(), **options)
        else:
            op = dfl.store.build(NET, x, folder, num_outputs=c, progress=False).operator()
            dfl.fit(NET, x, y, kernel=op, **options)
            tracemalloc.start()
            op._product(np.zeros((n, c), np.float32))
            outside = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return max(peak for _, peak in peaks) + outside, model.num_params


@pytest.mark.host
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "n", "c", "width"),
    [
        ("dense", 300, 8, 64),
        ("dense", 5, 1000, 64),
        ("matrix-free", 400, 10, 256),
        ("matrix-free", 1500, 5, 64),
        ("kronecker", 1500, 4, 8),
        ("low-rank", 1500, 5, 64),
        ("stored", 800, 2, 8),
    ],
)
def test_predicted_peaks_are_those_of_the_compiled_programs(form, n, c, width, tmp_path):
    measured, num_params = measure(form, n, c, width, tmp_path / "k")
    structure = "kronecker" if form in ("kronecker", "stored") else "dense"
    made = dfl.plan(n, c, num_params, structure=structure, platform="cpu", memory=64 * GIB)
    assert measured / PREDICTED_WITHIN <= made[form].peak_bytes <= measured * PREDICTED_WITHIN


def test_a_size_and_its_limit_can_be_told_apart():
    """The kernel of 50,000 points is 9.3132 GiB; 40 % of this memory are 9.3130 GiB."""
    made = dfl.plan(50_000, memory=24_999_500_000, platform="cpu")
    first, second = made.reason.removeprefix("dense takes ").split(" per device, over ")
    assert first != second
    assert float(first.split()[0]) > float(second.split()[0])
    assert not made["dense"].fits


def test_the_plan_is_what_fit_does(monkeypatch):
    """At the limit a kernel is held by both, a byte below by neither: one policy."""
    from dualfluence._support import memory
    from dualfluence.fitted._setup import choose_form
    from dualfluence.models._sources import as_source

    model = dfl.linearize(lambda p, x: x @ p, jnp.ones((2, 1), jnp.float32))
    needed = 4000**2 * 4
    for total, form in ((int(needed / 0.4) + 1, "dense"), (int(needed / 0.4) - 9, "matrix-free")):
        monkeypatch.setattr(memory, "total_memory", lambda total=total: total)
        assert dfl.plan(4000, 1, 2, memory=total, platform="cpu").chosen == form
        assert choose_form(as_source(model), "auto", 4000, 1, jnp.float32)[0] == form


def test_a_store_must_fit_on_the_disk_there_is(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    points = int((4 * free / 4) ** 0.5)  # twice the disk in the upper triangle
    folder = tmp_path / "not" / "yet" / "there"
    made = dfl.plan(points, structure="kronecker", folder=folder, platform="cpu")["stored"]
    assert made.num_bytes > 1.5 * free
    assert not made.fits
    assert "are free" in made.note
    assert dfl.plan(100, folder=folder, platform="cpu")["stored"].fits


@pytest.mark.parametrize(
    "bad",
    [{"memory": -1}, {"disk": -1}, {"num_params": -5}, {"tile": 0}, {"products": 0}, {"n": -3}],
)
def test_sizes_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match=r"plan: \w+ must"):
        dfl.plan(**{"n": 10, "platform": "cpu", **bad})


def test_the_plan_of_sequences_takes_the_faster_method_that_fits():
    size = {"platform": "gpu", "memory": 139 * GIB}
    given = dfl.Sequences(512, 10**9, probes=16, rank=20_480, checkpoints=6, flops=4e14)
    one, eight = (
        dfl.plan(100_000, 128_000, 10**7, sequences=given, devices=d, **size) for d in (1, 8)
    )
    assert one.chosen == eight.chosen == "projected"
    assert one["outputs"].num_bytes == (16 * 100_000) ** 2 * 4
    assert one["projected"].num_bytes == 20_480**2 * 4
    assert not one["outputs"].fits
    assert one["projected"].seconds == pytest.approx(6 * eight["projected"].seconds)
    assert one["projected"].products == 6 * (100_000 * 17 + 100)
    # On paper: a forward pass and 17 backward ones, whose frozen weights need no gradient.
    tokens = 100_000 * 512
    forward, backward = 2 * (10**9 + 10**7), 17 * 2 * (10**9 + 2 * 10**7)
    assert eight["projected"].seconds > tokens * (forward + backward) / 4e14
    assert "6 of 8 devices" in str(eight)
    few = dfl.plan(200, 256, 10**6, sequences=dfl.Sequences(32, probes=4), **size)
    assert all(form.fits for form in few.forms)
    assert few.chosen == min(few.forms, key=lambda form: form.seconds).name
    assert dfl.plan(10**6, 256, 10**9, sequences=given, platform="cpu", memory=GIB).chosen == "none"
    with pytest.raises(ValueError, match="plan: scores of sequences need num_params"):
        dfl.plan(10, 256, sequences=given)
    with pytest.raises(ValueError, match="Sequences: tokens must"):
        dfl.Sequences(0)


def spoken(p, tokens):
    h = p["words"][tokens]
    for w in p["hidden"]:
        h = h + jnp.tanh(h @ w)
    return h @ p["out"]


def talk(n, words, width, length, layers):
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.float32)  # noqa: E731
    params = {"words": draw(words, width), "hidden": [draw(width, width) for _ in range(layers)]}
    params |= {"out": draw(width, words)}
    run = Trajectory(
        spoken, [params], [10], 0.1, trainable=lambda path, leaf: path[0].key != "words"
    )
    data = [rng.integers(0, words, (size, length)) for size in (n, n, 3, 3)]
    return run, data, sum(a.size for a in jax.tree.leaves((params["hidden"], params["out"])))


def speed():
    """As `measure_speed`, in seconds of all cores together: other work on the machine does not count."""
    K = jnp.ones((4096, 4096), jnp.float32)
    product = jax.jit(lambda K, v: jnp.dot(K, v, precision="highest"))
    found = []
    for v, amount in ((K[0], K.nbytes), (K[:, :256], 2 * K.size * 256)):
        product(K, v).block_until_ready()
        start = time.process_time()
        for _ in range(3):
            product(K, v).block_until_ready()
        found.append(3 * amount / (time.process_time() - start))
    return tuple(found)


@pytest.mark.host
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["outputs", "projected"])
@pytest.mark.parametrize(
    ("n", "words", "width", "length", "layers"), [(64, 256, 256, 96, 6), (96, 6000, 64, 24, 2)]
)
def test_sequences_take_the_memory_and_the_seconds_of_their_plan(
    method, n, words, width, length, layers, monkeypatch
):
    run, data, trained = talk(n, words, width, length, layers)
    options = {"method": method, "probes": RandomProbes(4), "rank": 1024, "progress": False}
    with compiled_peaks() as peaks:
        run.attribute(*data, **options)
    monkeypatch.setattr("dualfluence._plan.measure_speed", speed)
    given = dfl.Sequences(length, probes=4, rank=1024, queries=3)
    made = dfl.plan(n, words, trained, sequences=given, memory=64 * GIB)[method]
    held = max(peak for _, peak in peaks)
    assert held / PREDICTED_WITHIN <= made.peak_bytes <= held * PREDICTED_WITHIN
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        jax.clear_caches()
        run.attribute(*data, **options)
        start = time.process_time()
        run.attribute(*data, **options)
        spent = time.process_time() - start
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    print(method, n, words, "spent", spent, "planned", made.seconds, "peak", held, made.peak_bytes)
    assert spent / TIMED_WITHIN <= made.seconds <= spent * TIMED_WITHIN
