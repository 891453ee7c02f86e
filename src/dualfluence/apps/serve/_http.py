"""Manners of every server here: who may ask, how much, and what a refusal looks like."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...dual._record import NotConverged
from ...unlearning import LedgerError
from ._token import is_authorised

Result = TypeVar("Result")


class Refused(Exception):
    """A request that is not served, with its status and the reason in words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def authorise(request: Request, token: str) -> None:
    """Refuse a request without the bearer token."""
    if not is_authorised(request.headers.get("authorization"), token):
        raise Refused(401, "a bearer token is required")


async def read_object(request: Request, fields: set[str], max_body: int) -> dict[str, Any]:
    """The JSON object in the body, no larger than allowed, with known fields only."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_body:
            raise Refused(413, f"the body may have {max_body} bytes")
    try:
        body = json.loads(bytes(raw), parse_constant=_no_constants)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(body, dict) or not set(body) <= fields:
        raise Refused(400, f"expected an object with the fields {', '.join(sorted(fields))}")
    return body


async def in_pool(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Run work in a thread of the pool; what it refuses is told to the client in words."""
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
"""Answers to what is refused and to what fails; nothing in them names a file."""
