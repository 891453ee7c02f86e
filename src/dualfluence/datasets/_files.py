"""The files of a data set: in the user's folder, or a checked download in the cache."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._support.options import ProgressFn, Ticker

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
    """Pooch's own download, which goes on from what an interrupted call has left in `part`."""
    import pooch
    import requests

    size = lambda: part.stat().st_size if part.exists() else 0  # noqa: E731

    # Any: Pooch's protocol for downloaders names the arguments otherwise than its own do.
    def download(url: str, output_file: Any, asking: Any) -> None:
        # Pooch deletes its temporary file when a download breaks off; `part` outlives that.
        # Handing it over only when whole means that a file with a wrong hash is not kept.
        if size() > remote.num_bytes:
            part.unlink()
        have = size()
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        if have < remote.num_bytes:
            label = f"{remote.name} (bytes)"
            try:
                with part.open("ab") as file, Ticker(remote.num_bytes, label, progress) as ticker:
                    bar: Any = _Bar(ticker, remote.num_bytes, have)
                    rest = pooch.HTTPDownloader(
                        bar, CHUNK_BYTES, headers=headers, timeout=TIMEOUT_SECONDS
                    )
                    rest(url, file, asking)
            finally:
                if not size():
                    part.unlink()
        if have and size() > remote.num_bytes:  # a server that knows no ranges has sent all of it
            return download(url, output_file, asking)
        if size() != remote.num_bytes:
            raise requests.exceptions.ConnectionError(
                f"the connection ended after {size()} of {remote.num_bytes} bytes"
            )
        os.replace(part, output_file)

    return download


class _Bar:
    """A ticker as what Pooch calls a progress bar; it counts a last, shorter piece in full."""

    def __init__(self, ticker: Ticker, total: int, done: int) -> None:
        self.ticker, self.left = ticker, total
        self.update(done)

    def update(self, amount: int) -> None:
        amount = min(amount, self.left)
        self.left -= amount
        self.ticker.tick(amount)

    def reset(self) -> None:
        pass

    close = reset


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
