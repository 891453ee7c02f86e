"""The commands on data of the user's own, their pages and tables, and mistakes in their input."""

import csv
import re

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import dualfluence as dfl
from dualfluence import datasets
from dualfluence.adapters import HashedText
from dualfluence.apps.attribute._audit import audit
from dualfluence.apps.attribute._commands import register
from dualfluence.apps.attribute._data import Data, load_data, load_model
from dualfluence.apps.attribute._findings import LETTERS, Look, _summary
from dualfluence.attribution import evaluate

pytestmark = [pytest.mark.thorough, pytest.mark.host]

APP = typer.Typer()
register(APP)


def _run(*args):
    return CliRunner().invoke(APP, [str(a) for a in args])


def _file(folder, **changes):
    small = datasets.load("mnist-small")
    arrays = {
        "x": small.x_train[:40],
        "y": small.y_train[:40],
        "xq": small.x_test[:6],
        "yq": small.y_test[:6],
    } | changes
    path = folder / "data.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_attribute_writes_one_page_with_pictures_and_a_table(tmp_path):
    out = _run("attribute", "--data", _file(tmp_path), "--out", tmp_path / "o", "--top", 3)
    assert out.exit_code == 0, out.output
    page = (tmp_path / "o" / "attribution.html").read_text()
    assert page.count("data:image/png;base64,") == 6 * (1 + 2 * 3)
    assert "http" not in page.replace("http-equiv", "")
    rows = list(csv.DictReader((tmp_path / "o" / "attribution.csv").open()))
    assert len(rows) == 6 * 2 * 3
    assert all(float(r["effect"]) >= 0 for r in rows if r["kind"] == "helpful" and r["rank"] == "1")


def test_audit_writes_one_page_and_a_row_for_each_point(tmp_path):
    groups = np.repeat(["left", "right"], 20)
    path = _file(tmp_path, groups=groups)
    out = _run("audit", "--data", path, "--out", tmp_path / "o", "--queries", 6)
    assert out.exit_code == 0, out.output
    page = (tmp_path / "o" / "audit.html").read_text()
    assert "Labels that look wrong" in page
    assert "left" in page
    rows = list(csv.DictReader((tmp_path / "o" / "audit.csv").open()))
    assert sorted(int(r["suspicion_rank"]) for r in rows) == list(range(1, 41))


def test_audit_of_arrays_writes_findings_with_pictures(tmp_path):
    small = datasets.load("mnist-small")
    path = _file(tmp_path, xq=small.x_train[:2], yq=small.y_train[:2])
    out = _run("audit", "--data", path, "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output
    assert "Audit of 40 training points of 10 classes" in out.output
    page = (tmp_path / "o" / "findings.html").read_text()
    assert page.count("the same as training point") == 2
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    rows = list(csv.DictReader((tmp_path / "o" / "findings.csv").open()))
    leaks = [r for r in rows if r["kind"] == "leak"]
    assert [(r["split"], r["index"], r["partner"]) for r in leaks] == [
        ("test", "0", "0"),
        ("test", "1", "1"),
    ]


def test_audit_of_a_model_of_ones_own_looks_at_that_model(tmp_path):
    name = "dualfluence.apps.attribute.example:small_network"
    out = _run("audit", "--data", _file(tmp_path), "--model", name, "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output
    assert "infinitely wide" not in (tmp_path / "o" / "findings.html").read_text()


def _table(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


TEXTS = [("fruit", f"apple pie {k % 3}") for k in range(8)] + [
    ("car", f"car engine {k % 3}") for k in range(8)
]


def test_audit_of_a_table_of_texts(tmp_path):
    rows = [["label", "what"], *TEXTS[:-1], ("fruit", "<b>car engine</b>")]
    path = _table(tmp_path / "t.csv", rows)
    out = _run("audit", "--data", path, "--text", "what", "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output
    page = (tmp_path / "o" / "findings.html").read_text()
    assert "&lt;b&gt;car engine" in page
    assert "<b>car" not in page
    assert not (tmp_path / "o" / "audit.html").exists()


def test_audit_of_a_table_of_numbers_and_names(tmp_path):
    rng = np.random.default_rng(0)
    rows = [[f"{v:.3f}", "left" if v > 0 else "right", f"{2 * v:.3f}"] for v in rng.normal(size=30)]
    rows[4][2] = "50.5"
    path = _table(tmp_path / "t.csv", [["a", "side", "label"], *rows])
    out = _run("audit", "--data", path, "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output
    first = next(csv.DictReader((tmp_path / "o" / "findings.csv").open()))
    assert (first["kind"], first["index"], first["given"]) == ("label", "4", "50.5")


def test_whole_numbers_of_a_table_are_what_task_says(tmp_path):
    rows = [[k, f"{k / 7:.16f}", 30 * k] for k in range(30)]
    path = _table(tmp_path / "t.csv", [["label", "long", "short"], *rows])
    out = _run("audit", "--data", path, "--out", tmp_path / "o")
    assert "--task on the command line" in str(out.exception)
    out = _run("audit", "--data", path, "--task", "regression", "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output
    page = (tmp_path / "o" / "findings.html").read_text()
    assert re.search(r"30 training points\. .* targets? looks? wrong", page)
    assert re.search(r"long\s\d\.\d{1,4}, short\s\d+<", page)
    out = _run("audit", "--data", _file(tmp_path), "--task", "regression", "--out", tmp_path / "o")
    assert "--task is only for tables. For an .npz" in str(out.exception)


def test_long_texts_on_a_page_end_with_a_word():
    shown = Look([" ".join(["word"] * 100), "z" * 500], None)
    assert shown("train", 0).endswith("word …</div>")
    assert shown("train", 1).count("z") == LETTERS


def test_the_page_tells_wrong_labels_of_both_splits_apart():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)), np.arange(60) % 2
    x[:, 0] += 8 * y
    given, asked = y.copy(), y.copy()
    given[3], asked[[3, 5, 8]] = 1 - y[3], 1 - y[[3, 5, 8]]
    found = dfl.audit(None, x, given, x_test=x, y_test=asked)
    words = _summary(found)
    assert "<b>1 label looks wrong; about 1 of these" in words
    assert "In the test set 2 labels look wrong." in words


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", (), "expected rows"),
        ("label,x\n", (), "expected rows"),
        ("label,x\na,1\nb\n", (), "expected 2 columns"),
        ("label,x\na,\nb,2\na,3\n", (), "1 of 3 cells are empty"),
        ("label,x\n" + "a,1\na,2\n" * 3, (), "expected at least two classes, got one: ['a']"),
        ("label,x\n" + "a,1\nb,1\n" * 3, (), "all 6 points are equal"),
        ("label,x\nnan,1\nb,2\nb,3\n", (), "y: 1 of 3 (at 0) is missing"),
        ("label,x\na,1\nb,nan\na,3\nb,4\n", (), "x: column 'x': every entry must be finite"),
        ("label,x\n" + "".join(f"a,word {k}\n" for k in range(101)), (), "give --text x"),
        ("label\na\nb\na\n", (), "columns beside that of --label"),
        ("label,x\n" + "a,so\nb,so\n" * 3, ("--text", "x"), "all 6 points are equal"),
        ("y,x\na,1\nb,2\n", (), "--label: expected one of"),
        ("label,x\na,1\nb,2\n", ("--text", "words"), "--text: expected one of"),
        ("label,x\na,1\nb,2\na,3\n", ("--model", "m:f"), "library's own model"),
    ],
)
def test_bad_tables_say_what_is_wrong(text, options, words, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    out = _run("audit", "--data", tmp_path / "t.csv", "--out", tmp_path / "o", *options)
    assert isinstance(out.exception, ValueError)
    assert words in str(out.exception)
    assert not (tmp_path / "o" / "findings.html").exists()


def test_a_model_of_the_users_own_is_taken_by_name(tmp_path):
    name = "dualfluence.apps.attribute.example:small_network"
    out = _run("attribute", "--data", _file(tmp_path), "--model", name, "--out", tmp_path / "o")
    assert out.exit_code == 0, out.output


def test_tables_and_numbers_work_like_pictures_and_classes(tmp_path):
    rng = np.random.default_rng(0)
    path = _file(
        tmp_path,
        x=rng.normal(size=(20, 3)),
        y=rng.normal(size=20),
        xq=rng.normal(size=(4, 3)),
        yq=rng.normal(size=4),
    )
    for command, page in (("attribute", "attribution.html"), ("audit", "audit.html")):
        out = _run(command, "--data", path, "--out", tmp_path / "o")
        assert out.exit_code == 0, out.output
        assert "data:image" not in (tmp_path / "o" / page).read_text()


def test_flipped_labels_are_found():
    """Ten per cent of labels flipped at random."""
    small = datasets.load("mnist-small")
    rng = np.random.default_rng(0)
    y = small.y_train[:400].copy()
    wrong = np.zeros(400, bool)
    wrong[rng.permutation(400)[:40]] = True
    y[wrong] = (y[wrong] + rng.integers(1, 10, 40)) % 10
    data = Data(small.x_train[:400], y, small.x_test[:20], small.y_test[:20], "flipped")
    result = audit(load_model(None), data, ridge=1e-3)
    assert evaluate.mislabel_auc(result["suspicion"], wrong) > 0.95  # 0.98 with all 2,000 points


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"yq": None}, "yq is missing"),
        ({"y": np.zeros(3, int)}, "expected 40 rows"),
        ({"x": np.full((40, 784), np.nan)}, "every entry must be finite"),
        ({"groups": np.zeros(2)}, "expected 40 rows"),
    ],
)
def test_bad_files_say_what_is_wrong(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        load_data(_file(tmp_path, **changes))


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        load_data(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["nothing", "no.such.module:f", "math:nothing"])
def test_a_model_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match="--model"):
        load_model(name)


def test_attribute_of_a_table_of_texts_shows_the_sentences_behind_a_prompt(tmp_path):
    rows = [
        ["label", "what"],
        *TEXTS,
        ("fruit", "pear <b>tart</b>"),
        ("fruit", "a rusty car engine"),
    ]
    path = _table(tmp_path / "t.csv", rows)
    given = ("attribute", "--data", path, "--text", "what", "--out", tmp_path / "o", "--top", 2)
    out = _run(*given, "--prompt", "pear tart with cream")
    assert out.exit_code == 0, out.output
    page = (tmp_path / "o" / "attribution.html").read_text()
    assert "pear tart with cream → fruit" in page
    assert "pear &lt;b&gt;tart&lt;/b&gt; → fruit" in page
    first = next(csv.DictReader((tmp_path / "o" / "attribution.csv").open()))
    assert (first["kind"], first["rank"], first["text"]) == ("helpful", "1", "pear <b>tart</b>")
    assert float(first["effect"]) > 0
    # The effect is that of training again without the sentence.
    encoder = HashedText()
    sentences = [text for _, text in rows[1:]]
    x = np.hstack([encoder(sentences), np.full((len(sentences), 1), 0.1)])
    q = np.append(encoder(["pear tart with cream"])[0], 0.1)
    y = np.eye(2)[[int(label == "fruit") for label, _ in rows[1:]]]

    def loss(keep):
        A = x[keep].T @ x[keep] / len(keep) + 1e-3 * np.eye(x.shape[1])
        f = q @ np.linalg.solve(A, x[keep].T @ y[keep] / len(keep))
        return 0.5 * np.sum((f - np.eye(2)[1]) ** 2)

    everyone, gone = np.arange(len(x)), int(first["train"])
    want = loss(np.delete(everyone, gone)) - loss(everyone)
    np.testing.assert_allclose(float(first["effect"]), want, rtol=1e-4)


def test_attribute_of_a_table_asks_for_its_last_rows_without_a_prompt(tmp_path):
    path = _table(tmp_path / "t.csv", [["label", "what"], *TEXTS, ("fruit", "a car engine")])
    given = ("attribute", "--data", path, "--text", "what", "--out", tmp_path / "o")
    out = _run(*given, "--queries", 1)
    assert out.exit_code == 0, out.output
    assert (
        "a car engine → car (labelled fruit)" in (tmp_path / "o" / "attribution.html").read_text()
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--text", "what"), "need a table"),
        (("--prompt", "a"), "need a table"),
        (("--data", "t.csv"), "a table needs --text"),
        (("--data", "t.csv", "--text", "what", "--model", "a:b"), "the library's own model"),
    ],
)
def test_attribute_says_what_a_table_needs(tmp_path, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    _table(tmp_path / "t.csv", [["label", "what"], *TEXTS])
    out = _run("attribute", "--out", tmp_path / "o", *more)
    assert out.exit_code != 0
    assert said in str(out.exception)
