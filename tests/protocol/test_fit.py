"""What is checked before the first request: one line each, and nothing stops a run without a reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvwitness.collectors.server_info import ServerInfo, read_server_info
from kvwitness.tracer.protocol.fit import Room, Severity, check_fit
from kvwitness.tracer.protocol.options import AbcOptions, Order

from .fake_sglang import FakeSglang

MODEL = {"model_path": "/models/tiny", "model_type": "qwen2", "is_generation": True}


def server(**changes: Any) -> ServerInfo:
    answer = FakeSglang(info=changes).server_info()
    return read_server_info("http://127.0.0.1:1", answer, MODEL)


@pytest.mark.parametrize(
    ("code", "changes", "options"),
    [
        ("hicache_off", {"enable_hierarchical_cache": False}, {}),
        ("radix_cache_off", {"disable_radix_cache": True}, {}),
        ("prefix_below_page", {"page_size": 64}, {"prefix_tokens": 40}),
        ("prefix_below_threshold", {"page_size": 1}, {"prefix_tokens": 5, "question_tokens": 2}),
        ("prompt_too_long", {}, {"prefix_tokens": 5000}),
        ("prompt_above_pool", {"max_req_input_len": ...}, {"prefix_tokens": 5000}),
        ("dp_rank_missing", {"dp_size": 2}, {}),
        ("dp_rank_range", {"dp_size": 2}, {"dp_rank": 2}),
        ("wave_above_pool", {}, {"repeats": 4, "clients": 4}),
        ("wave_above_pool", {}, {"repeats": 3, "order": Order.SERIES}),
    ],
)
def test_a_run_that_would_prove_nothing_is_stopped(code: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    findings = check_fit(AbcOptions(**options), server(**changes))
    (stop,) = [finding for finding in findings if finding.severity is Severity.STOP]
    assert stop.code == code
    assert "\n" not in stop.message
    assert findings[0] is stop


@pytest.mark.parametrize(
    ("code", "changes", "options"),
    [
        ("metrics_off", {"enable_metrics": False}, {}),
        ("buffer_only", {"hicache_host_memory_mode": "buffer_only"}, {}),
        ("storage_attached", {"hicache_storage_backend": "file"}, {}),
        ("disaggregated", {"disaggregation_mode": "prefill"}, {}),
        ("fits_in_l1", {"max_total_num_tokens": 100000, "max_req_input_len": 99000}, {"fills": 3}),
        ("l2_small", {"hicache_ratio": 1.1}, {}),
        ("l2_not_larger", {"hicache_ratio": 0.9}, {}),
        ("cache_report_off", {"enable_cache_report": False}, {}),
        ("l2_below_prompt", {"hicache_ratio": 0.2}, {}),
        ("control_with_hicache", {}, {"control": True}),
    ],
)
def test_what_may_disappoint_is_told_and_does_not_stop(
    code: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    findings = check_fit(AbcOptions(**options), server(**changes))
    assert [finding.code for finding in findings] == [code]
    assert findings[0].severity is Severity.WARN


def test_a_server_that_fits_gets_no_line() -> None:
    assert check_fit(AbcOptions(), server()) == ()


def test_a_server_that_tells_nothing_is_not_stopped_for_it() -> None:
    findings = check_fit(AbcOptions(), read_server_info("http://127.0.0.1:1", {}, {}))
    assert [(finding.severity, finding.code) for finding in findings] == [(Severity.WARN, "unknown")]
    assert "page_size" in findings[0].message


def test_what_is_measured_counts_more_than_what_is_set() -> None:
    findings = check_fit(AbcOptions(), server(hicache_size=1), Room(host_tokens=4000))
    assert [finding.code for finding in findings] == ["l2_not_larger"]
    assert "--hicache-size" in findings[0].message


def test_little_memory_is_told_with_the_setting_to_change() -> None:
    (finding,) = check_fit(AbcOptions(), server(), Room(memory_available=900 << 20, memory_total=64 << 30))
    assert (finding.code, finding.severity) == ("memory_low", Severity.WARN)
    assert "0.9 GiB of RAM are left" in finding.message and "--hicache-ratio" in finding.message
    assert check_fit(AbcOptions(), server(), Room(memory_available=8 << 30, memory_total=64 << 30)) == ()
