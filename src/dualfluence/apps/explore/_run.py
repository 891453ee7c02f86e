"""A session on a port of this machine, or written to a file."""

import ipaddress
import secrets
import webbrowser
from collections.abc import Callable
from pathlib import Path

from ..._support.files import write_whole
from ..page._write import one_file
from ._session import Session


def save_page(session: Session, path: Path) -> int:
    """Write the page as one file; returns its size in bytes."""
    write_whole(path, one_file(session.content()))
    return path.stat().st_size


def serve(
    session: Session, host: str, port: int, *, browser: bool, tell: Callable[[str], None]
) -> None:
    """Serve the page until interrupted. The token is new at every start, and only the link contains it.

    It comes after the `#` of the link, a part that browsers do not send to any server or other page.
    The page reads it there and sends it as a header. There is no cookie, so another page cannot make
    the browser send the token.
    """
    from ..serve._run import address, listen, run
    from ._app import make_app

    token = secrets.token_urlsafe(32)
    listener = listen("explore", host, port)
    link = f"{address(host, listener)}/#{token}"

    def ready() -> None:
        tell(f"open {link}")
        if not _is_loopback(host):
            tell(
                f"note: {host} is reachable from other machines; anybody who has the link can "
                "use the page"
            )
        if browser:
            webbrowser.open(link)

    run(make_app(session, token, ahead=True), listener, ready)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
