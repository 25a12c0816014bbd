"""The adapters on real servers of older releases. Not run by default: `make test-releases`."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import pytest

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.contract import HIRADIX, UNIFIED, UNIFIED_OBJ
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.server import ServerOptions, StandServer

pytestmark = [pytest.mark.stand, pytest.mark.releases, pytest.mark.timeout(1800)]

FORCE_UNIFIED = {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}
SERVERS = [
    ("0.5.17", {}, HIRADIX),
    ("0.5.17", FORCE_UNIFIED, UNIFIED),
    ("0.5.14", {}, HIRADIX),
    ("0.5.14", FORCE_UNIFIED, UNIFIED_OBJ),
    ("0.5.12.post1", {}, HIRADIX),
    ("0.5.10.post1", {}, HIRADIX),
    ("0.5.8", {}, HIRADIX),
    ("0.5.6.post2", {}, HIRADIX),
    ("0.4.10.post2", {}, HIRADIX),
    ("0.4.9.post6", {}, HIRADIX),
]


def ask(url: str, token_ids: list[int]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=120.0) as client:
        client.post(f"{url}/generate", json={"input_ids": token_ids, "sampling_params": sampling}).raise_for_status()


@pytest.mark.parametrize(("release", "environ", "family"), SERVERS)
def test_a_is_recomputed_b_read_from_l1_c_from_l2(
    release: str, environ: dict[str, str], family: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with reporting() as progress:
        environment = ensure_environment(progress, release=release)
        model = ensure_model(environment, progress)
    options = ServerOptions(extra_env={"KVWITNESS_DIR": str(data), "KVWITNESS_QUOTA_MB": "32", **environ})
    chance = random.Random(1)
    prefix, *fillers = ([chance.randrange(1, 1000) for _ in range(1500)] for _ in range(5))
    with StandServer(environment, model, options, workdir=tmp_path) as server:
        ask(server.url, [*prefix, 5, 6, 7])
        ask(server.url, [*prefix, 8, 9, 10])
        for filler in fillers:
            ask(server.url, filler)
        ask(server.url, [*prefix, 5, 6, 7])
        ask(server.url, [1, 2, 3])  # up to 0.5.8 an idle scheduler does not look whether a copy is done
    judgement = judge([read_journal(path) for path in find_journals(data) if "scheduler" in path.name])
    (facts,) = judgement.instances
    assert facts.facts.instance.family == family and facts.hook_failures == {}
    sentences = [v.sentence for v in judgement.verdicts if v.prompt_tokens == 1503]
    assert sentences == ["recomputed", "L1 read confirmed", "L2 read confirmed"]
