"""The bearer token of a server, made at its first start and readable only by its owner."""

import hmac
import secrets
from pathlib import Path

from ..._support.files import FileError, write_atomically


def read_token(path: Path) -> str:
    """The token in `path`. It is made if there is none or the file is empty, as after a kill."""
    if not path.exists() or path.stat().st_size == 0:
        token = secrets.token_urlsafe(32).encode("ascii")
        write_atomically(path, lambda file: file.write(token), private=True)
    return _checked(
        path
    )  # read again: of two servers that start at once both know the token that stays


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
