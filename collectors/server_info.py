"""What a running SGLang server says about itself over HTTP. What it does not say is listed as unknown."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import msgspec

from kvwitness.collectors.redaction import redact

SERVER_PATHS: Final = ("/server_info", "/get_server_info")
"""The second is the name in older releases; newer ones still answer it, with a warning in their log."""
MODEL_PATHS: Final = ("/model_info", "/get_model_info")

T = TypeVar("T", int, float, str, bool)


class ServerInfoUnavailable(Exception):
    """The server does not answer at all; the message says what was tried."""


class HiCacheSettings(msgspec.Struct, frozen=True):
    """The hierarchical cache as configured (None: not reported by this release)."""

    enabled: bool | None = None
    ratio: float | None = None
    """Size of L2 over size of L1; unused when ``size_gb`` is not 0."""
    size_gb: float | None = None
    write_policy: str | None = None
    io_backend: str | None = None
    mem_layout: str | None = None
    memory_mode: str | None = None
    """``cache``, or ``buffer_only``: host memory is only a way through to storage."""
    storage_backend: str | None = None
    prefetch_policy: str | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """One server. Token counts are per data-parallel rank. ``unknown`` names what could not be read."""

    url: str
    version: str | None = None
    model_path: str | None = None
    model_type: str | None = None
    is_generation: bool | None = None
    vocab_size: int | None = None
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    """Size of the device pool (L1)."""
    max_req_input_len: int | None = None
    chunked_prefill_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    radix_cache_disabled: bool | None = None
    metrics_enabled: bool | None = None
    disaggregation_mode: str | None = None
    hicache: HiCacheSettings = HiCacheSettings()
    unknown: tuple[str, ...] = ()
    raw_server: dict[str, Any] = {}
    """``/server_info`` as answered, credentials replaced."""
    raw_model: dict[str, Any] = {}
    """``/model_info`` as answered, credentials replaced."""

    @property
    def host_tokens(self) -> int | None:
        """Size of L2 in tokens as far as the settings tell (a size in GB does not)."""
        hicache = self.hicache
        if not hicache.enabled or hicache.size_gb or hicache.ratio is None or self.max_total_num_tokens is None:
            return None
        return int(self.max_total_num_tokens * hicache.ratio)


def is_loopback(url: str) -> bool:
    """Whether ``url`` names this machine itself."""
    host = httpx.URL(url).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def fetch_server_info(url: str, client: httpx.Client | None = None, timeout_s: float = 10.0) -> ServerInfo:
    """Ask the server what it is.

    Raises :class:`ServerInfoUnavailable` when nothing answers at ``url``; an answer that lacks something is
    no error, see :attr:`ServerInfo.unknown`.
    """
    if client is not None:
        return _fetch(url, client, timeout_s)
    with httpx.Client(trust_env=False) as own:
        return _fetch(url, own, timeout_s)


def _fetch(url: str, client: httpx.Client, timeout_s: float) -> ServerInfo:
    server, server_problem = _get_first(url, SERVER_PATHS, client, timeout_s)
    model, model_problem = _get_first(url, MODEL_PATHS, client, timeout_s)
    problems = tuple(problem for problem in (server_problem, model_problem) if problem)
    vocabulary = _local_vocabulary(url, model.get("model_path") or server.get("model_path"))
    return read_server_info(url, server, model, problems, vocabulary)


def read_server_info(
    url: str,
    server: Mapping[str, Any],
    model: Mapping[str, Any],
    problems: tuple[str, ...] = (),
    vocab_size: int | None = None,
) -> ServerInfo:
    """The facts in the two answers. ``vocab_size`` is used when the answers do not carry one."""
    missing: list[str] = list(problems)

    def get(name: str, kind: type[T], *sources: Mapping[str, Any]) -> T | None:
        for source in sources or (server,):
            value = source.get(name)
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                return value
        if not any(name in source for source in sources or (server,)):
            missing.append(name)
        return None

    hicache = HiCacheSettings(
        enabled=get("enable_hierarchical_cache", bool),
        ratio=get("hicache_ratio", float),
        size_gb=get("hicache_size", float),
        write_policy=get("hicache_write_policy", str),
        io_backend=get("hicache_io_backend", str),
        mem_layout=get("hicache_mem_layout", str),
        memory_mode=get("hicache_host_memory_mode", str),
        storage_backend=get("hicache_storage_backend", str),
        prefetch_policy=get("hicache_storage_prefetch_policy", str),
    )
    vocabulary = get("vocab_size", int, server, model)
    if vocabulary is None and vocab_size is not None:
        vocabulary = vocab_size
        missing.remove("vocab_size") if "vocab_size" in missing else None
    return ServerInfo(
        url=url,
        version=get("version", str),
        model_path=get("model_path", str, model, server),
        model_type=get("model_type", str, model, server),
        is_generation=get("is_generation", bool, model, server),
        vocab_size=vocabulary,
        page_size=get("page_size", int),
        max_total_num_tokens=get("max_total_num_tokens", int),
        max_req_input_len=get("max_req_input_len", int),
        chunked_prefill_size=get("chunked_prefill_size", int),
        tp_size=get("tp_size", int),
        pp_size=get("pp_size", int),
        dp_size=get("dp_size", int),
        radix_cache_disabled=get("disable_radix_cache", bool),
        metrics_enabled=get("enable_metrics", bool),
        disaggregation_mode=get("disaggregation_mode", str, server, model),
        hicache=hicache,
        unknown=tuple(missing),
        raw_server=redact(server),
        raw_model=redact(model),
    )


def _get_first(
    url: str, paths: tuple[str, ...], client: httpx.Client, timeout_s: float
) -> tuple[dict[str, Any], str | None]:
    """The JSON object at the first path that has one, or the reason why there is none."""
    problem = None
    for path in paths:
        try:
            answer = client.get(url.rstrip("/") + path, timeout=timeout_s)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ServerInfoUnavailable(f"no SGLang server answers at {url}: {error}") from error
        except httpx.HTTPError as error:
            problem = problem or f"{path}: {str(error) or type(error).__name__}"
            continue
        if answer.status_code != 200:
            problem = problem or f"{path}: HTTP {answer.status_code}"
            continue
        try:
            found = answer.json()
        except ValueError:
            problem = problem or f"{path}: not JSON"
            continue
        if isinstance(found, dict):
            return found, None
        problem = problem or f"{path}: not an object"
    return {}, problem


def _local_vocabulary(url: str, model_path: object) -> int | None:
    """Vocabulary size from the model's own config, when the server's model is a folder on this machine."""
    if not isinstance(model_path, str) or not is_loopback(url):
        return None
    try:
        config = json.loads((Path(model_path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None
