"""The page in a browser: what a reader does, and that the numbers on it are the library's."""

import json
import shutil
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from seen_page import Seen

import dualfluence as dfl
from dualfluence.apps.attribute._audit import audit
from dualfluence.apps.attribute._data import Data
from dualfluence.apps.attribute._page import write_audit
from dualfluence.apps.explore._app import make_app
from dualfluence.apps.explore._run import save_page
from dualfluence.apps.explore._session import Session
from dualfluence.apps.explore._visitors import Visitors

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
TOKEN = "b" * 43

pytestmark = [pytest.mark.browser, pytest.mark.host]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visitors(first):
    return Visitors(first)


@pytest.fixture(scope="module")
def served(first, visitors):
    """What every visitor begins with, behind a port of this machine."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(visitors, TOKEN), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield first, f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture
def open_page(browser, served):
    _, url = served
    seen = []

    def open_one(address=None, **options):
        seen.append(Seen(browser, address or f"{url}#{TOKEN}", **options))
        return seen[-1]

    yield open_one
    for each in seen:
        each.context.close()
        assert each.complaints == []
        assert [
            r for r in each.requests if not r.startswith((url, "file:", "data:", "blob:"))
        ] == []


@pytest.fixture
def seen(open_page):
    seen = open_page()
    seen.settled()
    return seen


@pytest.fixture
def own(seen, visitors):
    """The session of the visitor who sees the page."""
    return visitors.find(seen.visit())


def shown(p):
    """A probability as the page writes it."""
    return "< 0.1 %" if 0 < 100 * p < 0.05 else f"{100 * p:.1f} %"


def read(text):
    """A number as the page writes it: `−0.11`, `6.1 × 10⁻⁵`."""
    plain = text.translate(str.maketrans("−⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--0123456789"))
    mantissa, _, power = plain.partition(" × 10")
    return float(mantissa) * 10.0 ** int(power or 0)


def softmax(f):
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def check_answer(seen, model, scene, q):
    """The bars against the library's own predictions."""
    p = softmax(np.asarray(model.predict(scene.xq)))[q]
    # The last digit may round either way where the value lies between.
    allowed = [(shown(v * (1 - 1e-9)), shown(v)) for v in p]
    for _ in range(100):  # the page draws when it has the answer, in ten seconds at most
        got = seen.values()
        if len(got) == len(p) and all(g in a for g, a in zip(got, allowed, strict=True)):
            break
        seen.page.wait_for_timeout(100)
    assert [g for g, a in zip(got, allowed, strict=True) if g not in a] == []


def apart(seen, count):
    """Points of the map that no other lies on, so that a click means them."""
    at = seen.page.evaluate(
        """[...document.querySelectorAll('#map text')].map((t) => {
            const b = t.getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2];
        })"""
    )
    at = np.array(at)
    far = np.linalg.norm(at[:, None] - at[None], axis=2) + 1e9 * np.eye(len(at))
    return [int(i) for i in np.argsort(-far.min(axis=1))[:count]]


def test_picking_a_query_shows_what_stands_behind_it(seen, served):
    session, _ = served
    scene = session.scene
    seen.page.click("#query-3")
    check_answer(seen, scene.fitted, scene, 3)
    result = scene.fitted.attribute(scene.xq, scene.yq, progress=False)
    top = result.top(8)
    for kind, side in (("helpful", top.helpful), ("harmful", top.harmful)):
        cards = seen.page.query_selector_all(f"#{kind} .card")
        got = [int(card.get_attribute("data-point")) for card in cards]
        want = [int(i) for i, v in zip(side.indices[3], side.values[3], strict=True) if abs(v) > 0]
        assert got == want[: len(got)]
        assert got


def test_removing_points_changes_the_numbers_to_those_of_the_library(seen, served, edited):
    session, _ = served
    scene = session.scene
    seen.ask(2)
    before = seen.values()
    points = apart(seen, 3)
    seen.select(*points)
    assert seen.selected() == set(points)
    seen.page.wait_for_selector("#preview b")
    model = edited(scene.fitted, dfl.Remove(points))
    change = float(model.delta_loss(scene.xq, scene.yq)[2])
    assert read(seen.text("#preview b")) == pytest.approx(change, rel=0.06)  # two digits
    seen.page.click("#remove")
    seen.history(2)
    check_answer(seen, model, scene, 2)
    assert seen.values() != before
    bound = read(seen.text("#fact-distance"))
    assert bound == pytest.approx(model.certificate.distance_bound, rel=6e-3)  # three digits
    assert seen.text("#fact-converged") == "yes"
    assert "37 of 40 training points" in seen.text("#about")


def test_undo_brings_back_what_was_shown(seen):
    before = seen.text("#query-panel"), seen.text("#facts"), seen.text("#about")
    seen.select(*apart(seen, 2))
    seen.page.click("#remove")
    seen.history(2)
    assert (seen.text("#facts"), seen.text("#about")) != before[1:]
    seen.page.click("#undo")
    seen.history(1)
    assert (seen.text("#query-panel"), seen.text("#facts"), seen.text("#about")) == before


def test_edits_in_quick_succession_end_at_the_last(seen, own):
    one, two = apart(seen, 2)
    seen.select(one)
    seen.page.click("#remove")
    seen.page.wait_for_selector("#history li >> nth=1")
    seen.select(two)
    seen.page.click("#remove")  # while the scores without the first are still computed
    seen.history(3)
    assert own.state()["removed"] == sorted((one, two))
    seen.ask(0)
    check_answer(seen, own.fitted, own.scene, 0)


def test_relabelling_is_that_of_the_library(seen, served, edited):
    session, _ = served
    scene = session.scene
    (point,) = apart(seen, 1)
    label = (scene.labels(scene.fitted.data.targets)[point] + 1) % 10
    seen.select(point)
    seen.page.select_option("#label", str(label))
    seen.page.click("#relabel")
    seen.history(2)
    assert seen.page.text_content(f"#point-{point}") == str(label)
    model = edited(scene.fitted, dfl.Relabel([point], [label]))
    seen.ask(4)
    check_answer(seen, model, scene, 4)
    bound = model.certificate.relative_bound
    assert read(seen.text("#fact-relative")) == pytest.approx(bound, rel=6e-3)
    seen.page.click("#refine")
    seen.history(3)
    check_answer(seen, model.edit([]), scene, 4)
    seen.page.click("#reset")
    seen.history(1)


def test_the_page_says_that_it_computes_in_place_of_what_is_not_there(
    open_page, visitors, monkeypatch
):
    """Neither empty strips nor those of the model before."""
    gate, scores = threading.Event(), Session.scores

    def late(session, version=None):
        gate.wait(60)
        return scores(session, version)

    monkeypatch.setattr(Session, "scores", late)
    seen = open_page()

    def computing():
        seen.page.wait_for_selector("#helpful .computing")
        for place in ("#helpful", "#harmful", "#finding"):
            assert "Computing" in seen.text(place)
            assert not seen.page.query_selector_all(f"{place} .card")
        seen.page.locator("#working", has_text="Leaving out every point").wait_for()

    try:
        computing()
        gate.set()
        seen.settled()
        assert seen.page.query_selector_all("#helpful .card")
        seen.page.wait_for_selector("#working", state="hidden")
        gate.clear()
        seen.select(*apart(seen, 1))
        seen.page.click("#remove")
        seen.page.wait_for_selector("#history li >> nth=1")
        computing()
    finally:
        gate.set()
    seen.history(2)
    assert seen.page.query_selector_all("#helpful .card")


def test_another_ridge_is_fitted_and_undone(seen, own):
    scene, ridge = own.scene, own.start["ridges"][-1]
    before = seen.text("#foot")
    seen.page.select_option("#ridge", index=len(own.start["ridges"]) - 1)
    seen.history(2)
    model = dfl.fit(
        scene.fitted.network,
        scene.fitted.x,
        np.asarray(scene.fitted.data.targets).argmax(axis=1),
        loss=scene.fitted.loss,
        ridge=ridge,
        progress=False,
    )
    p = softmax(np.asarray(model.predict(scene.xq)))
    seen.ask(2)
    got = [float(value.replace("< ", "").replace(" %", "")) for value in seen.values()]
    np.testing.assert_allclose(got, 100 * p[2], atol=0.11)  # one digit behind the point
    assert f"λ = {ridge:g} " in seen.text("#foot")
    seen.page.click("#undo")
    seen.history(1)
    assert seen.text("#foot") == before
    assert float(seen.page.input_value("#ridge")) == scene.fitted.ridge


def test_a_visitor_who_was_dropped_is_told_and_begins_anew(open_page, visitors):
    seen = open_page()
    seen.settled()
    for _ in range(visitors.most):
        visitors.begin()
    seen.select(*apart(seen, 1))
    seen.page.wait_for_selector("#ended:not([hidden])")
    assert "visit has ended" in seen.text("#ended")
    seen.page.reload()
    seen.settled()
    assert "starts again" in seen.text("#ended")
    assert len(visitors.find(seen.visit()).moments) == 1
    # The browser notes the refusal of the request in its console; nothing else.
    assert all("410" in complaint for complaint in seen.complaints)
    seen.complaints.clear()


def test_the_certificate_can_be_downloaded(seen, own):
    seen.select(*apart(seen, 1))
    seen.page.click("#remove")
    seen.history(2)
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    assert download.value.suggested_filename == "certificate.json"
    document = json.loads(Path(download.value.path()).read_text())
    want = own.certificate()
    assert document["certificate"] == want["certificate"]
    assert document["model"] == want["model"]


def test_a_lasso_selects_what_is_inside(seen):
    (point,) = apart(seen, 1)
    box = seen.page.locator(f"#point-{point}").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse = seen.page.mouse
    mouse.move(x - 15, y - 15)
    mouse.down()
    for dx, dy in ((15, -15), (15, 15), (-15, 15), (-15, -10)):
        mouse.move(x + dx, y + dy, steps=4)
    mouse.up()
    assert seen.selected() == {point}


def test_a_group_is_selected_and_its_effect_shown_before_anything_is_done(seen, own, edited):
    scene = own.scene
    seen.ask(1)
    seen.page.select_option("#group", "class 1")
    members = scene.named_groups["class 1"]
    assert seen.selected() == set(members.tolist())
    seen.page.wait_for_selector("#preview b")
    change = float(edited(scene.fitted, dfl.Remove(members)).delta_loss(scene.xq, scene.yq)[1])
    assert read(seen.text("#preview b")) == pytest.approx(change, rel=0.06)
    assert len(own.moments) == 1
    seen.page.check("input[value=groups]", force=True)
    seen.page.wait_for_selector("#finding table")
    assert "class 1" in seen.text("#finding")


def test_everything_can_be_done_from_the_keyboard(seen, own):
    page = seen.page
    page.focus("#queries")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#queries [aria-selected=true]", "data-query") == "1"
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    first = seen.selected()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    assert len(seen.selected()) == 2
    assert first < seen.selected()
    page.keyboard.press("Delete")
    seen.history(2)
    assert len(own.state()["removed"]) == 2
    page.focus("#undo")
    page.keyboard.press("Enter")
    seen.history(1)


def test_every_control_is_reached_by_tab_and_shows_where_one_is(seen):
    page = seen.page
    seen.select(*apart(seen, 1))
    page.wait_for_selector("#preview b")
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const e = document.activeElement;
            const o = (s) => getComputedStyle(s).outlineStyle !== 'none';
            const beside = e.nextElementSibling;
            return [e.id || e.name || e.className, o(e) || (beside && o(beside))] }"""
        )
        reached.add(name)
        assert outlined or name == "", f"{name} shows no focus"
    want = "query-number queries colour map group clear remove relabel label refine ridge download save"
    assert {*want.split(), "finding"} <= reached


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_no_width_scrolls_sideways(open_page, width):
    seen = open_page(viewport={"width": width, "height": 780}, has_touch=width < 600)
    seen.settled()
    seen.page.check("input[value=groups]", force=True)
    seen.page.wait_for_selector("#finding table")
    seen.select(*apart(seen, 1))
    seen.page.wait_for_selector("#preview b")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(open_page, scheme):
    seen = open_page(color_scheme=scheme)
    seen.settled()
    numbers = seen.page.evaluate(
        """() => { const get = (e, p) => getComputedStyle(e)[p].match(/[\\d.]+/g).slice(0, 3).map(Number);
        const paper = get(document.body, 'backgroundColor');
        return ['#about', '#bound', '.helpful', '.harmful', '.bar .value'].map(
            (s) => [get(document.querySelector(s), 'color'), paper]) }"""
    )
    for ink, paper in numbers:
        assert contrast(ink, paper) >= 4.5  # WCAG 2.2, AA
    dark = sum(numbers[0][1]) < 3 * 128
    assert dark == (scheme == "dark")


def contrast(a, b):
    def light(rgb):
        c = np.array(rgb) / 255
        c = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        return c @ [0.2126, 0.7152, 0.0722]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_without_the_token_the_page_says_what_is_missing(browser, served):
    _, url = served
    seen = Seen(browser, url)
    seen.page.wait_for_selector("#trouble:not([hidden])")
    assert "carries a token" in seen.text("#trouble")
    assert not seen.page.is_visible("#main")
    seen.context.close()


def test_the_token_leaves_the_address_bar(seen):
    assert TOKEN not in seen.page.url


def test_a_saved_page_works_without_a_server(open_page, served, tmp_path):
    session, _ = served
    save_page(session, tmp_path / "page.html")
    seen = open_page((tmp_path / "page.html").as_uri())
    seen.settled()
    scene = session.scene
    seen.page.click("#query-3")
    check_answer(seen, scene.fitted, scene, 3)
    (point,) = apart(seen, 1)
    seen.select(point)
    effect = scene.fitted.attribute(scene.xq, scene.yq, progress=False).values[3, point]
    assert read(seen.text("#preview b")) == pytest.approx(effect, rel=0.06)
    for button in ("remove", "relabel", "refine", "undo", "reset"):
        assert seen.page.is_disabled(f"#{button}")
    assert "saved page" in seen.text("#why-not")
    seen.page.check("input[value=without]", force=True)
    assert "trained without the point" in seen.text("#legend")
    seen.page.select_option("#group", "class 1")
    seen.page.wait_for_function("document.querySelector('#preview').innerText.includes('class 1')")
    with seen.page.expect_download() as download:
        seen.page.click("#download")
    document = json.loads(Path(download.value.path()).read_text())
    assert document["certificate"] == session.certificate()["certificate"]
    assert all(r.startswith(("file:", "data:", "blob:")) for r in seen.requests)


def test_the_report_of_an_audit_is_the_page(open_page, digits_scene, tmp_path):
    fitted, xq, yq = digits_scene.fitted, digits_scene.xq, digits_scene.yq
    y = np.asarray(fitted.data.targets).argmax(axis=1)
    data = Data(np.asarray(fitted.x), y, xq, yq, "mnist-small")
    result = audit(fitted.network, data, ridge=1e-2)
    write_audit(result, tmp_path / "audit.html", tmp_path / "audit.csv")
    seen = open_page((tmp_path / "audit.html").as_uri())
    seen.settled()
    assert seen.text("h1") == "Audit of a training set"
    lists = {"suspicious": "suspicion", "isolated": "isolation", "harmful": "harm"}
    for name, numbers in lists.items():
        seen.page.check(f"#findings-choice input[value={name}]", force=True)
        cards = seen.page.query_selector_all("#finding .card")
        got = [int(card.get_attribute("data-point")) for card in cards]
        want = np.argsort(-result[numbers], kind="stable")[: len(got)]
        np.testing.assert_allclose(result[numbers][got], result[numbers][want], rtol=1e-9)
        assert len(got) >= 8
    seen.page.check("input[value=groups]", force=True)
    for name in result["groups"].names:
        assert name in seen.text("#finding")
