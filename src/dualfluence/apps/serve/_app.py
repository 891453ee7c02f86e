"""The server's routes: JSON in, JSON out; nothing from the client names a file.

One thread changes the state, in the order of the requests. Reads run in other threads, on the model at
the time when they start. The programs of reads are compiled before the first request.
"""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..._version import __version__
from ...fitted._fitted import Fitted
from ...losses import SoftmaxCrossEntropy
from ...unlearning import Desk
from ...unlearning._desk import plain_certificate
from ._http import BODY_SECONDS, Gate, Refused, application, in_pool

MAX_BODY = 8 * 2**20
"""Bytes of a request's body."""

MAX_TAIL = 1000
"""Lines of the ledger in one answer."""

READERS = 2
"""Reads at the same time."""

FEWEST_ROWS = 8
"""Smallest number of queries in a read; missing ones repeat the last. Larger numbers are rounded up to
a power of two. Otherwise every number of queries would compile another program, which takes time and
memory."""


class Service:
    """A desk and the threads that serve it."""

    def __init__(self, desk: Desk, gate: Gate) -> None:
        self.desk, self.gate = desk, gate
        self.writer = ThreadPoolExecutor(1, "writer")
        self.readers = ThreadPoolExecutor(READERS, "reader")

    async def remove(self, request: Request) -> Response:
        body = await self.gate.read_object(request, {"ids", "until"})
        ids, until = _ids(body), _until(body)
        return await self._in_order(lambda: _shown(self.desk.remove(ids, until=until)))

    async def preview(self, request: Request) -> Response:
        # In order as well: a preview uses the writer's work space.
        body = await self.gate.read_object(request, {"ids", "until"})
        ids, until = _ids(body), _until(body)
        return await self._in_order(lambda: _shown(self.desk.preview(ids, until=until)))

    async def predict(self, request: Request) -> Response:
        body = await self.gate.read_object(request, {"x"})
        x = _array(body, "x")
        model = self.desk.model
        return await self._read(lambda: _predicted(model, x))

    async def attribute(self, request: Request) -> Response:
        body = await self.gate.read_object(request, {"x", "y"})
        x, y = _array(body, "x"), _array(body, "y", integers=True)
        model = self.desk.model
        return await self._read(lambda: _attributed(model, x, y))

    async def tail(self, request: Request) -> Response:
        self.gate.authorise(request)
        given = request.query_params.get("lines", "20")
        if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_TAIL):
            raise Refused(400, f"lines must be a whole number from 1 to {MAX_TAIL}")
        lines = self.desk.ledger.lines[-int(given) :]
        hidden = [{k: v for k, v in line.items() if k != "references"} for line in lines]
        return JSONResponse({"lines": hidden})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def _in_order(self, work: Callable[[], dict[str, Any]]) -> Response:
        return await self._run(self.writer, work)

    async def _read(self, work: Callable[[], dict[str, Any]]) -> Response:
        return await self._run(self.readers, work)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], dict[str, Any]]) -> Response:
        return JSONResponse(await in_pool(pool, work))

    def warm_up(self) -> None:
        """Compile the programs for reads of up to `FEWEST_ROWS` queries, with the first point of the
        model."""
        model = self.desk.model
        if model.data.form is not None:
            return  # features of several arrays, which no body holds
        first, target = np.asarray(model.data.x[:1], float), np.asarray(model.data.targets[:1])
        _predicted(model, first)
        if np.count_nonzero(model.data.sample_weights) > 1:
            is_class = isinstance(model.loss, SoftmaxCrossEntropy)
            _attributed(model, first, target.argmax(axis=1) if is_class else target)

    def stop(self) -> None:
        """Finish running requests, then release the ledger."""
        self.writer.shutdown(wait=True)
        self.readers.shutdown(wait=True)
        self.desk.close()


def make_app(
    desk: Desk,
    token: str,
    *,
    max_body: int = MAX_BODY,
    body_seconds: float = BODY_SECONDS,
    warm: bool = True,
) -> Starlette:
    """The server's application.

    Its start compiles the programs of reads, unless `warm` is false; the server answers afterwards.
    """
    service = Service(desk, Gate(token, max_body, body_seconds))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if warm:
            # Where a model has no attribution, each request for one is answered with the reason.
            with suppress(Refused):
                await in_pool(service.readers, service.warm_up)
        yield
        service.stop()

    routes = [
        Route("/remove", service.remove, methods=["POST"]),
        Route("/preview", service.preview, methods=["POST"]),
        Route("/predict", service.predict, methods=["POST"]),
        Route("/attribute", service.attribute, methods=["POST"]),
        Route("/ledger", service.tail, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
    ]
    return application(routes, lifespan)


def _predicted(model: Fitted, x: np.ndarray) -> dict[str, Any]:
    return {"outputs": np.asarray(model.predict(_padded(x)))[: len(x)].tolist()}


def _attributed(model: Fitted, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    # Where the numbers of rows differ, the library says so with the numbers that came.
    given = (_padded(x), _padded(y)) if len(x) == len(y) else (x, y)
    values = model.attribute(*given, progress=False).values
    return {"values": np.asarray(values)[: len(x)].tolist()}


def _padded(rows: np.ndarray) -> np.ndarray:
    full = max(FEWEST_ROWS, 1 << (len(rows) - 1).bit_length())
    return np.concatenate([rows, np.repeat(rows[-1:], full - len(rows), axis=0)])


def _shown(answer: Any) -> dict[str, Any]:
    return {
        "sequence": answer.sequence,
        "certificate": plain_certificate(answer.certificate),
        "how": answer.how,
        "model": answer.model_digest,
        "seconds": answer.seconds,
    }


def _ids(body: dict[str, Any]) -> list[Any]:
    ids = body.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(each) in (str, int) for each in ids):
        raise Refused(400, "ids must be a list of names, each text or a whole number")
    return ids


def _until(body: dict[str, Any]) -> float | None:
    until = body.get("until")
    if until is None:
        return None
    if type(until) not in (int, float) or not 0 < until < float("inf"):
        raise Refused(400, "until must be a positive distance")
    return float(until)


def _array(body: dict[str, Any], name: str, *, integers: bool = False) -> np.ndarray:
    try:
        array = np.asarray(body[name])
    except (KeyError, ValueError):
        raise Refused(400, f"{name} must be a list of rows of numbers of one length") from None
    if array.dtype.kind not in "if" or array.size == 0 or array.ndim == 0:
        raise Refused(400, f"{name} must be a list of rows of numbers of one length")
    return array if integers else array.astype(float)
