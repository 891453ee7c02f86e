"""The page's routes: its files, and JSON behind a token. Nothing from the client names a file.

Every visitor has a separate session, named by the header `Visit`. One thread runs the edits and
previews of all visitors in the order in which they arrive. Another thread computes scores, so that an
edit need not wait for the scores of the model before it.
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
from ..serve._http import BODY_SECONDS, Gate, Refused, application, in_pool
from ._session import Session, Stale
from ._visitors import VisitEnded, Visitors

MAX_BODY = 2**20
"""Bytes of a request's body: the positions of all points that a page can show, several times over."""

HEADERS = {
    "Content-Security-Policy": SERVED,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

VISIT = "visit"
"""Header with the name of a visit, which the answer to `start` gives. Not a cookie: see `_run.serve`."""

Work = Callable[[], dict[str, Any]]


class Service:
    """The sessions and the threads that serve them."""

    def __init__(self, visitors: Visitors, gate: Gate) -> None:
        self.visitors, self.gate = visitors, gate
        self.editor = ThreadPoolExecutor(1, "editor")
        self.reader = ThreadPoolExecutor(1, "reader")

    async def start(self, request: Request) -> Response:
        """Continues a visit that is kept, or begins one. It reports if an earlier one has ended."""
        self.gate.authorise(request)
        visit, ended = request.headers.get(VISIT), None
        try:
            session = None if visit is None else self.visitors.find(visit)
        except VisitEnded as error:
            session, ended = None, str(error)
        if session is None:
            visit, session = self.visitors.begin()
        # The first state goes along: changes are shown against it, whatever was done before a reload.
        return await self._run(
            lambda: {
                "visit": visit,
                "ended": ended,
                "start": session.start,
                "first": session.state_at(0),
                "state": session.state(),
            }
        )

    async def scores(self, request: Request) -> Response:
        session, version = self._session(request), _version(request)
        return await self._run(lambda: session.scores(version), self.reader)

    async def groups(self, request: Request) -> Response:
        session, version = self._session(request), _version(request)
        return await self._run(lambda: session.groups(version), self.reader)

    async def certificate(self, request: Request) -> Response:
        return await self._run(self._session(request).certificate)

    async def page(self, request: Request) -> Response:
        session = self._session(request)
        text = await in_pool(self.editor, lambda: one_file(session.content()))
        return HTMLResponse(text, headers=HEADERS)

    async def remove(self, request: Request) -> Response:
        session, body = await self._read(request, {"points"})
        points = _points(body)
        return await self._run(lambda: session.remove(points))

    async def relabel(self, request: Request) -> Response:
        session, body = await self._read(request, {"points", "label"})
        points, label = _points(body), _number(body, "label")
        return await self._run(lambda: session.relabel(points, label))

    async def preview(self, request: Request) -> Response:
        session, body = await self._read(request, {"points"})
        points = _points(body)
        return await self._run(lambda: session.preview(points))

    async def ridge(self, request: Request) -> Response:
        session, body = await self._read(request, {"ridge"})
        ridge = float(_number(body, "ridge"))
        return await self._run(lambda: session.change_ridge(ridge))

    async def refine(self, request: Request) -> Response:
        session, _ = await self._read(request, set())
        return await self._run(session.refine)

    async def undo(self, request: Request) -> Response:
        session, _ = await self._read(request, set())
        return await self._run(session.undo)

    async def reset(self, request: Request) -> Response:
        session, _ = await self._read(request, set())
        return await self._run(session.reset)

    def _session(self, request: Request) -> Session:
        self.gate.authorise(request)
        visit = request.headers.get(VISIT)
        if visit is None:
            raise Refused(
                400, "the header Visit is required; the answer to /api/start names a visit"
            )
        try:
            return self.visitors.find(visit)
        except VisitEnded as error:
            raise Refused(410, str(error)) from None

    async def _read(self, request: Request, fields: set[str]) -> tuple[Session, dict[str, Any]]:
        session = self._session(request)
        return session, await self.gate.read_object(request, fields)

    async def _run(self, work: Work, pool: ThreadPoolExecutor | None = None) -> Response:
        try:
            return JSONResponse(await in_pool(pool or self.editor, work), headers=HEADERS)
        except Stale as error:
            raise Refused(409, str(error)) from error


def make_app(
    first: Session | Visitors,
    token: str,
    *,
    max_body: int = MAX_BODY,
    body_seconds: float = BODY_SECONDS,
    ahead: bool = False,
) -> Starlette:
    """The page's application.

    With `ahead`, the server computes the scores that every visitor sees first as soon as it starts.
    """
    visitors = first if isinstance(first, Visitors) else Visitors(first)
    service = Service(visitors, Gate(token, max_body, body_seconds))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if ahead:
            service.reader.submit(visitors.first.scores)
        yield
        for pool in (service.editor, service.reader):
            pool.shutdown(wait=True, cancel_futures=True)

    reads = (service.start, service.scores, service.groups, service.certificate, service.page)
    writes = (
        service.remove,
        service.relabel,
        service.preview,
        service.ridge,
        service.refine,
        service.undo,
        service.reset,
    )
    routes = [
        *(Route(f"/api/{read.__name__}", read, methods=["GET"]) for read in reads),
        *(Route(f"/api/{write.__name__}", write, methods=["POST"]) for write in writes),
        *(_file(name, text) for name, text in static_files().items()),
    ]
    app = application(routes, lifespan)
    app.state.visitors = visitors
    return app


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


def _number(body: dict[str, Any], name: str) -> int | float:
    number: Any = body.get(name)
    if type(number) not in (int, float) or not abs(number) <= sys.float_info.max:
        raise Refused(400, f"{name} must be a number")
    return number


def _version(request: Request) -> int | None:
    given = request.query_params.get("version")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise Refused(400, "version must be a whole number")
    return int(given)
