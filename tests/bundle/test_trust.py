"""Statement, signature and RO-Crate: who says what about a bundle, and what archives read of it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement as PublishedStatement
from rocrate.rocrate import ROCrate

from kvwitness.tracer.bundle import BundleError, BundleInputs, ProblemKind, VerifyReport, verify_bundle, write_bundle
from kvwitness.tracer.bundle.layout import decode_manifest, sha256
from kvwitness.tracer.bundle.sign import sign_bundle
from kvwitness.tracer.bundle.signing import Outcome, PublicKey, make_key, read_private_key, read_public_key

from .forging import reseal
from .test_verify import rezip


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "me.pem")
    return tmp_path / "me.pem"


@pytest.fixture
def public(key: Path) -> PublicKey:
    return read_public_key(key.with_name("me.pem.pub"))


@pytest.fixture
def signed(folder: Path, key: Path) -> Path:
    sign_bundle(folder, read_private_key(key))
    return folder


def lines_of(report: VerifyReport) -> list[str]:
    return [str(problem) for problem in report.problems]


def outcome_of(report: VerifyReport) -> Outcome | None:
    return None if report.signature is None else report.signature.outcome


def edit_statement(folder: Path) -> bytes:
    """Have the statement say more than was found; the bundle's bytes of it."""
    path = folder / "statement.json"
    path.write_bytes(path.read_bytes().replace(b'"grade": "reported"', b'"grade": "confirmed"', 1))
    return path.read_bytes()


# --- the statement -------------------------------------------------------------------------------------


def test_the_statement_is_one_that_in_toto_reads(folder: Path) -> None:
    raw = (folder / "statement.json").read_bytes()
    published = PublishedStatement.copy_from_pb(json_format.Parse(raw, statement_pb2.Statement()))
    published.validate()
    statement = json.loads(raw)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    manifest = decode_manifest((folder / "manifest.json").read_bytes())
    assert {one["name"] for one in statement["subject"]} == {"manifest.json", *(one.path for one in manifest.files)}
    for subject in statement["subject"]:
        assert subject["digest"] == {"sha256": sha256((folder / subject["name"]).read_bytes())}


def test_the_statement_says_what_was_concluded_and_by_what(folder: Path) -> None:
    predicate = json.loads((folder / "statement.json").read_text())["predicate"]
    verdicts = json.loads((folder / "verdicts.json").read_text())
    assert [(v["rid"], v["sentence"]) for v in predicate["verdicts"]] == [(v["rid"], v["sentence"]) for v in verdicts]
    assert predicate["tool"]["name"] == "kvwitness"
    assert predicate["stopped"] is None


def test_a_run_that_was_stopped_is_stated_as_such(tmp_path: Path, inputs: BundleInputs) -> None:
    environment = {"run": {"id": "x", "stopped": "Ctrl-C during series C"}}
    info = write_bundle(tmp_path / "partial", msgspec.structs.replace(inputs, environment=environment))
    predicate = json.loads((info.path / "statement.json").read_text())["predicate"]
    assert predicate["stopped"] == "Ctrl-C during series C"
    assert verify_bundle(info.path).ok


def test_the_same_bundle_gives_the_same_statement(tmp_path: Path, inputs: BundleInputs) -> None:
    one, other = (write_bundle(tmp_path / name, inputs).path for name in ("one", "other"))
    assert (one / "statement.json").read_bytes() == (other / "statement.json").read_bytes()


def test_a_statement_with_other_verdicts_than_the_evidence_is_found(folder: Path) -> None:
    edit_statement(folder)
    (line,) = lines_of(verify_bundle(folder))
    assert line == "verdict: statement.json: its verdicts are not those that the bundle's evidence gives"


def test_a_statement_about_other_files_is_found(folder: Path) -> None:
    path = folder / "statement.json"
    digest = sha256((folder / "summary.md").read_bytes())
    path.write_bytes(path.read_bytes().replace(digest.encode(), b"0" * 64))
    (line,) = lines_of(verify_bundle(folder))
    assert line == "changed: summary.md: it is not the file that statement.json is about (sha256)"


def test_a_bundle_from_before_there_were_statements_is_still_read(folder: Path) -> None:
    (folder / "ro-crate-metadata.json").unlink()
    reseal(folder)
    (folder / "statement.json").unlink()
    manifest = (folder / "manifest.json").read_bytes().replace(b'"schema": 2', b'"schema": 1')
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "manifest.sha256").write_text(f"{sha256(manifest)}  manifest.json\n")
    assert verify_bundle(folder).ok


# --- the four outcomes, and what else there is ---------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True])
def test_signature_valid(
    folder: Path, tmp_path: Path, inputs: BundleInputs, key: Path, public: PublicKey, zipped: bool
) -> None:
    path = write_bundle(tmp_path / "bundle.zip", inputs).path if zipped else folder
    sign_bundle(path, read_private_key(key))
    report = verify_bundle(path, key=public)
    assert report.ok
    assert outcome_of(report) is Outcome.VALID
    assert verify_bundle(path).ok  # without the key, too
    assert outcome_of(verify_bundle(path)) is Outcome.NOT_CHECKED


def test_the_envelope_is_plain_dsse(signed: Path, key: Path) -> None:
    """Checked by hand, without the library that made it."""
    envelope = json.loads((signed / "statement.dsse.json").read_text())
    kind, payload = envelope["payloadType"].encode(), base64.b64decode(envelope["payload"])
    assert (kind, payload) == (b"application/vnd.in-toto+json", (signed / "statement.json").read_bytes())
    encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    public = load_pem_public_key(key.with_name("me.pem.pub").read_bytes())
    assert isinstance(public, Ed25519PublicKey)
    (signature,) = envelope["signatures"]
    public.verify(base64.b64decode(signature["sig"]), encoded)  # raises when it is not


def test_wrong_key(signed: Path, tmp_path: Path, public: PublicKey) -> None:
    other = make_key(tmp_path / "other.pem")
    report = verify_bundle(signed, key=other)
    assert outcome_of(report) is Outcome.WRONG_KEY
    (line,) = lines_of(report)
    assert line == (
        f"signature: statement.dsse.json: wrong key: signed by {public.keyid[:16]}, "
        f"the key that was given is {other.keyid[:16]}"
    )


def test_changed_file(signed: Path, public: PublicKey) -> None:
    (signed / "summary.md").write_text("all of it was confirmed\n")
    report = verify_bundle(signed, key=public)
    assert not report.ok
    assert outcome_of(report) is Outcome.VALID
    assert lines_of(report)[0].startswith("changed: summary.md: ")


def test_changed_file_with_fitting_hashes(signed: Path, public: PublicKey) -> None:
    (signed / "summary.md").write_text("all of it was confirmed\n")
    reseal(signed)
    report = verify_bundle(signed, key=public)
    assert outcome_of(report) is Outcome.CHANGED_STATEMENT


def test_changed_statement(signed: Path, public: PublicKey) -> None:
    edit_statement(signed)
    report = verify_bundle(signed, key=public)
    assert outcome_of(report) is Outcome.CHANGED_STATEMENT
    assert lines_of(report)[-1] == (
        f"signature: statement.dsse.json: changed statement: what {public.keyid[:16]} signed is another statement "
        "than the bundle's"
    )
    assert not verify_bundle(signed).ok


def test_changed_statement_and_payload(signed: Path, public: PublicKey) -> None:
    raw = edit_statement(signed)
    envelope = json.loads((signed / "statement.dsse.json").read_text())
    envelope["payload"] = base64.b64encode(raw).decode()
    (signed / "statement.dsse.json").write_text(json.dumps(envelope))
    report = verify_bundle(signed, key=public)
    assert outcome_of(report) is Outcome.CHANGED_STATEMENT
    assert "is not one of this statement" in lines_of(report)[-1]


def test_another_key_under_the_same_name_is_not_believed(signed: Path, tmp_path: Path, public: PublicKey) -> None:
    make_key(tmp_path / "forger.pem")
    (signed / "statement.dsse.json").unlink()
    forged = sign_bundle(signed, read_private_key(tmp_path / "forger.pem"))
    path = signed / "statement.dsse.json"
    path.write_text(path.read_text().replace(forged.key, public.keyid))
    assert not verify_bundle(signed, key=public).ok
    path.write_text(path.read_text().replace(public.keyid, "0" * 64))
    assert outcome_of(verify_bundle(signed, key=public)) is Outcome.WRONG_KEY


def test_unsigned_when_a_key_was_asked_for(folder: Path, public: PublicKey) -> None:
    report = verify_bundle(folder, key=public)
    assert outcome_of(report) is Outcome.UNSIGNED
    (line,) = lines_of(report)
    assert line.startswith("signature: statement.dsse.json: unsigned: ")
    assert verify_bundle(folder).signature is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"7", b'{"payload": 1}', b"\xff", b"[" * 100_000,
                b'{"payload": "AA==", "payloadType": "text/plain", "signatures": []}',
                b'{"payload": "AA==", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": 3}]}',
                b'{"payload": "AA==", "payloadType": "application/vnd.in-toto+json", "signatures": 3}']
)  # fmt: skip
def test_a_malformed_envelope_is_one_line(signed: Path, public: PublicKey, content: bytes) -> None:
    (signed / "statement.dsse.json").write_bytes(content)
    for asked in (public, None):
        (problem,) = verify_bundle(signed, key=asked).problems
        assert problem.kind is ProblemKind.SIGNATURE
        assert str(problem).isprintable()


def test_every_byte_of_an_envelope_counts_or_is_form(signed: Path, public: PublicKey) -> None:
    path = signed / "statement.dsse.json"
    envelope = json.loads(path.read_text())
    signature = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    for at in range(0, len(signature), 7):
        damaged = bytearray(signature)
        damaged[at] ^= 1
        envelope["signatures"][0]["sig"] = base64.b64encode(damaged).decode()
        path.write_text(json.dumps(envelope))
        assert outcome_of(verify_bundle(signed, key=public)) is Outcome.CHANGED_STATEMENT


# --- signing -------------------------------------------------------------------------------------------


def test_two_people_sign(signed: Path, tmp_path: Path, public: PublicKey) -> None:
    other = make_key(tmp_path / "other.pem")
    sign_bundle(signed, read_private_key(tmp_path / "other.pem"))
    for one in (public, other):
        assert outcome_of(verify_bundle(signed, key=one)) is Outcome.VALID
    sign_bundle(signed, read_private_key(tmp_path / "other.pem"))  # once more changes nothing
    assert len(json.loads((signed / "statement.dsse.json").read_text())["signatures"]) == 2


def test_a_bundle_that_does_not_verify_is_not_signed(folder: Path, key: Path) -> None:
    (folder / "summary.md").write_text("no\n")
    with pytest.raises(BundleError, match=r"does not verify \(changed: summary.md"):
        sign_bundle(folder, read_private_key(key))
    assert not (folder / "statement.dsse.json").exists()


def test_a_bundle_that_is_written_again_is_unsigned(signed: Path, inputs: BundleInputs, public: PublicKey) -> None:
    write_bundle(signed, inputs, replace=True)
    assert outcome_of(verify_bundle(signed, key=public)) is Outcome.UNSIGNED


def test_a_signed_zip_is_sealed_again_and_survives_another_program(
    tmp_path: Path, inputs: BundleInputs, key: Path, public: PublicKey
) -> None:
    path = write_bundle(tmp_path / "bundle.zip", inputs).path
    sign_bundle(path, read_private_key(key))
    shutil.unpack_archive(path, tmp_path / "out", "zip")
    assert verify_bundle(rezip(tmp_path / "out", tmp_path / "again.zip"), key=public).ok
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


# --- keys ----------------------------------------------------------------------------------------------


def test_a_new_key_is_its_owners_alone_and_overwrites_nothing(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    for taken in (key, key.with_name("me.pem.pub")):
        with pytest.raises(BundleError, match="something is there already"):
            make_key(key)
        assert key.read_bytes() == before
        taken.rename(taken.with_suffix(".aside"))
        taken.with_suffix(".aside").rename(taken)


def test_keys_of_openssl_are_read(tmp_path: Path, folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    openssl("genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:open", "-out", "me")
    openssl("pkey", "-in", "me", "-passin", "pass:open", "-pubout", "-out", "me.pub")
    for wrong in (None, "shut"):
        with pytest.raises(BundleError, match="the passphrase does not open it"):
            read_private_key(tmp_path / "me", wrong)
    sign_bundle(folder, read_private_key(tmp_path / "me", "open"))
    assert outcome_of(verify_bundle(folder, key=read_public_key(tmp_path / "me.pub"))) is Outcome.VALID


def test_the_wrong_half_of_a_pair_is_named(key: Path) -> None:
    with pytest.raises(BundleError, match="it is a private key"):
        read_public_key(key)
    with pytest.raises(BundleError, match="it is a public key"):
        read_private_key(key.with_name("me.pem.pub"))
    load_pem_public_key(key.with_name("me.pem.pub").read_bytes())
    (key.parent / "text").write_text("hello")
    for read in (read_public_key, read_private_key):
        with pytest.raises(BundleError, match="in PEM form"):
            read(key.parent / "text")
        with pytest.raises(BundleError, match="No such file"):
            read(key.parent / "nothing")


# --- RO-Crate ------------------------------------------------------------------------------------------


def test_the_crate_names_every_file_of_the_bundle(signed: Path) -> None:
    crate = ROCrate(signed)
    assert crate.version == "1.2"
    named = {entity.id for entity in crate.data_entities}
    there = {str(path.relative_to(signed)) for path in signed.rglob("*") if path.is_file()}
    assert there - named == {"ro-crate-metadata.json", "statement.dsse.json"}
    assert named <= there
    assert crate.datePublished is not None
    for entity in crate.data_entities:
        if "sha256" in entity:
            content = (signed / entity.id).read_bytes()
            assert (entity["sha256"], entity["contentSize"]) == (sha256(content), str(len(content)))
