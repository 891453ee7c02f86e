"""Strict settings for every test: float64, checked shapes and types, no warnings.

Tests compile many small programs and run each once: they compile fast rather than well, here and in
the processes that tests start.

The suite runs on the CPU. `DUALFLUENCE_TEST_PLATFORM=gpu` runs the numerical tests on an accelerator
in float64, and those marked `gpu` with them; left out are tests marked `host`: those that start processes
of their own, of commands, pages, files and downloads, and of frameworks, which say nothing about a device,
and of compiled programs that hold a few MB, less than the 32 MiB that cuBLAS takes as work space; the
peak of a kernel of 8 GB is measured there instead.
Programs are optimised there: what a GPU's compiler does to a convolution is what is tested.
"""

# ruff: noqa: E402
import gc
import mmap
import os
import re
from importlib.util import find_spec
from pathlib import Path

PLATFORM = os.environ.get("DUALFLUENCE_TEST_PLATFORM", "cpu")
QUICK_CODE = "xla_cpu_use_fusion_emitters"
"""Without it XLA writes loops itself instead of passing them through MLIR: the suite compiles in a third of
the time."""
ONE_PART = "xla_cpu_parallel_codegen_split_count"
"""Parts of a program that are compiled side by side. The programs here are small, and each part costs
time: with one, the suite takes a sixth less."""


def compiler_has(flag):
    """Whether this jaxlib knows a flag: an unknown one in `XLA_FLAGS` ends the process.

    The name of a flag that is gone may be left in a list of reserved ones, within other names.
    """
    for library in Path(find_spec("jaxlib").origin).parent.glob("libjax_common*"):
        with library.open() as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            return code.find(b"\0" + flag.encode() + b"\0") >= 0
    return False


os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(PLATFORM == "cpu"))
for flag, value in {QUICK_CODE: "false", ONE_PART: "1"}.items():
    if PLATFORM == "cpu" and compiler_has(flag):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}"

import jax
import pytest
from jaxtyping import install_import_hook

from gates import pytest_collection_modifyitems as pytest_collection_modifyitems
from spent import pytest_runtest_makereport as pytest_runtest_makereport
from spent import pytest_runtest_protocol as pytest_runtest_protocol
from spent import pytest_terminal_summary as pytest_terminal_summary

# A thousand compiled programs are millions of objects: looking through all of them for cycles takes seconds.
gc.set_threshold(200_000, 20, 1000)

jax.config.update("jax_enable_x64", True)
if PLATFORM == "cpu":
    jax.config.update("jax_platforms", "cpu")
    # Two of them, so that a mesh has more than one row of devices, and uneven shares.
    jax.config.update("jax_num_cpu_devices", 2)


MOST_MAPS = 20_000
"""Memory maps of a process past which compiled programs are dropped. Each program holds a few; Linux allows
65,530, and a compiler that gets no more ends the process."""


PLAIN = (
    "adapters/test_audit_doors.py",
    "adapters/test_records.py",
    "attribution/test_tokens.py",
    "infinite/test_image_kernels.py",
    "kernels/test_apart.py",
    "kernels/test_empirical_report.py",
    "kernels/test_rows.py",
    "store/test_store.py",
    "support/test_gate.py",
    "test_bad_input.py",
    "test_linearize.py",
)
"""Tests of networks and kernels that users write without a thought for ranks and dtypes. All others run where
JAX refuses to widen and to spread, except those marked `ordinary`, which run code of others, and long ones
(`thorough` and `slow`, unless `DUALFLUENCE_TEST_STRICT=1`)."""


def pytest_itemcollected(item):
    if item.get_closest_marker("ordinary"):
        item.add_marker(pytest.mark.filterwarnings("default"))  # others' warnings are theirs


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    marks = {mark.name for mark in item.iter_markers()}
    plain = item.path.relative_to(Path(__file__).parent).as_posix().startswith(PLAIN)
    long = marks & {"thorough", "slow"} and not os.environ.get("DUALFLUENCE_TEST_STRICT")
    strict = not (plain or long or "ordinary" in marks)
    jax.config.update("jax_numpy_dtype_promotion", "strict" if strict else "standard")
    jax.config.update("jax_numpy_rank_promotion", "raise" if strict else "allow")


CHECKED = ("attribution", "dual", "fitted", "linalg", "losses", "metrics", "models", "operators", "primal",
           "problem", "solvers", "store", "unlearning")  # fmt: skip
"""Rooms whose arguments are compared with their annotations by default. Long tests compare all:
readers of programs, checks of input and the apps make most calls, and few of these are with arrays."""


def pytest_configure(config):
    long = re.search(r"(?<!not )(thorough|slow)", config.option.markexpr or "thorough")
    checked = "dualfluence" if long else [f"dualfluence.{room}" for room in CHECKED]
    install_import_hook(checked, "beartype.beartype")
    if PLATFORM != "cpu" and jax.default_backend() == "cpu":
        raise pytest.UsageError(
            f"DUALFLUENCE_TEST_PLATFORM={PLATFORM}, but JAX finds only a CPU. Install jax[cuda12]."
        )


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """What a file of tests has compiled is dropped after it if there is too much of it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def quick_compiles():
    """A test that runs longer than it compiles may switch optimisation on for itself."""
    yield
    jax.config.update("jax_disable_most_optimizations", PLATFORM == "cpu")
