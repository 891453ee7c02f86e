"""Serves an application on a port of this machine."""

import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """A server that says when it answers: after the application has started, its programs compiled."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def listen(command: str, host: str, port: int) -> socket.socket:
    """A socket bound to the address; 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"{command}: cannot listen at {host}:{port}: {error.strerror}. Try --port 0."
        ) from error
    return listener


def address(host: str, listener: socket.socket) -> str:
    """`http://host:port` of a socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def run(app: ASGIApp, listener: socket.socket, ready: Callable[[], Any]) -> None:
    """Serve until interrupted; `ready` is called once requests are answered."""
    # h11 bounds the size of headers, which come before anything that could be refused.
    config = uvicorn.Config(app, http="h11", log_level="warning")
    _Server(config, ready).run(sockets=[listener])
