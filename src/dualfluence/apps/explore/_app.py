"""The page's routes: its files, and JSON behind a token. Nothing from the client names a file.

Edits and previews go through one thread, in the order in which they came; scores go through another, so
that an edit need not wait for those of the model before it.
"""

import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..page._write import SERVED, TYPES, one_file, static_files
from ..serve._http import HANDLERS, Refused, authorise, in_pool, read_object
from ._session import Session, Stale

MAX_BODY = 2**20
"""Bytes of a request's body: the positions of all points that a page can show, several times over."""

HEADERS = {
    "Content-Security-Policy": SERVED,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Work = Callable[[], dict[str, Any]]


class Service:
    """A session and the threads that serve it."""

    def __init__(self, session: Session, token: str, max_body: int) -> None:
        self.session, self.token, self.max_body = session, token, max_body
        self.editor = ThreadPoolExecutor(1, "editor")
        self.reader = ThreadPoolExecutor(1, "reader")

    async def start(self, request: Request) -> Response:
        authorise(request, self.token)
        # The first state goes along: changes are shown against it, whatever was done before a reload.
        return await self._run(
            lambda: {
                "start": self.session.start,
                "first": self.session.state_at(0),
                "state": self.session.state(),
            }
        )

    async def scores(self, request: Request) -> Response:
        authorise(request, self.token)
        version = _version(request)
        return await self._run(lambda: self.session.scores(version), self.reader)

    async def groups(self, request: Request) -> Response:
        authorise(request, self.token)
        version = _version(request)
        return await self._run(lambda: self.session.groups(version), self.reader)

    async def certificate(self, request: Request) -> Response:
        authorise(request, self.token)
        return await self._run(self.session.certificate)

    async def page(self, request: Request) -> Response:
        authorise(request, self.token)
        text = await in_pool(self.editor, lambda: one_file(self.session.content()))
        return HTMLResponse(text, headers=HEADERS)

    async def remove(self, request: Request) -> Response:
        points = _points(await self._body(request, {"points"}))
        return await self._run(lambda: self.session.remove(points))

    async def relabel(self, request: Request) -> Response:
        body = await self._body(request, {"points", "label"})
        points, label = _points(body), _label(body)
        return await self._run(lambda: self.session.relabel(points, label))

    async def preview(self, request: Request) -> Response:
        points = _points(await self._body(request, {"points"}))
        return await self._run(lambda: self.session.preview(points))

    async def refine(self, request: Request) -> Response:
        await self._body(request, set())
        return await self._run(self.session.refine)

    async def undo(self, request: Request) -> Response:
        await self._body(request, set())
        return await self._run(self.session.undo)

    async def reset(self, request: Request) -> Response:
        await self._body(request, set())
        return await self._run(self.session.reset)

    async def _body(self, request: Request, fields: set[str]) -> dict[str, Any]:
        authorise(request, self.token)
        return await read_object(request, fields, self.max_body)

    async def _run(self, work: Work, pool: ThreadPoolExecutor | None = None) -> Response:
        try:
            return JSONResponse(await in_pool(pool or self.editor, work), headers=HEADERS)
        except Stale as error:
            raise Refused(409, str(error)) from error


def make_app(session: Session, token: str, *, max_body: int = MAX_BODY) -> Starlette:
    """The page's application. No header allows other origins: browsers keep other pages out."""
    service = Service(session, token, max_body)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for pool in (service.editor, service.reader):
            pool.shutdown(wait=True, cancel_futures=True)

    reads = (service.start, service.scores, service.groups, service.certificate, service.page)
    writes = (
        service.remove,
        service.relabel,
        service.preview,
        service.refine,
        service.undo,
        service.reset,
    )
    routes = [
        *(Route(f"/api/{read.__name__}", read, methods=["GET"]) for read in reads),
        *(Route(f"/api/{write.__name__}", write, methods=["POST"]) for write in writes),
        *(_file(name, text) for name, text in static_files().items()),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS)


def _file(name: str, text: str) -> Route:
    """A route for one file; a page without data holds nothing that needs a token."""
    kind = TYPES[name.rpartition(".")[2]]

    async def serve(_: Request) -> Response:
        return Response(text, media_type=kind, headers=HEADERS)

    return Route("/" if name == "index.html" else f"/{name}", serve, methods=["GET"])


def _points(body: dict[str, Any]) -> list[int]:
    points = body.get("points")
    if not isinstance(points, list) or not points or not all(type(p) is int for p in points):
        raise Refused(400, "points must be a list of positions, each a whole number")
    return points


def _label(body: dict[str, Any]) -> int | float:
    label: Any = body.get("label")
    if type(label) not in (int, float) or not abs(label) <= sys.float_info.max:
        raise Refused(400, "label must be a number")
    return label


def _version(request: Request) -> int | None:
    given = request.query_params.get("version")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise Refused(400, "version must be a whole number")
    return int(given)
