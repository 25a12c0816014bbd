"""Fixtures for tests that drive a real SGLang server on the CPU stand.

For another test folder's conftest: `from stand_fixtures import stand_environment, start_server`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvwitness.tracer.stand.environment import StandEnvironment, ensure_environment
from kvwitness.tracer.stand.model import ModelKind, ensure_model
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.server import ServerOptions, StandServer

StartServer = Callable[..., StandServer]


@pytest.fixture(scope="session")
def stand_environment() -> StandEnvironment:
    """The stand's environment, built if it is not there (minutes, once for each machine)."""
    with reporting() as progress:
        return ensure_environment(progress)


@pytest.fixture
def start_server(stand_environment: StandEnvironment, tmp_path: Path) -> Iterator[StartServer]:
    """`start_server(model="qwen2", **options)` returns a healthy server with those `ServerOptions`.

    Each is ended when the test ends, the last one first.
    """
    with ExitStack() as servers, reporting() as progress:
        count = 0

        def start(model: ModelKind = "qwen2", **options: Any) -> StandServer:
            nonlocal count
            count += 1
            folder = ensure_model(stand_environment, progress, model)
            workdir = tmp_path / f"server{count}"
            server = StandServer(stand_environment, folder, ServerOptions(**options), workdir=workdir)
            return servers.enter_context(server)

        yield start


@dataclass(frozen=True)
class Answer:
    """What one request gave. Token counts are SGLang's own (`cached_tokens_details`)."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    host_tokens: int


def generate(url: str, token_ids: list[int], new_tokens: int = 8, **more: Any) -> Answer:
    """Send one prompt of token ids, greedy, and return what came of it."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": token_ids, "sampling_params": sampling, **more}
    with httpx.Client(trust_env=False, timeout=120.0) as client:
        reply = client.post(f"{url}/generate", json=body).raise_for_status().json()
    facts = reply["meta_info"]
    details = facts.get("cached_tokens_details") or {}
    return Answer(
        tokens=tuple(reply["output_ids"]),
        prompt_tokens=facts["prompt_tokens"],
        cached_tokens=facts["cached_tokens"],
        device_tokens=details.get("device", 0),
        host_tokens=details.get("host", 0),
    )


@dataclass(frozen=True)
class Story:
    """A and B share a prefix, the fillers evict it from the device, C is A again."""

    a: Answer
    b: Answer
    c: Answer
    fillers: tuple[Answer, ...] = field(default=())


def play_story(url: str, prefix_tokens: int = 1500, fillers: int = 4, seed: int = 1) -> Story:
    """Send A, B, `fillers` unrelated prompts of the same length, and C."""
    chance = random.Random(seed)

    def prompt() -> list[int]:
        return [chance.randrange(1, 1000) for _ in range(prefix_tokens)]

    prefix = prompt()
    a = generate(url, [*prefix, 5, 6, 7])
    b = generate(url, [*prefix, 8, 9, 10])
    filled = tuple(generate(url, prompt()) for _ in range(fillers))
    return Story(a=a, b=b, c=generate(url, [*prefix, 5, 6, 7]), fillers=filled)
