"""The server of the page: who may ask for what, and what is refused."""

import pytest
from starlette.testclient import TestClient

from dualfluence.apps.explore._app import make_app
from dualfluence.apps.page._write import static_files

pytestmark = pytest.mark.host

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}
READS = ("start", "scores", "groups", "certificate", "page")
WRITES = ("remove", "relabel", "preview", "refine", "undo", "reset")


@pytest.fixture
def client(session):
    with TestClient(make_app(session, TOKEN, max_body=1000)) as client:
        yield client


def post(client, path, body):
    return client.post(f"/api/{path}", json=body, headers=BEARER)


def test_the_routes_give_what_the_session_says(client, session):
    start = client.get("/api/start", headers=BEARER).json()
    assert start["first"] == start["state"]
    state = post(client, "remove", {"points": [3, 17]}).json()
    assert state == session.state()
    assert state["removed"] == [3, 17]
    assert post(client, "relabel", {"points": [4], "label": 2}).json()["labels"][4] == 2
    assert post(client, "refine", {}).json()["history"][-1]["what"] == "step"
    preview = post(client, "preview", {"points": [8]}).json()
    assert preview["losses"] == session.preview([8])["losses"]
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
def test_bad_labels_are_refused(client, label):
    assert post(client, "relabel", {"points": [1], "label": label}).status_code == 400


def test_undoing_nothing_and_removing_twice_are_refused(client):
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


def test_the_page_can_be_fetched_as_one_file(client):
    page = client.get("/api/page", headers=BEARER).text
    assert "What this page cannot say" in page
    assert TOKEN not in page
