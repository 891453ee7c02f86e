"""The files of the page, the page as one file, its pictures and its map."""

import json
import re
import struct
import zlib

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.explore._session import Session
from dualfluence.apps.page._map import kernel_map
from dualfluence.apps.page._pictures import drawn, png
from dualfluence.apps.page._scene import Scene
from dualfluence.apps.page._write import MODULES, one_file, static_files

pytestmark = pytest.mark.host


def test_the_files_name_no_other_host():
    for name, text in static_files().items():
        assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]", text), name


def test_modules_use_only_earlier_ones_and_can_be_joined():
    text, defined = static_files(), set()
    for place, name in enumerate(MODULES):
        for line in re.findall(r"^import .*$", text[name], re.MULTILINE):
            used = re.fullmatch(r'import \{ .* \} from "\./(\w+\.js)";', line)
            assert used, f"{name}: {line}: an import is one line"
            assert used[1] in MODULES[:place], f"{name} imports {used[1]}"
        own = set(
            re.findall(
                r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text[name], re.M
            )
        )
        assert not own & defined, f"{name} defines {own & defined} again"
        defined |= own


@pytest.mark.thorough
def test_a_saved_page_holds_everything_once(session):
    session.remove([5])
    page = one_file(session.content())
    assert not re.search(r"https?:", page)
    assert not re.search(r'\b(src|href)="(?!data:|#)', page)
    assert "import {" not in page
    found = re.search(
        r'<script id="content" type="application/json">(.*?)</script>', page, re.DOTALL
    )
    content = json.loads(found[1])
    assert content["state"] == json.loads(json.dumps(session.state()))
    assert content["first"]["removed"] == []
    assert content["certificate"]["removed"] == [5]


@pytest.mark.thorough
def test_text_of_the_user_cannot_leave_its_place(digits_scene):
    hostile = "</script><script>alert(1)</script><!--"
    s = digits_scene
    page = one_file(Session(Scene(s.fitted, s.xq, s.yq, hostile, hostile)).content())
    assert "<script>alert" not in page
    assert "<!--" not in page


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_pictures_are_png_files(shape):
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    data = png(pixels)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (height, width) == shape[:2]
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    rows = np.frombuffer(zlib.decompress(data[start + 4 : start + 4 + length]), np.uint8)
    np.testing.assert_array_equal(rows.reshape(shape[0], -1)[:, 1:], pixels.reshape(shape[0], -1))


def test_features_that_are_no_picture_are_numbers():
    found = drawn(np.arange(30.0).reshape(3, 10))
    assert found["sheet"] is None
    assert found["rows"][1] == [10, 11, 12, 13, 14, 15]


def truth_of_map(K):
    """Principal components by an eigendecomposition of the centred Gram matrix."""
    n = len(K)
    H = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(H @ K @ H)
    return vectors[:, :-3:-1] * np.sqrt(values[:-3:-1]), values[:-3:-1] / np.trace(H @ K @ H)


def check_map(fitted, K):
    at, share = kernel_map(fitted)
    want, shares = truth_of_map(K)
    # An axis has no sign; 60 rounds of a subspace of 8 leave about (λ₉/λ₂)⁶⁰.
    np.testing.assert_allclose(np.abs(at), np.abs(want), atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(share, shares, rtol=1e-6)


@pytest.mark.thorough
def test_the_map_is_made_of_kernel_principal_components(digits_scene):
    fitted = digits_scene.fitted
    n, c = fitted.data.num_points, fitted.num_outputs
    K = np.asarray(fitted.kernel_op.dense()).reshape(n, c, n, c)
    check_map(fitted, np.einsum("iaja->ij", K) / c)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["dense", "matrix-free"])
def test_the_map_needs_no_entries_of_the_kernel(form):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(14, 3)), rng.normal(size=(14, 2))
    model = dfl.linearize(lambda w, x: x @ w, np.zeros((3, 2)))
    fitted = dfl.fit(
        model, x, y, loss=dfl.SquaredError(), ridge=0.1, progress=False, kernel=form_of(form)
    )
    check_map(fitted, x @ x.T)


def form_of(form):
    from dualfluence.fitted._options import KernelOptions

    return KernelOptions(form=form)
