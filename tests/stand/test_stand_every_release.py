"""A real server of each older release. Not run by default: `make test-releases`."""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import NEWEST, RELEASES
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.releases, pytest.mark.timeout(1800)]

# 1,500 shared tokens in whole pages of 16, but for the page that the differing tokens end.
PREFIX_TOKENS = 1488
OLDER = [name for name in RELEASES if name != NEWEST]
# One of each way to hold and copy KV data: HiRadixCache with plugins, without, and the 0.4 threads.
SPOILED = ["0.5.17", "0.5.8", "0.4.10.post2", "0.4.9.post6"]


@dataclass(frozen=True)
class Answer:
    """What a release of any age tells of a request. Compared as text: 0.4 does not tell its token ids."""

    text: str
    cached_tokens: int
    details: dict[str, Any] = field(default_factory=dict)


def ask(url: str, token_ids: list[int]) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": token_ids, "sampling_params": sampling}
    with httpx.Client(trust_env=False, timeout=120.0) as client:
        reply = client.post(f"{url}/generate", json=body).raise_for_status().json()
    facts = reply["meta_info"]
    return Answer(reply["text"], facts["cached_tokens"], facts.get("cached_tokens_details") or {})


def play(url: str) -> tuple[Answer, Answer, Answer]:
    """A, B with A's prefix, prompts that evict it from the device, and A again: the answers to those three."""
    chance = random.Random(1)
    prefix, *fillers = ([chance.randrange(1, 1000) for _ in range(1500)] for _ in range(5))
    a, b = ask(url, [*prefix, 5, 6, 7]), ask(url, [*prefix, 8, 9, 10])
    for filler in fillers:
        ask(url, filler)
    return a, b, ask(url, [*prefix, 5, 6, 7])


def story_of(release: str, workdir: Path, faults: str = "") -> tuple[Answer, Answer, Answer]:
    with reporting() as progress:
        environment = ensure_environment(progress, release=release)
        model = ensure_model(environment, progress)
    with StandServer(environment, model, ServerOptions(faults=faults), workdir=workdir) as server:
        return play(server.url)


@pytest.mark.parametrize("release", OLDER)
def test_prefix_comes_back_from_the_host(release: str, tmp_path: Path) -> None:
    a, b, c = story_of(release, tmp_path)

    assert [a.cached_tokens, b.cached_tokens, c.cached_tokens] == [0, PREFIX_TOKENS, PREFIX_TOKENS]
    told = RELEASES[release].cached_tokens_details
    assert (b.details.get("device"), b.details.get("host")) == ((PREFIX_TOKENS, 0) if told else (None, None))
    assert (c.details.get("device"), c.details.get("host")) == ((0, PREFIX_TOKENS) if told else (None, None))
    assert c.text == a.text
    assert b.text != a.text, "the model must tell these prompts apart"


@pytest.mark.parametrize("release", SPOILED)
def test_zeroed_copies_show_in_the_answer(release: str, tmp_path: Path) -> None:
    a, _, c = story_of(release, tmp_path, faults="copy-zero:h2d")

    assert c.cached_tokens == PREFIX_TOKENS, "SGLang believes that it loaded the prefix"
    assert c.text != a.text


@pytest.mark.parametrize("release", ["0.5.17", "0.5.8"])
def test_refused_load_back_is_recomputed(release: str, tmp_path: Path) -> None:
    a, _, c = story_of(release, tmp_path, faults="load-back-too-short")

    assert c.cached_tokens == 0
    assert c.text == a.text


@pytest.mark.parametrize("release", OLDER)
def test_process_that_is_no_stand_stays_as_it_was(release: str) -> None:
    with reporting() as progress:
        environment = ensure_environment(progress, release=release)
    script = "import sys; print([name for name in sys.modules if name.startswith('kvwitness')])"
    done = subprocess.run([str(environment.python), "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
