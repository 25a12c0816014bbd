"""Can this server show what the run is after? Checked before the first request, from what the server says."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from kvwitness.collectors.server_info import ServerInfo
from kvwitness.tracer.protocol.options import AbcOptions, Api, Order
from kvwitness.tracer.protocol.workload import cached_tokens, reusable_tokens

LOAD_BACK_THRESHOLD: Final = 10
"""SGLang loads nothing back from L2 when fewer tokens than this would be loaded."""
FILLS_AIMED_AT: Final = 16
LEAST_MEMORY: Final = 1 << 30
"""Bytes of RAM below which a machine begins to swap ..."""
LEAST_SHARE: Final = 50
"""... or the total over this, whichever is more."""
LONGEST_FILL: Final = 16384
"""On a large pool the unrelated prompts grow up to this many tokens, so that a few dozen are enough."""


class Severity(StrEnum):
    """``stop``: the run would prove nothing. ``warn``: it may still, and the line says what to expect."""

    STOP = "stop"
    WARN = "warn"


class Finding(msgspec.Struct, frozen=True):
    """One thing to know, as one line for a person. ``code`` names the check."""

    severity: Severity
    code: str
    message: str


class Room(msgspec.Struct, frozen=True):
    """What was measured and is not in the settings. None: could not be."""

    host_tokens: int | None = None
    """Size of L2, as the server's metrics tell it."""
    memory_available: int | None = None
    """Bytes of RAM that are left on the server's machine ..."""
    memory_total: int | None = None
    """... of so many."""


def check_fit(options: AbcOptions, server: ServerInfo, room: Room | None = None) -> tuple[Finding, ...]:
    """Everything that stands in the way, the stops first. A setting that the server does not report passes."""
    measured = room or Room()
    host = measured.host_tokens or server.host_tokens
    found = [
        *_cache(options, server),
        *_lengths(options, server),
        *_pools(options, server, host),
        *_together(options, server),
        *_ranks(options, server),
        *_memory(measured),
        *_reports(options, server),
    ]
    if server.unknown:
        found.append(_warn("unknown", f"the server does not report {', '.join(server.unknown)}: not checked"))
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.STOP))


def _reports(options: AbcOptions, server: ServerInfo) -> Iterator[Finding]:
    """What the server could tell as a second witness."""
    if server.metrics_enabled is False:
        yield _warn("metrics_off", "metrics are off, so the counters cannot confirm it: use --enable-metrics")
    if server.raw_server.get("enable_cache_report") is False:
        what = (
            "its answers carry no cached tokens"
            if options.api is not Api.GENERATE
            else "its answers may not name tiers"
        )
        yield _warn("cache_report_off", f"the server's cache report is off, {what}: use --enable-cache-report")


def _memory(room: Room) -> Iterator[Finding]:
    available, total = room.memory_available, room.memory_total
    if available is None or total is None:
        return
    least = max(LEAST_MEMORY, total // LEAST_SHARE)
    if available < least:
        yield _warn(
            "memory_low",
            f"{available / 2**30:.1f} GiB of RAM are left for system and model, less than {least / 2**30:.1f}: "
            "times will vary; make the host pool smaller (--hicache-ratio, --hicache-size)",
        )


def _together(options: AbcOptions, server: ServerInfo) -> Iterator[Finding]:
    """B can only be an L1 hit when L1 holds all prefixes of a wave at once."""
    device, page = server.max_total_num_tokens, server.page_size or 1
    if device is None or options.wave == 1:
        return
    each = cached_tokens(options.longest_prefix + options.question_tokens, options.output_tokens, page) + 2 * page
    if options.wave * each > device:
        setting = "--order rounds" if options.order is Order.SERIES else "fewer --clients"
        yield _stop(
            "wave_above_pool",
            f"{options.wave} prefixes at once need {options.wave * each} tokens, L1 holds {device}: "
            f"use {setting}, or a larger --max-total-tokens of the server",
        )


def fill_length(options: AbcOptions, server: ServerInfo) -> int:
    """Length of an unrelated prompt: as asked, else as long as A, or longer when the pool is much larger."""
    if options.fill_tokens is not None:
        return options.fill_tokens
    pool = server.max_total_num_tokens or 0
    longest = min(LONGEST_FILL, server.max_req_input_len or LONGEST_FILL)
    return max(options.longest_prefix + options.question_tokens, min(pool // FILLS_AIMED_AT, longest))


def auto_fills(tokens: int, fill_tokens: int) -> int:
    """Unrelated prompts that together need more than ``tokens`` tokens of room, and one more."""
    return tokens // fill_tokens + 1 + 1


def _cache(options: AbcOptions, server: ServerInfo) -> Iterator[Finding]:
    hicache = server.hicache
    if options.control:
        if hicache.enabled:
            yield _warn("control_with_hicache", "the control run expects a server without HiCache, this one has it on")
    elif hicache.enabled is False:
        yield _stop("hicache_off", "HiCache is off, there is no L2: start the server with --enable-hierarchical-cache")
    if server.radix_cache_disabled:
        yield _stop("radix_cache_off", "the radix cache is off (--disable-radix-cache), nothing is ever reused")
    if server.is_generation is False:
        yield _stop("not_generation", "the server's model does not generate, it has no KV cache to reuse")
    if hicache.memory_mode == "buffer_only":
        yield _warn("buffer_only", "host memory is only a buffer for storage (buffer_only): there are no L2 reads")
    if hicache.storage_backend is not None and not options.control:
        backend = hicache.storage_backend
        yield _warn("storage_attached", f"storage backend {backend!r} is attached: C may be served from L3 instead")
    if server.disaggregation_mode not in (None, "null"):
        mode = server.disaggregation_mode
        yield _warn("disaggregated", f"this is a {mode} server of a disaggregated pair: it sees half of each request")


def _lengths(options: AbcOptions, server: ServerInfo) -> Iterator[Finding]:
    prompt = options.longest_prefix + options.question_tokens
    page = server.page_size or 1
    if options.prefix_tokens < page:
        yield _stop(
            "prefix_below_page",
            f"the prefix of {options.prefix_tokens} tokens is shorter than one page ({page}): it is never cached",
        )
    elif reusable_tokens(prompt, page) < LOAD_BACK_THRESHOLD:
        yield _stop(
            "prefix_below_threshold",
            f"a repeat could reuse {reusable_tokens(prompt, page)} tokens, and SGLang loads nothing back from L2 "
            f"below {LOAD_BACK_THRESHOLD}: use a longer prefix",
        )
    longest = max(prompt, options.fill_tokens or 0)
    if server.max_req_input_len is not None and longest > server.max_req_input_len:
        yield _stop(
            "prompt_too_long", f"a prompt has {longest} tokens, the server takes {server.max_req_input_len} at most"
        )
    elif server.max_total_num_tokens is not None and longest + options.output_tokens > server.max_total_num_tokens:
        yield _stop(
            "prompt_above_pool",
            f"a prompt needs {longest + options.output_tokens} tokens, L1 holds {server.max_total_num_tokens}",
        )


def _pools(options: AbcOptions, server: ServerInfo, host: int | None) -> Iterator[Finding]:
    device, page = server.max_total_num_tokens, server.page_size or 1
    if device is None or options.flush_between_bc:
        return
    prompt = options.longest_prefix + options.question_tokens
    fill = fill_length(options, server)
    each = cached_tokens(fill, options.output_tokens, page)
    own = cached_tokens(prompt, options.output_tokens, page) + page
    if options.fills is not None and own + (options.fills + options.warmups) * each <= device:
        yield _warn(
            "fits_in_l1",
            f"everything that is sent fits in L1 ({device} tokens): nothing is evicted, so C is an L1 hit; "
            f"{auto_fills(device, fill)} fills would not fit",
        )
    if host is None or options.control:
        return
    if host < own:
        yield _warn(
            "l2_below_prompt",
            f"L2 holds about {host} tokens, less than one prompt ({own}): raise --hicache-ratio or --hicache-size",
        )
    elif host <= device:
        yield _warn(
            "l2_not_larger",
            f"L2 (about {host} tokens) is not larger than L1 ({device}), so that it holds little that L1 does not: "
            "raise --hicache-ratio or --hicache-size",
        )
    elif not options.evict_host and host < device + own:
        yield _warn(
            "l2_small",
            f"L2 (about {host} tokens) is hardly larger than L1 ({device}): the fills may displace A in L2; "
            "raise --hicache-ratio or --hicache-size",
        )


def _ranks(options: AbcOptions, server: ServerInfo) -> Iterator[Finding]:
    ranks = server.dp_size
    if ranks is None:
        return
    if options.dp_rank is not None and not 0 <= options.dp_rank < ranks:
        yield _stop("dp_rank_range", f"there is no data-parallel rank {options.dp_rank}, the server has {ranks}")
    elif options.dp_rank is None and ranks > 1:
        yield _stop(
            "dp_rank_missing",
            f"the server has {ranks} data-parallel ranks with a cache each: "
            f"name the one to use (--dp-rank, 0 to {ranks - 1})",
        )


def _stop(code: str, message: str) -> Finding:
    return Finding(Severity.STOP, code, message)


def _warn(code: str, message: str) -> Finding:
    return Finding(Severity.WARN, code, message)
