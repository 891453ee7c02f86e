"""What a request's body may be: how large, how slow, and each of its fields once."""

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uvicorn
from starlette.testclient import TestClient

import cases
import dualfluence as dfl
import problems
from dualfluence.apps.explore._app import make_app as make_page
from dualfluence.apps.serve._app import make_app
from dualfluence.fitted._fitted import Fitted
from dualfluence.losses import SoftmaxCrossEntropy
from dualfluence.problem._objective import TrainingSet

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class NoDesk(dfl.unlearning.Desk):
    """A desk that no request reaches."""

    def __init__(self):
        pass

    def close(self):
        pass


def app(**options):
    return make_app(NoDesk(), TOKEN, **{"max_body": 1000, "warm": False} | options)


def ask(app, pieces, headers=(), path="/remove"):
    """One request given to the application itself; returns status, headers, answer and pieces taken."""
    left, taken, sent = list(pieces), [], []

    async def receive():
        if not left:
            await asyncio.Event().wait()  # a client that sends no more and stays
        taken.append(left.pop(0))
        return {"type": "http.request", "body": taken[-1], "more_body": bool(left) or "…" in path}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path.rstrip("…"),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(k.lower().encode(), v.encode()) for k, v in dict(headers).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    answer = json.loads(b"".join(m.get("body", b"") for m in sent[1:]))
    return sent[0]["status"], dict(sent[0]["headers"]), answer, taken


@pytest.mark.parametrize(
    "body",
    [
        b'{"ids": ["p5"], "ids": ["p6"]}',
        b'{"ids": ["p5"], "until": 1, "ids": ["p5"]}',
        b'{"until": 1, "\\u0069ds": ["p5"], "ids": ["p5"]}',
        b'{"ids": [{"ids": 1, "ids": 2}]}',
    ],
)
def test_a_field_that_comes_twice_is_refused(body):
    status, _, answer, _ = ask(app(), [body], BEARER)
    assert status == 400
    assert "'ids' is in the body twice" in answer["error"]


def test_without_the_token_nothing_of_the_body_is_read():
    headers = {"Content-Length": str(10**9)}
    status, sent, _, taken = ask(app(), [b"x" * 10_000] * 100, headers)
    assert status == 401
    assert taken == []
    assert sent[b"connection"] == b"close"  # or the server would read on to the next request


def test_a_body_that_says_it_is_too_large_is_not_read():
    headers = BEARER | {"Content-Length": "1001"}
    status, sent, answer, taken = ask(app(), [b"x" * 1001], headers)
    assert (status, taken) == (413, [])
    assert "1000 bytes" in answer["error"]
    assert sent[b"connection"] == b"close"


def test_a_body_that_does_not_say_so_is_read_to_the_limit():
    headers = BEARER | {"Transfer-Encoding": "chunked"}
    status, sent, _, taken = ask(app(), [b"x" * 400] * 10, headers)
    assert (status, len(taken)) == (413, 3)
    assert sent[b"connection"] == b"close"


@pytest.mark.parametrize("pieces", [[], [b'{"ids"']])
def test_a_body_that_does_not_arrive_in_time_is_refused(pieces):
    start = time.monotonic()
    headers = BEARER | {"Content-Length": "40"}
    status, sent, answer, _ = ask(app(body_seconds=0.1), pieces, headers, "/remove…")
    assert status == 408
    assert "within 0.1 s" in answer["error"]
    assert sent[b"connection"] == b"close"
    assert time.monotonic() - start < 10


def test_a_connection_stays_open_after_an_ordinary_refusal():
    body = b'{"ids": []}'
    headers = BEARER | {"Content-Length": str(len(body))}
    status, sent, _, _ = ask(app(), [body], headers)
    assert status == 400
    assert b"connection" not in sent


@pytest.mark.thorough
def test_the_page_has_the_same_limits(first):
    page = make_page(first, TOKEN, max_body=1000, body_seconds=0.1)
    assert ask(page, [b"x"] * 10, path="/api/remove")[0] == 401
    visit = {"Visit": page.state.visitors.begin()[0]}
    late = BEARER | visit | {"Content-Length": "40"}
    assert ask(page, [b"{"], late, "/api/remove…")[0] == 408
    twice = b'{"points": [1], "points": [2]}'
    assert ask(page, [twice], BEARER | visit, "/api/remove")[0] == 400


def test_a_server_takes_in_little_of_a_body_that_it_refuses():
    """Over a real connection: 64 MB offered without the token, of which the buffers hold a few."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app(), http="h11", log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    offered, piece = 64 * 2**20, b"x" * 2**16
    taken = 0
    try:
        while not server.started:
            time.sleep(0.01)
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            head = f"POST /remove HTTP/1.1\r\nHost: here\r\nContent-Length: {offered}\r\n\r\n"
            client.sendall(head.encode())
            try:
                while taken < offered:
                    taken += client.send(piece)
            except OSError:
                pass  # closed by the server
    finally:
        server.should_exit = True
        thread.join()
    assert taken < offered / 4


class Recorder(Fitted):
    """A model that notes how many queries it is asked for at a time."""

    def __init__(self, data, loss):
        for name, value in {"data": data, "loss": loss, "asked": []}.items():
            object.__setattr__(self, name, value)

    def predict(self, x):
        self.asked.append(("predict", len(x)))
        return x[:, :2]

    def attribute(self, x, y, **_):
        self.asked.append(("attribute", len(x), len(y), y.dtype.kind))
        return SimpleNamespace(values=np.asarray(x)[:, :3])


def test_reads_of_a_few_queries_are_those_of_the_start():
    """One size of programs, run once before the server answers."""
    data = TrainingSet(jnp.ones((6, 4)), jax.nn.one_hot(jnp.arange(6) % 2, 2), np.ones(6))
    model = Recorder(data, SoftmaxCrossEntropy())
    desk = NoDesk()
    desk.engine = SimpleNamespace(fitted=model)
    with TestClient(make_app(desk, TOKEN)) as client:
        warm = [*model.asked]
        assert warm == [("predict", 8), ("attribute", 8, 8, "i")]
        for rows, size in ((1, 8), (8, 8), (9, 16), (33, 64)):
            x = np.arange(4.0 * rows).reshape(rows, 4)
            body = {"x": x.tolist(), "y": [1] * rows}
            model.asked.clear()
            got = client.post("/predict", json={"x": body["x"]}, headers=BEARER).json()
            np.testing.assert_array_equal(got["outputs"], x[:, :2])
            got = client.post("/attribute", json=body, headers=BEARER).json()
            np.testing.assert_array_equal(got["values"], x[:, :3])
            assert model.asked == [("predict", size), ("attribute", size, size, "i")]
            assert (model.asked == warm) == (rows <= 8)


def test_a_model_without_attributions_is_served_all_the_same(monkeypatch):
    def refused(self, x, y, **_):
        raise ValueError("attribute: this kernel has none")

    monkeypatch.setattr(Recorder, "attribute", refused)
    data = TrainingSet(jnp.ones((6, 4)), jax.nn.one_hot(jnp.arange(6) % 2, 2), np.ones(6))
    desk = NoDesk()
    desk.engine = SimpleNamespace(fitted=Recorder(data, SoftmaxCrossEntropy()))
    with TestClient(make_app(desk, TOKEN)) as client:
        body = {"x": [[1.0] * 4], "y": [0]}
        answer = client.post("/attribute", json=body, headers=BEARER)
        assert answer.status_code == 400
        assert "has none" in answer.json()["error"]
        assert client.post("/predict", json={"x": body["x"]}, headers=BEARER).status_code == 200


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    p = problems.linear_problem(16, 2, 24, "softmax", ridge=0.1)
    with dfl.unlearning.open(tmp_path_factory.mktemp("desk"), cases.fit(p)) as desk:
        yield desk, p


@pytest.mark.thorough
def test_the_first_attribution_finds_its_programs_compiled(desk, compiled):
    desk, p = desk
    assert isinstance(desk.model.loss, SoftmaxCrossEntropy)
    with TestClient(make_app(desk, TOKEN)) as client:
        before = compiled()
        for rows in (1, 3, 2):
            body = {"x": p.x_q[:rows].tolist(), "y": [0, 1, 0][:rows]}
            got = client.post("/attribute", json=body, headers=BEARER).json()["values"]
            read = client.post("/predict", json={"x": body["x"]}, headers=BEARER).json()
            assert compiled() == before
            want = desk.model.attribute(p.x_q[:rows], np.array(body["y"])).values
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(read["outputs"], desk.model.predict(p.x_q[:rows]))
            before = compiled()  # of the truth
        uneven = {"x": p.x_q.tolist(), "y": [0]}
        answer = client.post("/attribute", json=uneven, headers=BEARER)
        assert answer.status_code == 400
