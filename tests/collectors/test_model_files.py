"""Which model it was: from the files of a model's folder, and what is said to be unknown."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvwitness.collectors import model_files as module
from kvwitness.collectors.model_files import model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "models--x--y" / "snapshots" / "abc123"
    root.mkdir(parents=True)
    (root / "model.safetensors").write_bytes(b"weights")
    (root / "tokenizer.json").write_text("{}")
    (root / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    return root


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_folder_tells_all(folder: Path) -> None:
    found = model_files({"version": "0.5.9+gabcdef12", "model_path": str(folder)}, {}, local=True)
    assert found.unknown == ()
    assert (found.revision, found.sglang_commit) == ("abc123", "abcdef12")
    assert found.tokenizer_sha256 == sha("{}")
    assert found.chat_template_sha256 == sha("{{ x }}")
    assert found.weights_sha256 == sha(f"{sha('weights')}  model.safetensors\n")


def test_a_link_of_a_model_cache_is_named_by_its_hash(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / ("f" * 64)
    blob.write_bytes(b"large")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(blob)
    found = model_files({"model_path": str(folder)}, {}, local=True)
    assert found.weights_sha256 == sha(f"{'f' * 64}  model.safetensors\n")


def test_what_cannot_be_read_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WEIGHTS_READ_AT_MOST", 3)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("not json")
    found = model_files({"model_path": str(folder), "version": "0.5.9"}, {}, local=True)
    assert (found.weights_sha256, found.tokenizer_sha256, found.chat_template_sha256) == (None, None, None)
    assert [line.partition(":")[0] for line in found.unknown] == [
        "sglang_commit",
        "weights",
        "tokenizer",
        "chat_template",
    ]


@pytest.mark.parametrize("local", [True, False])
def test_a_model_that_is_elsewhere(local: bool) -> None:
    found = model_files({}, {"model_path": "org/name"}, local=local)
    assert found.path == "org/name" and found.weights_sha256 is None
    assert len(found.unknown) == 5


def test_weights_that_the_server_made_up(folder: Path) -> None:
    found = model_files({"model_path": str(folder), "load_format": "dummy", "revision": "main"}, {}, local=True)
    assert (found.weights_sha256, found.revision) == ("random", "main")
