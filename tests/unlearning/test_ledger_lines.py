"""Lines, names and contents of requests on their own, without a model: every byte has one way to be."""

import hashlib
import hmac
import json

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.problem._edits import Add, Relabel, Remove, Replace
from dualfluence.unlearning import Ledger, LedgerError, _ledger
from dualfluence.unlearning._ids import Ids, as_name, as_names
from dualfluence.unlearning._payload import edits_of, read_payload, write_payload

CLAIM = {
    "distance_bound": 0.5,
    "gradient_norm": 0.1,
    "rounding": 0.0,
    "parameter_norm": 1.0,
    "ridge": 0.2,
    "gap": 0.0,
    "certified": True,
}


def fields(kind, before, after, retained, count=0, **others):
    names = others.pop("names", [])
    return {
        "format": "dualfluence-ledger-2",
        "kind": kind,
        "count": count,
        "time": "1970-01-01T00:00:00.000+00:00",
        "until": None,
        "model_before": before,
        "model_after": after,
        "points": "root",
        "retained": retained,
        "certificate": CLAIM,
        "how": "by hand",
        "payload": None,
        "removal": None,
        "software": {},
        "device": "none",
        "references_mode": "keep",
        "references": {"names": names, "blind": "b"},
        "references_hash": _ledger.commit_references(names, "b"),
        **others,
    }


@pytest.fixture
def path(tmp_path):
    """A ledger of three lines."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(**fields("open", "a", "a", 9))
    ledger.append(**fields("remove", "a", "b", 7, 2, names=["x", "y"]))
    ledger.append(**fields("checkpoint", "b", "c", 7))
    ledger.close()
    return path


def plain(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def rehashed(line):
    covered = {k: v for k, v in line.items() if k not in ("hash", "references")}
    return {**line, "hash": hashlib.sha256(plain(covered)).hexdigest()}


def test_a_ledger_is_what_its_description_says(path):
    before = "0" * 64
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        line = json.loads(raw)
        assert raw == plain(line)
        assert (line["sequence"], line["before"]) == (number, before)
        assert line == rehashed(line)
        before = line["hash"]
        names = plain(line["references"]["names"])
        parts = b"".join(len(p).to_bytes(8, "big") + p for p in (b"b", names))
        assert line["references_hash"] == hashlib.sha256(parts).hexdigest()
    ledger = Ledger(path)
    assert ledger.last_hash == before
    assert [line["sequence"] for line in ledger] == [1, 2, 3]
    assert not ledger.torn
    ledger.close()
    report = dfl.unlearning.verify(path, head=before)
    assert (report.valid, report.lines, report.head) == (True, 3, before)


WRITTEN = {
    "keys in another order": lambda line: json.dumps(dict(reversed(line.items()))).encode(),
    "spaces": lambda line: json.dumps(line, sort_keys=True).encode(),
    "a field twice": lambda line: plain(line)[:-1] + b',"count":2}',
    "an escape": lambda line: plain(line).replace(b"by hand", b"by \\u0068and"),
    "NaN": lambda line: plain(line).replace(b'"until":null', b'"until":NaN'),
    "no object": lambda line: plain([line]),
    "no JSON": lambda line: b"{",
    "deep": lambda line: b"[" * 100_000,
    "not UTF-8": lambda line: plain(line).replace(b"by hand", b"by h\xffnd"),
    "another hash": lambda line: plain({**line, "hash": "0" * 64}),
    "no hash": lambda line: plain({k: v for k, v in line.items() if k != "hash"}),
    "another number": lambda line: plain(rehashed({**line, "sequence": 3})),
    "another chain": lambda line: plain(rehashed({**line, "before": "0" * 64})),
    "a field more": lambda line: plain(rehashed({**line, "more": 1})),
    "a field less": lambda line: plain(rehashed({k: line[k] for k in line if k != "how"})),
    "a later format": lambda line: plain(rehashed({**line, "format": "dualfluence-ledger-3"})),
    "a number as text": lambda line: plain(rehashed({**line, "retained": "7"})),
    "references as a list": lambda line: plain({**line, "references": []}),
    "references as text": lambda line: plain({**line, "references": "x"}),
    "other names": lambda line: plain({**line, "references": {"names": ["x"], "blind": "b"}}),
    "another blind": lambda line: plain({**line, "references": {"names": ["x", "y"], "blind": ""}}),
    "more in references": lambda line: plain(
        {**line, "references": {**line["references"], "more": 1}}
    ),
    "less in references": lambda line: plain({**line, "references": {"blind": "b"}}),
    "blind of a number": lambda line: plain({**line, "references": {"names": [], "blind": 1}}),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_line_written_otherwise_is_refused_with_its_number(path, how):
    raw = path.read_bytes().splitlines()
    raw[1] = WRITTEN[how](json.loads(raw[1]))
    path.write_bytes(b"\n".join(raw) + b"\n")
    with pytest.raises(LedgerError, match=r"ledger: line 2 "):
        Ledger(path)
    report = dfl.unlearning.verify(path)
    assert not report.valid
    assert all(problem.startswith("line 2 ") for problem in report.problems)
    assert report.lines == 1 or how == "a number as text"


def test_what_follows_the_last_end_is_dropped_and_the_rest_kept(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn":')
    assert not dfl.unlearning.verify(path).valid
    ledger = Ledger(path)
    assert ledger.torn
    assert len(ledger.lines) == 3
    assert path.read_bytes() == whole
    line = ledger.append(**fields("retrain", "c", "d", 7))
    assert (line["sequence"], line["before"]) == (4, json.loads(whole.splitlines()[2])["hash"])
    ledger.close()
    assert path.read_bytes() == whole + plain(line) + b"\n"
    assert dfl.unlearning.verify(path).valid


def test_a_line_that_cannot_be_written_is_not_there(path, monkeypatch):
    ledger, whole = Ledger(path), path.read_bytes()

    def half(raw):
        ledger._file.write(raw[:10])
        raise OSError(28, "no space")

    monkeypatch.setattr(ledger, "_write", half)
    with pytest.raises(LedgerError, match="not recorded and not applied: the disk is full"):
        ledger.append(**fields("retrain", "c", "d", 7))
    assert path.read_bytes() == whole
    assert len(ledger.lines) == 3
    with pytest.raises(LedgerError, match="another writer"):
        Ledger(path)
    ledger.close()


def test_short_writes_are_finished(path, monkeypatch):
    ledger = Ledger(path)
    real = ledger._file

    class Short:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, raw):
            return real.write(raw[:7])

    monkeypatch.setattr(ledger, "_file", Short())
    ledger.append(**fields("retrain", "c", "d", 7))
    ledger.close()
    assert dfl.unlearning.verify(path).lines == 4


CONTRADICTIONS = {
    "another model": {"model_before": "x"},
    "nothing removed": {"model_after": "b", "kind": "remove", "count": 1, "retained": 6},
    "nobody left out": {"kind": "remove", "count": 1},
    "too many left out": {"kind": "remove", "count": 1, "retained": 5},
    "all left out": {"kind": "remove", "count": 7, "retained": 0},
    "nobody added": {"kind": "add", "count": 1},
    "points lost": {"kind": "relabel", "count": 1, "retained": 6},
    "points lost on the way": {"retained": 6},
    "other rows": {"points": "other"},
    "opened again": {"kind": "open"},
    "a count of halves": {"kind": "relabel", "count": 0.5},
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradiction_is_neither_written_nor_read(path, what):
    raw = path.read_bytes().splitlines()
    line = {**json.loads(raw[2]), **CONTRADICTIONS[what]}
    path.write_bytes(b"\n".join([*raw[:2], plain(rehashed(line))]) + b"\n")
    with pytest.raises(LedgerError, match="line 3 contradicts"):
        Ledger(path)
    assert not dfl.unlearning.verify(path).valid
    path.write_bytes(b"\n".join(raw[:2]) + b"\n")
    ledger, whole = Ledger(path), path.read_bytes()
    given = {k: v for k, v in line.items() if k not in ("sequence", "before", "hash")}
    with pytest.raises(LedgerError, match="not recorded and not applied"):
        ledger.append(**given)
    assert path.read_bytes() == whole
    ledger.close()


def test_all_points_but_one_may_go(path):
    ledger = Ledger(path)
    ledger.append(**fields("remove", "c", "d", 1, 6))
    ledger.close()
    assert dfl.unlearning.verify(path).valid
    assert Ledger(path).lines[-1]["retained"] == 1


@pytest.mark.parametrize("kind", ["relabel", "correct", "add"])
def test_requests_that_bring_rows_may_change_them_and_the_number(path, kind):
    ledger, more = Ledger(path), 2 if kind == "add" else 0
    ledger.append(**fields(kind, "c", "d", 7 + more, 2, points="other"))
    # A label that was right already changes nothing, and may.
    ledger.append(**fields("relabel", "d", "d", 7 + more, 1, points="other"))
    ledger.close()
    assert dfl.unlearning.verify(path).valid
    assert len(_ledger.read_lines(path)[0]) == 5


def test_references_are_erased_where_asked_and_the_chain_stays(path):
    before = [json.loads(line) for line in path.read_bytes().splitlines()]
    for number in (0, 4, -1):
        with pytest.raises(ValueError, match=f"no line {number} in 3 lines"):
            dfl.unlearning.erase_references(path, [number])
    dfl.unlearning.erase_references(path, [2])
    after = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert after == [before[0], {**before[1], "references": None}, before[2]]
    assert dfl.unlearning.verify(path).valid
    ledger = Ledger(path)  # nobody holds it
    ledger.close()


def test_hashes_of_parts_and_names_are_those_of_their_definition():
    assert (
        _ledger.digest_of_parts(b"ab", b"c")
        != _ledger.digest_of_parts(b"a", b"bc")
        != _ledger.digest_of_parts(b"abc")
    )
    want = hmac.new(b"salt", "Zoë".encode(), hashlib.sha256).hexdigest()
    assert _ledger.reference(b"salt", "Zoë") == want
    assert _ledger.reference(b"pepper", "Zoë") != want


def test_a_name_is_a_short_text_or_a_whole_number():
    assert [as_name(v) for v in ("a", 3, np.int64(4), "é" * 256)] == ["a", "3", "4", "é" * 256]
    for wrong in (True, np.True_, 1.0, None, b"a", ["a"]):
        with pytest.raises(TypeError, match="text or a whole number"):
            as_name(wrong)
    for wrong in ("", "a" * 257):
        with pytest.raises(ValueError, match="1 to 256 characters"):
            as_name(wrong)
    assert as_names(3, None) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="for each of 2 points, got 3"):
        as_names(2, ["a", "b", "c"])
    with pytest.raises(ValueError, match="'a' comes twice"):
        as_names(3, ["a", "b", "a"])


def test_a_name_stands_for_one_row_until_it_is_removed():
    ids = Ids(["a", "b", "c", "d"], b"salt", np.array([1.0, 0.0, 0.5, 2.0]))
    assert ids.rows(["c", "a"]) == [2, 0]
    assert ids.rows_of([ids.reference("d")]) == [3]
    for names, error, words in (
        ([], ValueError, "at least one"),
        (["a", "a"], ValueError, "twice"),
        (["a", "e"], KeyError, "no point is called 'e'"),
        (["b"], KeyError, "'b' was removed"),  # it has no weight
    ):
        with pytest.raises(error, match=words):
            ids.rows(names)
    ids.check_new(["e", "f"])
    for names in ([], ["e", "e"], ["a"], ["b"]):
        with pytest.raises(ValueError, match=r"ids: "):
            ids.check_new(names)
    ids.add(["e", "f"], 4)
    ids.move([0, 4], 6)
    assert ids.rows(["a", "e", "f", "c"]) == [6, 7, 5, 2]
    ids.remove([6, 5])
    for name in ("a", "f"):
        with pytest.raises(KeyError, match="was removed"):
            ids.rows([name])
        with pytest.raises(ValueError, match="a name can be used only once"):
            ids.check_new([name])
    assert ids.rows(["e", "c", "d"]) == [7, 2, 3]


def test_contents_of_a_request_come_back_whole_or_not_at_all(tmp_path):
    path = tmp_path / "request-00000007.npz"
    arrays = {"x": np.arange(6.0).reshape(2, 3), "targets": np.array([1, 0])}
    known = write_payload(path, [4, 2], ["e", "f"], arrays)
    assert known == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_payload(path, known, 7)
    assert found is not None
    rows, names, back = found
    assert (rows, names) == ([4, 2], ["e", "f"])
    assert set(back) == {"x", "targets"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    assert read_payload(path, None, 7) is None
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(LedgerError, match=r"contents of line 7, was changed"):
        read_payload(path, known, 7)
    path.unlink()
    with pytest.raises(LedgerError, match=r"contents of line 7, is missing"):
        read_payload(path, known, 7)


def test_a_request_is_the_edit_of_its_name():
    x, y = np.ones((2, 3)), np.zeros((2, 1))
    (edit,) = edits_of("remove", [3, 1], {})
    assert isinstance(edit, Remove)
    assert edit.indices.tolist() == [3, 1]
    (edit,) = edits_of("relabel", [3, 1], {"targets": y})
    assert isinstance(edit, Relabel)
    np.testing.assert_array_equal(edit.targets, y)
    (edit,) = edits_of("correct", [3, 1], {"x": x})
    assert isinstance(edit, Replace)
    assert edit.targets is None
    (edit,) = edits_of("correct", [3, 1], {"x": x, "targets": y})
    np.testing.assert_array_equal(edit.targets, y)
    (edit,) = edits_of("add", [], {"x": x, "targets": y})
    assert isinstance(edit, Add)
    np.testing.assert_array_equal(edit.x, x)
    with pytest.raises(LedgerError, match="'swap' is not a request"):
        edits_of("swap", [], {})
