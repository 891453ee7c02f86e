"""A session at a port of this machine, or written to a file."""

import ipaddress
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

from ..._support.files import write_atomically
from ..page._write import one_file
from ._session import Session


def save_page(session: Session, path: Path) -> int:
    """Write the page as one file; returns its size in bytes."""
    page = one_file(session.content()).encode()
    write_atomically(path, lambda file: file.write(page))
    return len(page)


def serve(
    session: Session, host: str, port: int, *, browser: bool, tell: Callable[[str], None]
) -> None:
    """Serve the page until interrupted. The token is new at every start and in the link alone.

    It stands behind `#`, which browsers send to no server and to no other page; the page takes it from
    there and sends it as a header. No cookie: another page cannot make the browser send it.
    """
    import uvicorn

    from ._app import make_app

    token = secrets.token_urlsafe(32)
    listener = _listen(host, port)
    link = f"http://{_bracketed(host)}:{listener.getsockname()[1]}/#{token}"
    tell(f"open {link}")
    if not _is_loopback(host):
        tell(f"note: {host} is not this machine alone; whoever has the link can edit the session")
    app = make_app(session, token)
    if browser:
        threading.Timer(0.5, webbrowser.open, [link]).start()
    config = uvicorn.Config(app, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"explore: cannot listen at {host}:{port}: {error.strerror}. Try --port 0."
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
