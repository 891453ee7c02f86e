"""The page of sentences and the long table: what they show, in which order, and bad input."""

import html
import re

import numpy as np
import pytest

from dualfluence.attribution import Attribution

pytestmark = pytest.mark.host

WORDS = ["<b>", "tea", "is", "hot", "cold", "rain"]
Y = np.array([[1, 2, 3], [5, 2, 4], [-100, 0, -100]])
YQ = np.array([[-100, -100, 3]])
TOKENS = np.array([[[0.5, 0.25, 2.0], [-1.0, -0.5, -0.5], [0.0, 0.125, 0.0]]])


def decode(ids):
    return " ".join(WORDS[i] for i in ids)


def scores(direction=1, **options):
    values = {"values": TOKENS.sum(2), "tokens": TOKENS, "y": Y, "yq": YQ} | options
    return Attribution(of="loss", direction=direction, unit=None, **values)


def items(page, side):
    column = page.split(f'<div class="{side}">')[1].split("</ol>")[0]
    return re.findall(r"<li>(.*?)</li>", column)


def test_sentences_are_shown_with_their_tokens_shaded_by_their_parts(tmp_path):
    scores().to_html(tmp_path / "page.html", decode=decode)
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert re.search(r"Query 0:</small> hot</h2>", page)
    good, bad = items(page, "good"), items(page, "bad")
    assert [re.search(r"#(\d)", item).group(1) for item in good] == ["0", "2"]
    assert [re.search(r"#(\d)", item).group(1) for item in bad] == ["1"]
    marks = re.findall(
        r'<mark title="(\S+)" style="[^"]*--(\w+)\),(\S+)\)">([^<]*)</mark>', good[0]
    )
    assert [(float(v), colour, text) for v, colour, _, text in marks] == [
        (0.5, "good", "tea"),
        (0.25, "good", " is"),
        (2.0, "good", " hot"),
    ]
    # Opacity is in the ratio of the parts, and the largest one is still readable.
    alpha = np.array([float(a) for _, _, a, _ in marks])
    np.testing.assert_allclose(alpha / alpha[2], [0.25, 0.125, 1], atol=2e-3)
    assert alpha.max() < 0.5
    assert html.escape("<b>") in good[1]
    assert "<b><" not in good[1]
    assert "+2.75" in good[0]


def test_what_a_fall_makes_better_is_harmful_and_texts_win(tmp_path):
    scores(-1, tokens=None).to_html(
        tmp_path / "page.html", texts=["a & b", "c", "d"], queries=["Why?"], k=1
    )
    page = (tmp_path / "page.html").read_text()
    assert ">c</li>" in items(page, "good")[0] + "</li>"
    assert "a &amp; b" in items(page, "bad")[0]
    assert "Why?" in page
    assert "Shading" not in page


def test_labels_have_their_names(tmp_path):
    labelled = scores(tokens=None, y=np.array([0, 1, 1]), yq=np.array([1]))
    labelled.to_html(
        tmp_path / "page.html", texts=["a", "b", "c"], queries=["q"], names=["no", "yes"]
    )
    page = (tmp_path / "page.html").read_text()
    assert "q <small>→ yes" in page
    assert "a <small>→ no" in page


@pytest.mark.parametrize(
    ("pieces", "want"),
    [
        (["play", "##ing", "chess"], "playing chess"),
        ([" play", "ing", " chess"], " playing chess"),
        (["p", "l", " ", "c"], "pl c"),
    ],
    ids=["word pieces", "byte pairs", "letters"],
)
def test_pieces_of_words_are_joined(tmp_path, pieces, want):
    y = np.arange(len(pieces))[None]
    one = Attribution(values=np.ones((1, 1)), of="loss", y=y, yq=y)
    one.to_html(tmp_path / "page.html", decode=lambda ids: [pieces[i] for i in ids])
    assert f"</small> {want}</h2>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, ValueError, "expected texts"),
        ({"texts": ["a"], "queries": ["q"]}, ValueError, "texts must be 3 texts, got 1"),
        ({"texts": ["a", "b", 3], "queries": ["q"]}, TypeError, "got a int"),
        ({"texts": list("abc"), "queries": []}, ValueError, "queries must be 1 texts, got 0"),
    ],
)
def test_bad_input_of_the_page_is_said(tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        scores().to_html(tmp_path / "page.html", **options)
    assert not list(tmp_path.iterdir())


class Pandas:
    """What the table needs of pandas, which a developer need not have."""

    @staticmethod
    def DataFrame(columns):
        return columns


def test_the_long_table_has_a_row_for_every_pair_and_token(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", Pandas)
    long = scores().to_pandas(long=True)
    np.testing.assert_array_equal(long["query"], [0, 0, 0])
    np.testing.assert_array_equal(long["train"], [0, 2, 1])
    np.testing.assert_array_equal(long["effect"], [2.75, 0.125, -2.0])
    np.testing.assert_array_equal(scores(-1).to_pandas(long=True)["train"], [1, 2, 0])
    np.testing.assert_array_equal(scores().to_pandas(long=True, k=1)["train"], [0, 1])
    np.testing.assert_array_equal(scores().to_pandas(long=True, k=5)["train"], [0, 2, 1])
    rows = scores().to_pandas(tokens=True)
    np.testing.assert_array_equal(rows["train"], [0, 0, 0, 2, 1, 1, 1])
    np.testing.assert_array_equal(
        rows["token"], [0, 1, 2, 1, 0, 1, 2]
    )  # none that counts for nothing
    np.testing.assert_array_equal(rows["part"], [0.5, 0.25, 2.0, 0.125, -1.0, -0.5, -0.5])
    for options, said in (({"k": 3}, "k needs long=True"), ({"tokens": True}, "have no tokens")):
        with pytest.raises(ValueError, match=said):
            scores(tokens=None).to_pandas(**options)
