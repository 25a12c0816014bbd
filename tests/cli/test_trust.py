"""Signing on the command line: what each outcome says, and its exit code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import Command


@pytest.fixture
def key(kvwitness: Command, tmp_path: Path) -> Path:
    result = kvwitness("key", "new", tmp_path / "me.pem")
    assert result.exit_code == 0
    assert f"{tmp_path / 'me.pem.pub'}: public key " in result.stdout
    return tmp_path / "me.pem"


@pytest.fixture
def public(key: Path) -> Path:
    return key.with_name("me.pem.pub")


@pytest.fixture
def signed(kvwitness: Command, bundle: Path, key: Path) -> Path:
    result = kvwitness("sign", bundle, "--key", key)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"signed: {bundle} by the key ")
    return bundle


def test_valid(kvwitness: Command, signed: Path, public: Path) -> None:
    result = kvwitness("verify", signed, "--key", public)
    assert result.exit_code == 0
    first, last = result.stdout.splitlines()
    assert first.startswith("signature valid: signed by ")
    assert last.startswith("ok: ")
    report = json.loads(kvwitness("verify", signed, "--key", public, "--json").stdout)
    assert report["signature"]["outcome"] == "valid"


def test_wrong_key(kvwitness: Command, signed: Path, tmp_path: Path) -> None:
    kvwitness("key", "new", tmp_path / "other.pem")
    result = kvwitness("verify", signed, "--key", tmp_path / "other.pem.pub")
    assert result.exit_code == 1
    assert result.stdout.startswith("signature: statement.dsse.json: wrong key: signed by ")


def test_changed_file(kvwitness: Command, signed: Path, public: Path) -> None:
    (signed / "requests.jsonl").write_text("")
    result = kvwitness("verify", signed, "--key", public)
    assert result.exit_code == 1
    assert result.stdout.startswith("changed: requests.jsonl: ")
    assert ", but 1 file is not as signed\n" in result.stdout


def test_changed_statement(kvwitness: Command, signed: Path, public: Path) -> None:
    statement = signed / "statement.json"
    statement.write_text(statement.read_text().replace("L2 reported", "L2 read confirmed"))
    result = kvwitness("verify", signed, "--key", public)
    assert result.exit_code == 1
    assert "signature: statement.dsse.json: changed statement: " in result.stdout
    assert "signature valid" not in result.stdout


def test_unsigned(kvwitness: Command, bundle: Path, public: Path) -> None:
    result = kvwitness("verify", bundle, "--key", public)
    assert result.exit_code == 1
    assert result.stdout.startswith("signature: statement.dsse.json: unsigned: ")
    assert kvwitness("verify", bundle).exit_code == 0


def test_signed_and_no_key_at_hand(kvwitness: Command, signed: Path) -> None:
    result = kvwitness("verify", signed)
    assert result.exit_code == 0
    assert result.stdout.startswith("signature not checked: signed by ")


def test_errors_of_use(kvwitness: Command, bundle: Path, key: Path, tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted"
    command = ["openssl", "genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    for arguments, said in (
        (("verify", bundle, "--key", key), "it is a private key; check with the public one"),
        (("verify", bundle, "--key", tmp_path / "none"), "No such file"),
        (("sign", bundle, "--key", tmp_path / "none"), "`kvwitness key new FILE` makes a pair"),
        (("sign", bundle, "--key", encrypted), "there is no terminal to ask on"),
        (("sign", tmp_path / "none", "--key", key), "there is no such file or folder"),
        (("key", "new", key), "something is there already"),
        (("key", "new", tmp_path / "no" / "folder"), "No such file or directory"),
    ):
        result = kvwitness(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_changed_bundle_is_not_signed(kvwitness: Command, bundle: Path, key: Path) -> None:
    (bundle / "summary.md").write_text("better\n")
    result = kvwitness("sign", bundle, "--key", key)
    assert result.exit_code == 2
    assert "it does not verify (changed: summary.md" in result.stderr
