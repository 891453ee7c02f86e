"""An auditor with NumPy finds every change of a ledger, and the same bound."""

import ast
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.unlearning import _verify, _verify_model
from dualfluence.unlearning._documents import write_documents


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A desk's folder and model file, closed."""
    p = problems.linear_problem(16, 2, 24, "softmax", ridge=0.1)
    folder = tmp_path_factory.mktemp("desk")
    with dfl.unlearning.open(folder / "desk", cases.fit(p)) as desk:
        desk.remove([3])
        desk.remove([5, 6])
        desk.checkpoint(folder / "model.npz", include_kernel=True)
        bound = desk.certificate.distance_bound
    return p, folder, bound


def test_the_bound_is_recomputed_from_retained_points(kept):
    p, folder, bound = kept
    report = dfl.unlearning.verify(folder / "desk", folder / "model.npz")
    assert report.valid, report.summary()
    assert report.retained == 13
    # The claim is an upper bound and includes rounding.
    assert 0 < report.computed <= report.claimed == bound
    theta = cases.retrain(p, cases.without(p, [3, 5, 6]))
    alpha = np.load(folder / "model.npz")["alpha"]
    away = np.linalg.norm(np.einsum("ia,iap->p", alpha, p.J) - theta)
    assert away <= report.computed * (1 + 1e-9) + 1e-12


def test_a_kernel_of_the_auditor_is_used_instead_of_the_stored_one(kept):
    _, folder, _ = kept

    def kernel(x1, x2):
        return np.einsum("iap,jbp->iajb", x1[..., :-1], x2[..., :-1])

    own = dfl.unlearning.verify(folder / "desk", folder / "model.npz", kernel=kernel)
    stored = dfl.unlearning.verify(folder / "desk", folder / "model.npz")
    assert own.valid
    np.testing.assert_allclose(own.computed, stored.computed, rtol=1e-6)
    wrong = dfl.unlearning.verify(
        folder / "desk", folder / "model.npz", kernel=lambda a, b: 1.5 * kernel(a, b)
    )
    assert not wrong.valid


def test_a_kernel_in_float32_agrees_with_a_float64_one_to_its_own_rounding(kept, monkeypatch):
    _, folder, _ = kept
    monkeypatch.setattr(_verify_model, "BLOCK", 4)

    def kernel(x1, x2):
        exact = np.einsum("iap,jbp->iajb", x1[..., :-1], x2[..., :-1])
        return exact.astype(np.float32)

    def wrong_in_a_later_block(x1, x2):
        rows = kernel(x1, x2)
        return rows if len(rows) == 4 else rows * np.float32(1.001)

    def verify(kernel):
        return dfl.unlearning.verify(folder / "desk", folder / "model.npz", kernel=kernel)

    report, stored = verify(kernel), verify(None)
    assert report.valid, report.summary()
    assert report.computed == stored.computed
    assert "digits of K" in report.trusted[0]
    assert not verify(wrong_in_a_later_block).valid
    assert not verify(lambda a, b: kernel(a, b) * np.float32(1.5)).valid


def test_a_claim_that_is_too_small_is_found(kept, tmp_path):
    """A forged ledger whose chain is right, but whose certificate is not."""
    _, folder, _ = kept
    raw = (folder / "desk" / "ledger.jsonl").read_bytes().splitlines()
    before, forged = _verify.ZERO, []
    for line in map(json.loads, raw):
        line["certificate"]["distance_bound"] *= 1e-6
        line["before"] = before
        rest = {k: v for k, v in line.items() if k not in ("hash", "references")}
        line["hash"] = before = hashlib.sha256(_verify._text(rest)).hexdigest()
        forged.append(_verify._text(line))
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join(forged) + b"\n")
    report = dfl.unlearning.verify(tmp_path, folder / "model.npz")
    assert any("residual gives" in problem for problem in report.problems)


def test_every_one_of_500_random_changes_of_a_byte_is_found(kept, tmp_path):
    _, folder, _ = kept
    raw = (folder / "desk" / "ledger.jsonl").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / "ledger.jsonl"
    for _ in range(500):
        changed = bytearray(raw)
        place = int(rng.integers(len(raw)))
        changed[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(changed))
        assert not dfl.unlearning.verify(path).valid, place


def test_lines_left_out_or_put_in_another_order_are_found(kept, tmp_path):
    _, folder, _ = kept
    lines = (folder / "desk" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "ledger.jsonl"
    for changed in (lines[1:], lines[:1] + lines[2:], [lines[1], lines[0], *lines[2:]], []):
        path.write_bytes(b"".join(changed))
        assert not dfl.unlearning.verify(path).valid


def test_the_verifier_shares_no_code():
    """But for the reader of files, which says how large they may be."""
    names = set()
    for module in (_verify, _verify_model):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add("." * node.level + str(node.module))
    allowed = {"hashlib", "json", "math", "re", "numpy", "pathlib", "typing", "._verify_model"}
    allowed |= {".._support.archive", ".._support.files", "collections.abc", "dataclasses"}
    assert names <= allowed


def test_a_missing_package_for_signatures_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(ImportError, match=r"dualfluence\[signing\]"):
        dfl.unlearning.sign_documents(tmp_path / "papers", tmp_path / "s.sig", tmp_path / "key")


def test_a_signature_inside_of_what_it_signs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="outside the folder"):
        dfl.unlearning.sign_documents(tmp_path, tmp_path / "s.sig", tmp_path / "key")


def test_signed_documents_verify_until_they_are_changed(kept, tmp_path):
    verifying = pytest.importorskip("model_signing.verifying")
    _, folder, _ = kept
    raw = (folder / "desk" / "ledger.jsonl").read_text()
    written = write_documents(json.loads(raw.splitlines()[1]), tmp_path / "papers")
    private, public = key_pair(tmp_path)
    dfl.unlearning.sign_documents(tmp_path / "papers", tmp_path / "papers.sig", private)
    config = verifying.Config().use_elliptic_key_verifier(public_key=public)
    config.verify(tmp_path / "papers", tmp_path / "papers.sig")
    written["json"].write_text(written["json"].read_text() + " ")
    with pytest.raises(ValueError, match="mismatch"):
        config.verify(tmp_path / "papers", tmp_path / "papers.sig")


def key_pair(folder):
    """Files of a private and a public key."""
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    forms = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key, paths = ec.generate_private_key(ec.SECP256R1()), (folder / "key", folder / "key.pub")
    secret = (forms.PrivateFormat.PKCS8, forms.NoEncryption())
    paths[0].write_bytes(key.private_bytes(forms.Encoding.PEM, *secret))
    form = (forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    paths[1].write_bytes(key.public_key().public_bytes(*form))
    return paths


def test_documents_say_what_is_not_covered(kept, tmp_path):
    _, folder, _ = kept
    raw = (folder / "desk" / "ledger.jsonl").read_text()
    lines = [json.loads(line) for line in raw.splitlines()]
    written = write_documents(lines[1], tmp_path)
    assert json.loads(written["json"].read_text())["line"] == lines[1]
    page = written["html"].read_text()
    for word in ("Not covered", "backups", "published", "not linear", lines[1]["hash"]):
        assert word in page


def test_rows_of_both_kinds_of_kernels_are_multiplied():
    rng = np.random.default_rng(0)
    n, c = 5, 3
    v, shared, own = (
        rng.normal(size=(n, c)),
        rng.normal(size=(2, n)),
        rng.normal(size=(2 * c, n * c)),
    )
    np.testing.assert_allclose(_verify_model._times(shared, v), shared @ v)
    want = np.einsum("iajb,jb->ia", own.reshape(2, c, n, c), v)
    np.testing.assert_allclose(_verify_model._times(own, v), want)
