"""The server serves who has the token, refuses everything else, and survives being killed."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import serve_worker
from starlette.testclient import TestClient

import cases
import dualfluence as dfl
import problems
from dualfluence.apps.serve._app import make_app
from dualfluence.apps.serve._token import is_authorised, read_token
from dualfluence.unlearning._engine import Engine
from dualfluence.unlearning._payload import digest_of_model

pytestmark = pytest.mark.host

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def p():
    return problems.linear_problem(16, 2, 24, "softmax", ridge=0.1)


@pytest.fixture(scope="module")
def served(p, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    desk = dfl.unlearning.open(folder, cases.fit(p), ids=[f"p{i}" for i in range(16)])
    with TestClient(make_app(desk, TOKEN, max_body=10_000)) as client:
        yield client, desk, folder


def test_a_removal_is_answered_with_its_certificate(p, served):
    client, desk, _ = served
    seen = client.post("/preview", json={"ids": ["p3"]}, headers=BEARER).json()
    assert seen["sequence"] is None
    answer = client.post("/remove", json={"ids": ["p3"]}, headers=BEARER)
    assert answer.status_code == 200
    assert answer.json()["model"] == seen["model"] == desk.model_digest
    assert answer.json()["certificate"] == desk.ledger.lines[-1]["certificate"]
    tail = client.get("/ledger?lines=1", headers=BEARER).json()["lines"]
    assert tail[0]["hash"] == desk.ledger.last_hash
    assert "references" not in tail[0]


def test_reads_are_the_models(p, served):
    client, desk, _ = served
    got = client.post("/predict", json={"x": p.x_q.tolist()}, headers=BEARER).json()["outputs"]
    np.testing.assert_allclose(got, desk.model.predict(p.x_q), rtol=1e-12)
    body = {"x": p.x_q.tolist(), "y": [0, 1, 0]}
    got = client.post("/attribute", json=body, headers=BEARER).json()["values"]
    want = desk.model.attribute(p.x_q, np.array([0, 1, 0])).values
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert client.get("/health").json()["status"] == "ok"


REFUSED = {
    "no token": ({"json": {"ids": ["p5"]}}, 401),
    "wrong token": ({"json": {"ids": ["p5"]}, "headers": {"Authorization": "Bearer no"}}, 401),
    "basic": ({"json": {"ids": ["p5"]}, "headers": {"Authorization": f"Basic {TOKEN}"}}, 401),
    "oversized": ({"content": b"[" + b" " * 20_000 + b"]", "headers": BEARER}, 413),
    "not JSON": ({"content": b'{"ids": ["p5"', "headers": BEARER}, 400),
    "deep": ({"content": b"[" * 5000, "headers": BEARER}, 400),
    "not UTF-8": ({"content": b'{"ids": ["\xff"]}', "headers": BEARER}, 400),
    "NaN": ({"content": b'{"ids": ["p5"], "until": NaN}', "headers": BEARER}, 400),
    "an array": ({"json": ["p5"], "headers": BEARER}, 400),
    "another field": ({"json": {"ids": ["p5"], "path": "/etc"}, "headers": BEARER}, 400),
    "ids as text": ({"json": {"ids": "p5"}, "headers": BEARER}, 400),
    "ids of numbers with points": ({"json": {"ids": [5.0]}, "headers": BEARER}, 400),
    "ids that are lists": ({"json": {"ids": [["p5"]]}, "headers": BEARER}, 400),
    "ids that are true": ({"json": {"ids": [True]}, "headers": BEARER}, 400),
    "ids that are null": ({"json": {"ids": [None]}, "headers": BEARER}, 400),
    "no ids": ({"json": {"ids": []}, "headers": BEARER}, 400),
    "a path": ({"json": {"ids": ["../../etc/passwd"]}, "headers": BEARER}, 404),
    "a long name": ({"json": {"ids": ["x" * 5000]}, "headers": BEARER}, 400),
    "twice": ({"json": {"ids": ["p5", "p5"]}, "headers": BEARER}, 400),
    "until zero": ({"json": {"ids": ["p5"], "until": 0}, "headers": BEARER}, 400),
    "until text": ({"json": {"ids": ["p5"], "until": "1"}, "headers": BEARER}, 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(served, name):
    client, desk, folder = served
    options, status = REFUSED[name]
    before, raw = desk.model_digest, (folder / "ledger.jsonl").read_bytes()
    answer = client.post("/remove", **options)
    assert answer.status_code == status
    assert "error" in answer.json()
    assert desk.model_digest == before
    assert (folder / "ledger.jsonl").read_bytes() == raw


@pytest.mark.parametrize(
    "path", ["/../salt", "/ledger/../salt", "/%2e%2e/salt", "/ledger/salt", "/salt", "//etc/passwd"]
)
def test_no_path_reaches_a_file(served, path):
    client, _, folder = served
    answer = client.get(path, headers=BEARER)
    assert answer.status_code == 404
    assert (folder / "salt").read_text() not in answer.text


@pytest.mark.parametrize("lines", ["0", "-1", "x", "1e9", "99999999999", "²"])
def test_a_tail_is_of_a_sane_length(served, lines):
    client, _, _ = served
    assert client.get("/ledger", params={"lines": lines}, headers=BEARER).status_code == 400


def test_reads_need_the_token_too(served):
    client, _, _ = served
    assert client.get("/ledger").status_code == 401
    assert client.post("/predict", json={"x": [[1.0]]}).status_code == 401


def test_other_origins_are_not_let_in(served):
    client, _, _ = served
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = client.options("/remove", headers=headers)
    assert answer.status_code == 405
    both = [answer, client.get("/health", headers={"Origin": "https://example.org"})]
    for each in both:
        assert not [name for name in each.headers if name.startswith("access-control")]


def test_the_token_is_private_and_compared_whole(tmp_path):
    token = read_token(tmp_path / "token")
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(tmp_path / "token") == token
    assert is_authorised(f"Bearer {token}", token)
    for wrong in (None, "", token, f"Bearer {token}x", f"Bearer {token[:-1]}", "Bearer é"):
        assert not is_authorised(wrong, token)
    os.chmod(tmp_path / "token", 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(tmp_path / "token")


def test_a_first_start_that_is_killed_leaves_a_folder_that_starts(tmp_path, monkeypatch):
    (tmp_path / "token").touch()  # cut off between making the file and writing it
    token = read_token(tmp_path / "token")
    assert len(token) >= 32
    assert read_token(tmp_path / "token") == token
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(ValueError, match="cannot write"):
        read_token(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_concurrent_writers_are_served_one_after_another(p, tmp_path):
    desk = dfl.unlearning.open(tmp_path, cases.fit(p))
    with TestClient(make_app(desk, TOKEN)) as client:
        answers = []

        def send(i):
            answers.append(client.post("/remove", json={"ids": [i]}, headers=BEARER).json())

        threads = [threading.Thread(target=send, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(a["sequence"] for a in answers) == [2, 3, 4, 5, 6, 7]
        lines = desk.ledger.lines
        for answer in answers:
            assert lines[answer["sequence"] - 1]["model_after"] == answer["model"]
    assert dfl.unlearning.verify(tmp_path).valid


# Processes of their own.


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        root = Path(__file__).parents[1]
        environment = dict(
            os.environ, PYTHONPATH=f"{root.parent / 'src'}:{root}:{root / 'unlearning'}"
        )
        command = [sys.executable, serve_worker.__file__, str(folder), str(self.port)]
        self.process = subprocess.Popen(command, env=environment)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self._wait()
        token = (folder / "desk" / "token").read_text()
        self.client.headers["Authorization"] = f"Bearer {token}"

    def _wait(self):
        for _ in range(2400):
            if self.process.poll() is not None:
                raise RuntimeError("the server ended at its start")
            try:
                self.client.get("/health")
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server does not answer")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.terminate()
        return self.process.wait(60)


def run_kills(folder, kills, seed=0):
    """Removals until a kill, again and again; returns what was acknowledged, in order."""
    rng, acknowledged, point, stalls = np.random.default_rng(seed), [], 0, 0
    for turn in range(kills):
        # A fast server must not run out of points: each turn has its share, then asks for one again.
        last = (turn + 1) * 280 // kills
        server, so_far = Process(folder), len(acknowledged)
        # Longer where nothing was answered in time, or a long request would hold up the stream for good.
        delay = float(rng.uniform(0.02, 0.5)) * 2**stalls
        timer = threading.Timer(delay, server.kill)
        timer.start()
        try:
            while True:
                answer = server.client.post("/remove", json={"ids": [min(point, last)]})
                if answer.status_code == 200:
                    acknowledged.append(answer.json())
                else:
                    # Asked for again, or recorded by the process that was killed before it could say so.
                    assert "was removed" in answer.json()["error"]
                point = min(point, last) + 1
        except httpx.TransportError:
            timer.join()
            server.process.wait()
        stalls = stalls + 1 if len(acknowledged) == so_far else 0
    return acknowledged


def check_after_kills(folder, acknowledged):
    lines = [
        json.loads(line)
        for line in (folder / "desk" / "ledger.jsonl").read_bytes().split(b"\n")[:-1]
    ]
    for answer in acknowledged:
        assert lines[answer["sequence"] - 1]["model_after"] == answer["model"]
    fitted = dfl.load(folder / "model.npz", cases.model(serve_worker.problem()), progress=False)
    with dfl.unlearning.open(folder / "desk", fitted) as desk:
        last = desk.ledger.lines[-1]
        # Computed anew: to the bit what the server that was killed had.
        assert digest_of_model(desk.model, desk.points.root) == last["model_after"]
        assert not [note for note in desk.notes if "rounding" in note]
        assert len(acknowledged) <= len(desk.ledger.lines) - 1
    assert dfl.unlearning.verify(folder / "desk").valid


@pytest.mark.thorough
def test_kills_lose_nothing_that_was_acknowledged(tmp_path):
    check_after_kills(tmp_path, run_kills(tmp_path, 5))


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path):
    check_after_kills(tmp_path, run_kills(tmp_path, 100, seed=1))


def load(folder, clients, seconds):
    """Clients that remove and read at once; returns removals, reads by client, failures and counts."""
    server, answers, failures = Process(folder), [], []
    counts, reads = {"remove": 0, "predict": 0}, [[] for _ in range(clients)]
    p, end = serve_worker.problem(), time.monotonic() + seconds
    query = p.x_q.tolist()

    def work(k):
        mine = iter(range(k, 290, clients))
        with httpx.Client(
            base_url=server.client.base_url, headers=server.client.headers, timeout=120
        ) as c:
            while time.monotonic() < end:
                point = next(mine, None)
                if point is not None:
                    answer = c.post("/remove", json={"ids": [point]})
                    found = {**answer.json(), "point": point}
                    (answers if answer.status_code == 200 else failures).append(found)
                    counts["remove"] += 1
                read = c.post("/predict", json={"x": query})
                counts["predict"] += 1
                if read.status_code == 200:
                    reads[k].append(read.json()["outputs"])
                else:
                    failures.append(read.text)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.stop() in (0, -signal.SIGTERM)
    return answers, reads, failures, counts


def check_reads(folder, answers, reads):
    """Every read is that of a state of the stream, and no client sees an earlier one after a later."""
    p = serve_worker.problem()
    fitted = dfl.load(folder / "model.npz", cases.model(p), progress=False)
    engine, states = Engine(fitted), [np.asarray(fitted.predict(p.x_q))]
    for answer in sorted(answers, key=lambda each: each["sequence"]):
        engine.accept(engine.propose([dfl.Remove([answer["point"]])]))
        states.append(np.asarray(engine.fitted.predict(p.x_q)))
    apart = np.abs(np.diff(np.stack(states), axis=0)).max(axis=(1, 2))
    for mine in reads:
        off = np.abs(np.stack(states)[None] - np.asarray(mine)[:, None]).max(axis=(2, 3))
        # The same numbers but for the rounding of a product; states differ by a thousand times that.
        assert off.min(axis=1).max() <= 1e-12
        assert (np.diff(off.argmin(axis=1)) >= 0).all()
    assert apart.min() > 1e-9


def check_load(folder, clients, seconds):
    answers, reads, failures, counts = load(folder, clients, seconds)
    assert not failures
    check_reads(folder, answers, reads)
    assert counts["remove"] > 0
    assert counts["predict"] > 0
    check_after_kills(folder, answers)
    sequences = sorted(answer["sequence"] for answer in answers)
    assert sequences == list(range(2, 2 + len(answers)))
    print({name: count / seconds for name, count in counts.items()}, "per second")


@pytest.mark.thorough
def test_many_clients_at_once_are_served_without_error(tmp_path):
    check_load(tmp_path, 4, 3)


@pytest.mark.slow
def test_eight_clients_for_a_minute_are_served_without_error(tmp_path):
    check_load(tmp_path, 8, 60)
