"""The files of a data set: in the user's folder, or a checked download in the cache."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._support.progress import ProgressFn, Ticker

ENVIRONMENT_VARIABLE = "DUALFLUENCE_DATA"
CHUNK_BYTES = 2**18
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """One published file: its name, size and checksum, and the folders that serve it."""

    name: str
    num_bytes: int
    sha256: str
    mirrors: tuple[str, ...]


def given_folder(data_dir: str | Path | None) -> Path | None:
    """The folder that the user gave: `data_dir`, else `DUALFLUENCE_DATA`, else `None`."""
    named = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT_VARIABLE) or None
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        source = "data_dir" if data_dir is not None else ENVIRONMENT_VARIABLE
        raise FileNotFoundError(f"{source} names {folder}, which is not a folder.")
    return folder


def find_file(folder: Path, subfolder: str, names: Sequence[str]) -> Path | None:
    """The first of `names` found in `folder/subfolder` or in `folder` itself."""
    candidates = (place / name for place in (folder / subfolder, folder) for name in names)
    return next((path for path in candidates if path.is_file()), None)


def where_to_put(subfolder: str, names: Sequence[str]) -> str:
    """Instructions for providing the files by hand, which end every error about missing data."""
    listed = "\n".join(f"  FOLDER/{subfolder}/{name}" for name in names)
    return (
        f"Put these files in a folder of your choice:\n{listed}\n"
        f"and name FOLDER by data_dir= (--data-dir on the command line) or {ENVIRONMENT_VARIABLE}."
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resume_download(url: str, part: Path, remote: RemoteFile, progress: bool | ProgressFn) -> None:
    """Download `url` to `part`, and continue a download that an earlier call began.

    It asks for the missing bytes only. A server that does not support ranges sends everything, and the
    file is written from the start. The content is not checked here.
    """
    import requests

    have = part.stat().st_size if part.exists() else 0
    if have == remote.num_bytes:
        return
    if have > remote.num_bytes:
        part.unlink()
        have = 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS) as reply:
        reply.raise_for_status()
        resumed = reply.status_code == 206
        done = have if resumed else 0
        with (
            part.open("ab" if resumed else "wb") as file,
            Ticker(remote.num_bytes, f"{remote.name} (bytes)", progress) as ticker,
        ):
            if done:
                ticker.tick(done)
            for chunk in reply.iter_content(CHUNK_BYTES):
                file.write(chunk)
                ticker.tick(len(chunk))
    have = part.stat().st_size
    if have < remote.num_bytes:
        raise requests.exceptions.ConnectionError(
            f"the connection ended after {have} of {remote.num_bytes} bytes"
        )


def fetch(
    remote: RemoteFile, subfolder: str, by_hand: str, progress: bool | ProgressFn = True
) -> Path:
    """The file in the user's cache, downloaded if it is missing. Its SHA-256 is checked each time.

    Tries the mirrors in turn. An interrupted download is kept under the name `*.part` and resumed by
    the next call. Only a checked file gets the final name.

    **Arguments:**

    - `remote`: the file.
    - `subfolder`: folder in the cache.
    - `by_hand`: advice for the error if the download fails.
    """
    try:
        import pooch
        import requests
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{remote.name}: downloading needs Pooch; pip install 'dualfluence[cli]'. "
            f"Or, without it: {by_hand}"
        ) from error

    folder = Path(pooch.os_cache("dualfluence")) / subfolder
    part = folder / f"{remote.name}.part"
    failures = []
    for mirror in remote.mirrors:
        try:
            path = pooch.retrieve(
                mirror + remote.name,
                known_hash=f"sha256:{remote.sha256}",
                fname=remote.name,
                path=folder,
                downloader=_keeping_part(part, remote, progress),
            )
        except (requests.exceptions.RequestException, ValueError) as error:
            failures.append(f"  {mirror}: {_short(error)}")
        else:
            return Path(path)
    tried = "\n".join(failures)
    raise FileNotFoundError(f"{remote.name} could not be downloaded.\n{tried}\n{by_hand}")


def _keeping_part(part: Path, remote: RemoteFile, progress: bool | ProgressFn) -> Any:
    # Any: Pooch's protocol for downloaders names the arguments otherwise than its own do.
    def download(url: str, output_file: Any, _pooch: Any) -> None:
        # Pooch deletes its temporary file when a download breaks off; `part` outlives that.
        # Handing it over only when whole means that a file with a wrong hash is not kept.
        resume_download(url, part, remote, progress)
        os.replace(part, output_file)

    return download


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
