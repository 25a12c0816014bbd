"""What a server says about itself, and that no credential of it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwitness.collectors.redaction import redact, redact_command, redact_text
from kvwitness.collectors.server_info import ServerInfoUnavailable, fetch_server_info

from .small_server import SmallServer

SERVER = {
    "version": "0.5.23",
    "page_size": 16,
    "max_total_num_tokens": 4096,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_size": 0,
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": None,
    "api_key": "s3cret",
    "admin_api_key": None,
    "launch_command": "--model-path m --api-key s3cret --port 1",
    "internal_states": [{"admin_api_key": "s3cret", "max_total_tokens": 4096}],
}
MODEL = {"model_path": "m", "model_type": "qwen2", "is_generation": True}


def answers(prefix: str = "/") -> dict[str, tuple[int, str]]:
    return {f"{prefix}server_info": (200, json.dumps(SERVER)), f"{prefix}model_info": (200, json.dumps(MODEL))}


def test_the_facts_of_a_server() -> None:
    with SmallServer(answers()) as server:
        info = fetch_server_info(server.url)
    assert (info.version, info.page_size, info.max_total_num_tokens) == ("0.5.23", 16, 4096)
    assert (info.model_type, info.is_generation) == ("qwen2", True)
    assert (info.hicache.enabled, info.hicache.write_policy, info.hicache.storage_backend) == (
        True,
        "write_through",
        None,
    )
    assert info.host_tokens == 16384
    assert server.asked == ["/server_info", "/model_info"]


def test_older_releases_answer_at_the_older_paths() -> None:
    with SmallServer(answers("/get_")) as server:
        info = fetch_server_info(server.url)
    assert (info.version, info.model_type) == ("0.5.23", "qwen2")


def test_what_the_server_does_not_say_is_listed_and_not_guessed() -> None:
    with SmallServer(answers()) as server:
        info = fetch_server_info(server.url)
    assert {"dp_size", "chunked_prefill_size", "vocab_size"} <= set(info.unknown)
    # Reported as null is an answer.
    assert "hicache_storage_backend" not in info.unknown


def test_half_an_answer_is_better_than_none() -> None:
    with SmallServer({"/model_info": (200, json.dumps(MODEL)), "/server_info": (500, "boom")}) as server:
        info = fetch_server_info(server.url)
    assert info.model_type == "qwen2"
    assert "/server_info: HTTP 500" in info.unknown


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with SmallServer({}) as server:
        url = server.url
    with pytest.raises(ServerInfoUnavailable, match=url):
        fetch_server_info(url, timeout_s=2)


def test_the_vocabulary_of_a_local_model_is_read_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 1024}}))
    model = {"/model_info": (200, json.dumps({**MODEL, "model_path": str(tmp_path)}))}
    with SmallServer({**answers(), **model}) as server:
        info = fetch_server_info(server.url)
    assert info.vocab_size == 1024
    assert "vocab_size" not in info.unknown


def test_no_credential_is_kept_anywhere_in_the_answer() -> None:
    with SmallServer(answers()) as server:
        info = fetch_server_info(server.url)
    assert "s3cret" not in json.dumps(info.raw_server)
    # That no key is set, and what only looks like one, stays readable.
    assert info.raw_server["admin_api_key"] is None
    assert info.raw_server["internal_states"][0]["max_total_tokens"] == 4096


@pytest.mark.parametrize(
    "name", ["api_key", "admin_api_key", "ssl_keyfile_password", "HF_TOKEN", "aws_secret_access_key", "watermark_key_b"]
)
def test_secret_names(name: str) -> None:
    assert redact({name: "x"}) == {name: "<redacted>"}


@pytest.mark.parametrize(
    "name", ["max_total_tokens", "bos_token", "tokenizer_path", "ssl_keyfile", "page_size", "seed"]
)
def test_names_that_only_look_secret(name: str) -> None:
    assert redact({name: "x"}) == {name: "x"}


def test_command_lines_in_every_spelling() -> None:
    command = ["python", "--api-key", "one", "--admin-api-key=two", "HF_TOKEN=three", "--port", "1"]
    assert redact_command(command) == (
        "python",
        "--api-key",
        "<redacted>",
        "--admin-api-key=<redacted>",
        "HF_TOKEN=<redacted>",
        "--port",
        "1",
    )
    assert redact_text("serve --api-key 'a b' --port 1") == "serve --api-key <redacted> --port 1"


def test_secrets_inside_json_texts_and_addresses() -> None:
    assert redact({"extra_config": '{"access_key": "x", "size": 3}'}) == {
        "extra_config": '{"access_key": "<redacted>", "size": 3}'
    }
    assert redact_text("redis://user:pass@host:1/0") == "redis://<redacted>@host:1/0"
