"""Strict settings for every test: float64, checked shapes and types.

Tests compile many small programs and run each once: they compile fast rather than well, here and in
the processes that tests start.

The suite runs on the CPU. `DUALFLUENCE_TEST_PLATFORM=gpu` runs the numerical tests on an accelerator
in float64, and those marked `gpu` with them; left out are tests that start processes of their own, of
commands, pages, files and downloads, and of frameworks, which say nothing about a device, and of compiled
programs that hold a few MB, less than the 32 MiB that cuBLAS takes as work space (`ON_THE_HOST`); the
peak of a kernel of 8 GB is measured there instead.
Programs are optimised there: what a GPU's compiler does to a convolution is what is tested.
"""

import gc
import os
from pathlib import Path

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(
    int(os.environ.get("DUALFLUENCE_TEST_PLATFORM", "cpu") == "cpu")
)

import jax
import pytest
from jaxtyping import install_import_hook

PLATFORM = os.environ.get("DUALFLUENCE_TEST_PLATFORM", "cpu")

# A thousand compiled programs are millions of objects: looking through all of them for cycles takes seconds.
gc.set_threshold(200_000, 20, 1000)

jax.config.update("jax_enable_x64", True)
if PLATFORM == "cpu":
    jax.config.update("jax_platforms", "cpu")

install_import_hook("dualfluence", "beartype.beartype")

ON_THE_HOST = (
    "adapters/",
    "apps/",
    "attribution/test_commands.py",
    "attribution/test_killed.py",
    "dual/test_damaged_states.py",
    "dual/test_saved_states.py",
    "fuzz/",
    "fuzz_input/",
    "support/",
    "test_bad_input.py",
    "test_house.py",
    "store/",
    "scale/test_memory.py",
    "scale/test_placement.py",
    "scale/test_plan.py::test_predicted_peaks",
    "test_cli.py",
    "test_datasets.py",
    "test_docs.py",
    "test_oracles.py",
    "kernels/test_empirical_frameworks.py",
    "unlearning/test_serve.py",
    "unlearning/test_unlearning_commands.py",
)
"""Files, folders and tests under tests/ that do not run on an accelerator."""


THOROUGH = (
    "adapters/test_adapters_jax.py",
    "apps/explore/test_explore_command.py",
    "apps/explore/test_explore_page.py::test_a_saved_page",
    "apps/explore/test_explore_page.py::test_text",
    "apps/explore/test_explore_page.py::test_the_map",
    "apps/explore/test_explore_routes.py::test_what_is_refused",
    "apps/explore/test_explore_session.py::test_a_network",
    "apps/explore/test_explore_session.py::test_numbers",
    "apps/explore/test_explore_session.py::test_two_classes",
    "apps/test_bench_attribution.py",
    "apps/test_paper_forms.py",
    "apps/test_reproduce.py::test_a_damaged_piece",
    "apps/test_reproduce.py::test_a_run_without_results",
    "apps/test_reproduce.py::test_an_interrupted_run",
    "apps/test_reproduce.py::test_experiments",
    "apps/test_reproduce.py::test_fig2",
    "attribution/",
    "dual/test_adamw.py",
    "dual/test_auto_ridge.py",
    "dual/test_growth.py",
    "dual/test_purge.py",
    "dual/test_saved_states.py::test_a_refined",
    "dual/test_saved_states.py::test_parameters_in_half",
    "dual/test_saved_states.py::test_round_trip_of_a_trained",
    "dual/test_saved_states.py::test_the_form_and_the_precision",
    "dual/test_scaled_ridge.py::test_a_",
    "dual/test_scaled_ridge.py::test_every",
    "dual/test_scaled_ridge.py::test_files",
    "dual/test_scaled_ridge.py::test_parameter_space",
    "dual/test_scaled_ridge.py::test_published",
    "dual/test_scaled_ridge.py::test_purging",
    "dual/test_scaled_ridge.py::test_the_jacobian",
    "dual/test_trees.py",
    "fuzz/test_fuzz.py::test_fits_of",
    "fuzz_input/",
    "infinite/test_in_fit.py::test_cholesky_and_cg",
    "infinite/test_infinite_network.py::test_derivatives",
    "infinite/test_infinite_network.py::test_image_tiles",
    "infinite/test_infinite_network.py::test_many_finite",
    "infinite/test_infinite_network.py::test_the_band",
    "kernels/test_apart.py",
    "kernels/test_custom_vjp.py",
    "kernels/test_scale.py::test_every_form",
    "kernels/test_snapshot.py",
    "operators/test_edits.py",
    "operators/test_structures.py",
    "primal/test_influence.py::test_agrees",
    "primal/test_kronecker.py",
    "primal/test_places.py",
    "primal/test_solvers.py",
    "scale/test_low_rank.py::test_nystrom_of_full_rank",
    "scale/test_memory.py",
    "scale/test_placement.py::test_same_results",
    "scale/test_plan.py::test_predicted_peaks",
    "scale/test_refine.py",
    "solvers/test_preconditioner.py",
    "store/test_damage.py",
    "store/test_store.py::test_fit_and_every_edit",
    "store/test_store.py::test_killed",
    "test_certificate.py::test_bound_is_never",
    "test_cli.py::test_demo",
    "test_docs.py::test_the_examples_of_the_pages_run[inputs",
    "test_docs.py::test_the_examples_of_the_pages_run[penalty",
    "test_exactness.py::test_kronecker_factorisations_agree",
    "test_from_trained.py::test_batches",
    "test_from_trained.py::test_certificates_of_trained_linear",
    "test_gathered.py::test_block_gives_the_same_step",
    "test_gathered.py::test_later_requests",
    "test_gathered.py::test_refined_solves_gather_too",
    "test_jacobian.py::test_read_outs",
    "test_linearize.py::test_modules_with_functions",
    "unlearning/",
)
"""Tables of many small cases, and processes that start many others: together they take longer than
`make test` may. `make thorough` runs them."""

MOST_MAPS = 20_000
"""Memory maps of a process past which compiled programs are dropped. Each program holds a few; Linux allows
65,530, and a compiler that gets no more ends the process."""


def pytest_itemcollected(item):
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    if f"{path}::{item.name}".startswith(THOROUGH):
        item.add_marker(pytest.mark.thorough)


def pytest_collection_modifyitems(config, items):
    """On an accelerator: numerical tests and those marked `gpu`, whatever `-m` says of the latter."""
    if PLATFORM == "cpu":
        return
    root = Path(__file__).parent
    names = {item: f"{item.path.relative_to(root).as_posix()}::{item.name}" for item in items}
    gone = [item for item in items if names[item].startswith(ON_THE_HOST)]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in set(gone)]


def pytest_configure(config):
    if PLATFORM != "cpu":
        if jax.default_backend() == "cpu":
            raise pytest.UsageError(
                f"DUALFLUENCE_TEST_PLATFORM={PLATFORM}, but JAX finds only a CPU. Install jax[cuda12]."
            )
        # As in pyproject.toml.
        default = "not slow and not gpu and not thorough and not frameworks and not browser"
        if config.option.markexpr == default:
            config.option.markexpr = "not slow and not frameworks and not browser"


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
