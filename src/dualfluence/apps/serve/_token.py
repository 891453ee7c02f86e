"""The bearer token of a server, made at its first start and readable only by its owner."""

import hmac
import os
import secrets
from pathlib import Path

from ..._support.files import FileError


def read_token(path: Path) -> str:
    """The token in `path`, which is made if it does not exist."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _checked(path)
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
    return token


def _checked(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise FileError(f"{path}: others can read the token. Run: chmod 600 {path}")
    token = path.read_text("ascii").strip()
    if len(token) < 32:
        raise FileError(
            f"{path}: not a token of this server. Delete it, and a new one will be made."
        )
    return token


def is_authorised(header: str | None, token: str) -> bool:
    """Whether the header carries the token; the comparison always takes the same time."""
    given = (header or "").encode("utf-8", "replace")
    return hmac.compare_digest(given, f"Bearer {token}".encode())
