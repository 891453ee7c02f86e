"""Files that are written completely or not at all, and plain words for errors of the system."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: no lock, and temporary files of a killed process stay
    fcntl = None  # type: ignore[assignment]

REASONS = {
    errno.ENOSPC: "the disk is full; free some space or give another path",
    errno.EDQUOT: "the disk quota is used up; free some space or give another path",
    errno.EFBIG: "the file is larger than this process or file system allows; give another path",
    errno.EROFS: "the file system is read-only; give another path",
    errno.EACCES: "you may not write there; give another path or change its permissions",
    errno.EPERM: "you may not write there; give another path or change its permissions",
    errno.ENOTDIR: "part of the path is a file, not a folder; give another path",
    errno.EEXIST: "part of the path is a file, not a folder; give another path",
    errno.EISDIR: "it is a folder; give the name of a file",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
    errno.EIO: "the disk is failing; give another path",
}
"""The meaning of the system's errors when a file is written."""

TEMPORARY = ".tmp"


class FileError(OSError, ValueError):
    """A file is damaged, missing or of another kind, or it cannot be written. The message says what to do.

    Both an `OSError` and a `ValueError`, as `io.UnsupportedOperation` is: a bad file is a bad input.
    """


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], object], *, private: bool = False
) -> None:
    """Write to a temporary name beside `path`, then rename; nothing is left after a failure.

    Errors of the system become a `FileError`. The temporary file is locked while it is written, so that
    `remove_stale` can distinguish a file in use from one that a killed process left. A `private` file
    is readable by its owner alone, at every moment.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file, name = _temporary(path)
        try:
            with file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                if not private:  # as mkstemp made it
                    os.chmod(name, 0o666 & ~_umask())
                if fcntl is None:
                    file.close()  # Windows renames closed files only
                os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except Exception as error:
        cause = system_error(error)
        if cause is None:
            raise
        raise FileError(f"cannot write {path}: {in_words(cause)}.") from error


def write_whole(path: Path, content: bytes | str, *, private: bool = False) -> None:
    """All of `content`, or the file as it was."""
    raw = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda file: file.write(raw), private=private)


def check_writable(path: Path) -> None:
    """Raise, before any work, unless a file can be written at `path`; makes its folder."""
    write_atomically(path.parent / f".{path.name}.probe", lambda file: None)
    (path.parent / f".{path.name}.probe").unlink()


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Delete temporary files (of the file `name`) that a killed process left, but not those in use."""
    start = "" if name is None else escape(name)
    for path in folder.glob(f".{start}*{TEMPORARY}"):
        with suppress(OSError), open(path, "rb") as file:
            if _try_lock(file):
                path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, busy: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock file `path`; the system releases it when this process ends, also if it is killed.

    `busy` is called once with the number of the process that holds it, before waiting for that
    process to finish; it may raise instead.
    """
    with open(path, "a+b") as file:
        with suppress(LocksUnknown):
            if not _try_lock(file):
                file.seek(0)
                busy(file.read(32).decode("ascii", "replace").strip() or "unknown")
                _try_lock(file, wait=True)
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield


def system_error(error: BaseException | None) -> OSError | None:
    """The error of the system that caused `error`, if there is one.

    Writers of archives raise another error when they cannot be closed properly.
    """
    while error is not None:
        if isinstance(error, FileError):
            return None
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def in_words(error: OSError) -> str:
    """The error of the system in plain words."""
    return REASONS.get(error.errno or 0, str(error))


def _temporary(path: Path) -> tuple[IO[bytes], str]:
    """A new locked file beside `path`."""
    while True:
        handle, name = tempfile.mkstemp(TEMPORARY, f".{path.name}.", path.parent)
        file = os.fdopen(handle, "wb")
        with suppress(LocksUnknown):
            _try_lock(file)
        # Between the two calls somebody who cleans up may have taken it for a stale one.
        if os.path.exists(name):
            return file, name
        file.close()


class LocksUnknown(OSError):
    """The system or the file system has no locks."""


def _try_lock(file: IO[bytes], wait: bool = False) -> bool:
    if fcntl is None:
        raise LocksUnknown
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocksUnknown from error
    return True


def _umask() -> int:
    """mkstemp is private to the user; the result gets the permissions of an ordinary file."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
