"""The server of the page: who may ask for what, and what is refused."""

import jax
import pytest
from starlette.testclient import TestClient

from dualfluence.apps.explore._app import make_app
from dualfluence.apps.explore._visitors import VisitEnded, Visitors
from dualfluence.apps.page._write import static_files

pytestmark = pytest.mark.host

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}
READS = ("start", "scores", "groups", "certificate", "page")
WRITES = ("remove", "relabel", "preview", "ridge", "refine", "undo", "reset")


@pytest.fixture
def visitors(first):
    return Visitors(first)


@pytest.fixture
def client(visitors):
    with TestClient(make_app(visitors, TOKEN, max_body=1000)) as client:
        yield client


@pytest.fixture
def session(client, visitors):
    """The one of a visitor who has come, whose name is in the client's headers from then on."""
    client.headers["Visit"] = client.get("/api/start", headers=BEARER).json()["visit"]
    return visitors.find(client.headers["Visit"])


def post(client, path, body):
    return client.post(f"/api/{path}", json=body, headers=BEARER)


def test_the_routes_give_what_the_session_says(client, session):
    start = client.get("/api/start", headers=BEARER).json()
    assert start["visit"] == client.headers["visit"]
    assert start["ended"] is None
    assert start["first"] == start["state"]
    state = post(client, "remove", {"points": [3, 17]}).json()
    assert state == session.state()
    assert state["removed"] == [3, 17]
    assert post(client, "relabel", {"points": [4], "label": 2}).json()["labels"][4] == 2
    assert post(client, "refine", {}).json()["history"][-1]["what"] == "step"
    preview = post(client, "preview", {"points": [8]}).json()
    assert preview["losses"] == session.preview([8])["losses"]
    ridge = start["start"]["ridges"][-1]
    assert post(client, "ridge", {"ridge": ridge}).json()["ridge"] == ridge
    post(client, "undo", {})
    post(client, "undo", {})
    post(client, "undo", {})
    assert post(client, "undo", {}).json() == start["state"]
    post(client, "remove", {"points": [3]})
    assert post(client, "reset", {}).json() == start["state"]
    assert client.get("/api/scores", headers=BEARER).json() == session.scores()
    assert client.get("/api/groups", headers=BEARER).json() == session.groups()
    certificate = client.get("/api/certificate", headers=BEARER).json()
    assert certificate["certificate"] == session.certificate()["certificate"]


@pytest.mark.parametrize("header", [None, "", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"])
def test_nothing_is_told_or_done_without_the_token(client, session, header):
    headers = {} if header is None else {"Authorization": header}
    before = session.state()
    for path in READS:
        assert client.get(f"/api/{path}", headers=headers).status_code == 401
    for path in WRITES:
        answer = client.post(f"/api/{path}", json={"points": [0], "label": 1}, headers=headers)
        assert answer.status_code == 401
    assert session.state() == before


def test_a_cookie_or_an_address_is_no_token(client):
    assert client.get(f"/api/start?token={TOKEN}").status_code == 401
    client.cookies.set("token", TOKEN)
    assert client.get("/api/start").status_code == 401


REFUSED = {
    "too large": (b'{"points": [' + b"1," * 600 + b"2]}", 413),
    "not JSON": (b'{"points": [5', 400),
    "deep": (b"[" * 900, 400),
    "not UTF-8": (b'{"points": ["\xff"]}', 400),
    "an array": (b"[1]", 400),
    "another field": (b'{"points": [1], "path": "/etc"}', 400),
    "no points": (b"{}", 400),
    "empty": (b'{"points": []}', 400),
    "text": (b'{"points": ["1"]}', 400),
    "true": (b'{"points": [true]}', 400),
    "halves": (b'{"points": [1.5]}', 400),
    "out of range": (b'{"points": [40]}', 400),
    "negative": (b'{"points": [-1]}', 400),
    "twice": (b'{"points": [1, 1]}', 400),
    "huge": (b'{"points": [99999999999999999999999]}', 400),
    "NaN": (b'{"points": [NaN]}', 400),
    "one field twice": (b'{"points": [1], "points": [2]}', 400),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["remove", "preview"])
def test_what_is_refused_changes_nothing(client, session, path, name):
    body, status = REFUSED[name]
    before = session.state()
    answer = client.post(f"/api/{path}", content=body, headers=BEARER)
    assert answer.status_code == status
    assert answer.json()["error"]
    assert session.state() == before


@pytest.mark.parametrize("label", [10, -1, 1.5, "3", None, True, 10**400], ids=lambda v: str(v)[:4])
def test_bad_labels_are_refused(client, session, label):
    assert post(client, "relabel", {"points": [1], "label": label}).status_code == 400


@pytest.mark.parametrize("ridge", [0, -1e-2, 0.0123, 1e300, "1e-2", None, True, 10**400], ids=str)
def test_ridges_that_are_not_on_offer_are_refused(client, session, ridge):
    answer = post(client, "ridge", {"ridge": ridge})
    assert answer.status_code == 400
    assert "ridge" in answer.json()["error"]
    assert session.fitted is session.scene.fitted


def test_undoing_nothing_and_removing_twice_are_refused(client, session):
    assert post(client, "undo", {}).status_code == 400
    post(client, "remove", {"points": [1]})
    answer = post(client, "remove", {"points": [1]})
    assert answer.status_code == 400
    assert "not in the training set" in answer.json()["error"]


def test_scores_of_another_version_are_refused(client, session):
    version = session.state()["version"]
    assert client.get(f"/api/scores?version={version + 1}", headers=BEARER).status_code == 409
    for bad in ("x", "-1", "1e3", "²", "9" * 30):
        assert client.get(f"/api/scores?version={bad}", headers=BEARER).status_code == 400


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/%2e%2e/_app.py", "/static/main.js", "/_write.py", "//etc/passwd"],
)
def test_no_path_reaches_another_file(client, path):
    assert client.get(path, headers=BEARER).status_code == 404


def test_the_page_is_closed_to_other_hosts(client):
    for name in static_files():
        answer = client.get("/" if name == "index.html" else f"/{name}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not [h for h in answer.headers if h.startswith("access-control")]
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    answer = client.options("/api/remove", headers=headers)
    assert answer.status_code == 405
    assert not [h for h in answer.headers if h.startswith("access-control")]


def test_the_page_can_be_fetched_as_one_file(client, session):
    page = client.get("/api/page", headers=BEARER).text
    assert "What this page cannot tell you" in page
    assert TOKEN not in page


def test_every_visitor_has_edits_of_their_own(client, visitors):
    def start(visit=None):
        headers = BEARER | ({} if visit is None else {"Visit": visit})
        return client.get("/api/start", headers=headers).json()

    one, two = start(), start()
    assert one["visit"] != two["visit"]
    mine = BEARER | {"Visit": one["visit"]}
    client.post("/api/remove", json={"points": [5]}, headers=mine)
    assert start(one["visit"])["state"]["removed"] == [5]  # the page was loaded again
    assert start(two["visit"])["state"] == two["state"]
    assert start()["state"] == two["state"]


def test_a_request_without_a_visit_says_where_to_get_one(client):
    answer = client.get("/api/scores", headers=BEARER)
    assert answer.status_code == 400
    assert "/api/start" in answer.json()["error"]


def test_a_visitor_who_was_dropped_is_told(first):
    visitors = Visitors(first, most=2)
    with TestClient(make_app(visitors, TOKEN)) as client:
        names = [client.get("/api/start", headers=BEARER).json()["visit"] for _ in range(3)]
        gone = BEARER | {"Visit": names[0]}
        answer = client.post("/api/remove", json={"points": [5]}, headers=gone)
        assert answer.status_code == 410
        assert "visit has ended" in answer.json()["error"]
        assert "Reload the page" in answer.json()["error"]
        again = client.get("/api/start", headers=gone).json()
        assert "visit has ended" in again["ended"]
        assert again["visit"] not in names
        assert again["state"]["removed"] == []


def test_the_visit_used_last_stays_and_idle_ones_go(first):
    now = [0.0]
    visitors = Visitors(first, most=2, idle=60.0, clock=lambda: now[0])
    (one, session), (two, _) = visitors.begin(), visitors.begin()
    assert visitors.find(one) is session
    three, _ = visitors.begin()  # one of the two has to go: the one not used for longer
    assert visitors.find(one) is session
    with pytest.raises(VisitEnded):
        visitors.find(two)
    now[0] = 61.0
    with pytest.raises(VisitEnded, match="1 minutes"):
        visitors.find(three)
    assert len(visitors) == 0


def held():
    return sum(array.nbytes for array in jax.live_arrays())


def test_visitors_hold_little_more_than_one(first, visitors, compiled):
    """A session holds its edits, not a kernel, and later visitors run programs that are there."""

    def visit(seed):
        _, session = visitors.begin()
        session.scores()
        session.preview([seed, seed + 1])
        session.remove([seed, seed + 1, seed + 2][: 1 + seed % 3])
        session.relabel([30], seed % 10)
        session.change_ridge(session.start["ridges"][2])
        if seed < 3:  # the slow ones; what they keep are numbers of NumPy
            session.scores()
            session.groups()
        return session

    visit(0)
    before, programs = held(), compiled()
    sessions = [visit(seed) for seed in range(1, 7)]
    assert compiled() == programs
    alpha = first.fitted.state.alpha.nbytes
    kernel = first.fitted.kernel_op.num_bytes
    each = (held() - before) / len(sessions)
    assert each <= 16 * alpha  # three edits
    assert each <= 0.2 * kernel
    assert all(s.scores(1) is first.scores(1) for s in sessions)
