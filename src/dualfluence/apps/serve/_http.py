"""Rules of every server: the token, limits of size and time, and the form of a refusal."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from ...problem._certificate import NotConverged
from ...unlearning import LedgerError
from ._token import is_authorised

Result = TypeVar("Result")

BODY_SECONDS = 30.0
"""Time for a body to arrive. Twice as much lets a slow client hold a connection twice as long."""


class Refused(Exception):
    """A request that is refused, with its status and the reason in words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class CloseUnread:
    """Closes the connection after an answer that came before the request's body was read to its end.

    A refusal does not need the body, and without the token the server does not read it. A server that
    keeps the connection would nevertheless have to read the rest of the body, to find the next request
    after it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = scope["type"] == "http" and _has_body(scope)

        async def receive_and_note() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                closed = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": closed}
            await send(message)

        await self.app(scope, receive_and_note, send_and_close)


class Gate(NamedTuple):
    """What a request has to pass: the token, and the limits of its body.

    - `token`: the bearer token.
    - `max_body`: bytes of the body.
    - `seconds`: time for all of the body to arrive.
    """

    token: str
    max_body: int
    seconds: float = BODY_SECONDS

    def authorise(self, request: Request) -> None:
        """Refuse a request without the token. Nothing of its body has been read by then."""
        if not is_authorised(request.headers.get("authorization"), self.token):
            raise Refused(401, "a bearer token is required")

    async def read_object(self, request: Request, fields: set[str]) -> dict[str, Any]:
        """The JSON object in the body, within its limits, with known fields only, each of them once."""
        self.authorise(request)
        try:
            async with asyncio.timeout(self.seconds):
                raw = await _read(request, self.max_body)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.seconds:g} s") from None
        return _object(raw, fields)


def _object(raw: bytes, fields: set[str]) -> dict[str, Any]:
    try:
        body = json.loads(raw, parse_constant=_no_constants, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(body, dict) or not set(body) <= fields:
        raise Refused(400, f"expected an object with the fields {', '.join(sorted(fields))}")
    return body


async def in_pool(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Run work in a thread of the pool; its errors are returned to the client in words."""
    loop = asyncio.get_running_loop()
    try:
        # A client that goes away does not stop work that has begun.
        return await asyncio.shield(loop.run_in_executor(pool, work))
    except LedgerError as error:
        raise Refused(507, str(error)) from error
    except KeyError as error:
        raise Refused(404, str(error.args[0])) from error
    except NotConverged as error:
        raise Refused(422, str(error)) from error
    except (ValueError, TypeError) as error:
        raise Refused(400, str(error)) from error


async def _read(request: Request, size: int) -> bytes:
    too_large = Refused(413, f"the body may have {size} bytes")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > size:
        raise too_large
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > size:
            raise too_large
    return bytes(raw)


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its fields. JSON leaves open which of two equal ones counts, so neither does."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused(400, f"the field {twice[:50]!r} is in the body twice; send it once")
    return found


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse({"error": error.reason}, error.status, headers)


async def _failed(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": "no such thing here" if status == 404 else "refused"}, status)


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


HANDLERS: Any = {Refused: _refused, HTTPException: _failed, Exception: _failed}
"""Answers for refused requests and for errors; no answer names a file."""


def application(routes: list[Route], lifespan: Lifespan[Starlette]) -> Starlette:
    """An application with these routes. No header allows other origins: browsers keep other pages out."""
    middleware = [Middleware(CloseUnread)]
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=HANDLERS, middleware=middleware
    )
