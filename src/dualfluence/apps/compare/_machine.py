"""The machine on which numbers were measured: device, versions and commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ..._version import __version__

COMMIT_VARIABLE = "DUALFLUENCE_COMMIT"
"""Environment variable with the commit, for machines that hold the code without its history."""

GIT_SECONDS = 10.0
"""Seconds to wait for git, which may wait for a network disk. With twice this value, a hanging disk
costs twice as long."""


def describe_machine() -> dict[str, Any]:
    """Device, host and versions, for tables and benchmark records."""
    import jax

    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "device_count": jax.device_count(),
        "host": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dualfluence": __version__,
        "matmul_precision": "highest",
    }


def environment() -> dict[str, Any]:
    """Versions, device, time and commit, for results of experiments."""
    import jax

    packages = {p: _version(p) for p in ("jax", "jaxlib", "equinox", "numpy")}
    return {
        "versions": {"python": platform.python_version(), "dualfluence": __version__} | packages,
        "device": device_name(),
        "platform": jax.default_backend(),
        "num_devices": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name() -> str:
    """The default device in words."""
    import jax

    return jax.devices()[0].device_kind


def commit() -> str | None:
    """`DUALFLUENCE_COMMIT`, or that of the checkout which holds the package, if it is one."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    folder = str(Path(__file__).parent)
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
