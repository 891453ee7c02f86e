"""The wheel and the source archive: built, installed in an empty environment, and tried there.

Without a network. The new environment sees the packages of this one by a `.pth` file of its own, and the
library from the wheel alone: the editable install of this checkout is not on its path.
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
META = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = pytest.mark.host

TRY = """
import dualfluence as dfl, numpy as np, sys
assert str(dfl.__file__).startswith(sys.prefix), dfl.__file__
data = dfl.datasets.load("mnist-small")
fitted = dfl.fit(
    lambda a, b: a @ b.T, data.x_train[:20], np.eye(10)[data.y_train[:20]],
    loss=dfl.SquaredError(), ridge=1e-2, progress=False,
)
gone = fitted.edit(dfl.Remove([3]), progress=False)
assert np.isfinite(np.asarray(gone.predict(data.x_test[:2]))).all()
assert dfl.audit(None, data.x_train[:40], data.y_train[:40]).num_points == 40
from dualfluence.apps.page._write import static_files
assert "index.html" in static_files()
print(dfl.__version__)
"""


def version():
    return re.search(r'"(.+)"', (ROOT / "src/dualfluence/_version.py").read_text()).group(1)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, made from the source archive as installers do, and that archive."""
    if find_spec("hatchling") is None:
        pytest.skip("Building needs hatchling: pip install hatchling.")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel, archive


def names(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


@pytest.mark.thorough
def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, archive = built
    package = ROOT / "src" / "dualfluence"
    tracked = run("git", "ls-files", "src/dualfluence", cwd=ROOT).split()
    wanted = {
        Path(name).relative_to("src").as_posix() for name in tracked if (ROOT / name).exists()
    }
    inside = {name for name in names(wheel) if ".dist-info/" not in name}
    assert package.is_dir()
    assert wanted - inside == set()
    assert {name.split("/")[0] for name in inside} == {"dualfluence"}
    assert wheel.name == f"dualfluence-{version()}-py3-none-any.whl"
    with tarfile.open(archive) as file:
        top = {Path(name).parts[1] for name in file.getnames()}
    assert top >= {"src", "tests", "docs", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}


@pytest.mark.thorough
def test_the_wheel_says_where_the_project_lives(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as file:
        (name,) = [n for n in file.namelist() if n.endswith("METADATA")]
        text = file.read(name).decode()
    for label, address in META["project"]["urls"].items():
        assert f"Project-URL: {label}, {address}" in text


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["wheel", "archive"])
def test_both_forms_work_in_an_empty_environment(built, form, tmp_path):
    if find_spec("pip") is None:
        pytest.skip("Installing needs pip, which environments of uv do not have.")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    others = Path(find_spec("jax").origin).parents[1]
    (site / "others.pth").write_text(f"{others}\n")  # adds packages, but runs no .pth of theirs
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # The archive is built by the hatchling of this environment: there is no network to fetch another one.
    run(
        *(sys.executable, "-m", "pip", "--python", python, "--isolated", "install", "--quiet"),
        *("--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--disable-pip-version-check", built[form == "archive"]),
        cwd=tmp_path,
        env=clean,
    )
    assert (site / "dualfluence" / "_version.py").exists()
    assert run(python, "-c", TRY, cwd=tmp_path, env=clean).strip() == version()
    command = tmp_path / "env" / "bin" / "dualfluence"
    assert version() in run(command, "--version", cwd=tmp_path, env=clean)


def test_the_metadata_has_what_a_release_needs():
    project = META["project"]
    assert set(project["urls"]) >= {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith("https://") for address in project["urls"].values())
    assert (ROOT / project["readme"]).exists()
    assert all((ROOT / name).exists() for name in project["license-files"])
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version())


def test_hooks_and_ci_run_what_the_makefile_runs():
    """The linters of `make lint`, and `.ci/run` itself."""
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M).group(1)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in re.findall(r"\$\(BIN\)/(\w+(?: check| format)?)", lint):
        assert f".venv/bin/{tool}" in hooks
    assert re.search(r"run: \.ci/run$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)
