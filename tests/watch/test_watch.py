"""What a watch counts, shows and offers, on recorded journals that grow event by event."""

from __future__ import annotations

import io
import lzma
import socket
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.tracer.judgement import judge
from kvwitness.tracer.model import CrossCheck, Tier
from kvwitness.tracer.outside import counting
from kvwitness.tracer.outside.records import Counted, Server
from kvwitness.tracer.watch.exporter import CannotListen, Exporter, Listening
from kvwitness.tracer.watch.reported import Reported
from kvwitness.tracer.watch.screen import BAR, Screen, bar
from kvwitness.tracer.watch.tallies import News, Tallies

DATA = Path(__file__).parents[1] / "outside" / "data"


@cache
def whole() -> Journal:
    return parse_journal(lzma.decompress((DATA / "0.5.23.kvwj.xz").read_bytes()), "scheduler-1-1.kvwj")


def until(count: int) -> Journal:
    """The journal when only so many events had been written."""
    return msgspec.structs.replace(whole(), events=whole().events[:count], closed=False)


def taken(tallies: Tallies, journal: Journal, now_s: float = 0.0, *, all_: bool = False, alive: bool = True) -> News:
    pids = (journal.pid,) if alive else ()
    return tallies.take(judge([journal]), [journal], now_s, pids, all_=all_)


def everything() -> News:
    return taken(Tallies(), whole(), all_=True)


def test_each_thing_is_counted_once_however_often_it_is_read() -> None:
    tallies = Tallies(settle_s=0.0)
    rounds = [taken(tallies, until(count), float(count)) for count in range(0, len(whole().events), 60)]
    rounds.append(taken(tallies, whole(), 1e6, all_=True))
    rounds.append(taken(tallies, whole(), 2e6, all_=True))
    once = everything()
    assert sum(len(news.requests) for news in rounds) == len(once.requests) == len(judge([whole()]).verdicts)
    assert sum(len(news.loads) for news in rounds) == len(once.loads) == 3
    assert sum(one.tokens for news in rounds for one in news.evictions) == sum(one.tokens for one in once.evictions)
    assert len({verdict.rid for news in rounds for verdict in news.requests}) == len(once.requests)
    assert rounds[-1] == News()


def test_a_request_waits_for_what_may_still_come() -> None:
    released = next(index for index, e in enumerate(whole().events, 1) if type(e).__name__ == "Released")
    tallies = Tallies(settle_s=3.0)
    verdicts = judge([until(released)]).verdicts
    lacking = msgspec.structs.replace(
        verdicts[0],
        ranges=tuple(
            msgspec.structs.replace(
                piece, links=tuple(msgspec.structs.replace(link, holds=False) for link in piece.links)
            )
            for piece in verdicts[0].ranges
        ),
    )
    judged = msgspec.structs.replace(judge([until(released)]), verdicts=(lacking,))
    journals = [until(released)]
    assert tallies.take(judged, journals, 10.0, (whole().pid,)).requests == ()
    assert tallies.take(judged, journals, 12.0, (whole().pid,)).requests == ()
    assert tallies.take(judged, journals, 13.0, (whole().pid,)).requests == (lacking,)


def test_a_process_that_is_gone_and_one_that_comes_are_gaps() -> None:
    tallies = Tallies()
    assert taken(tallies, until(50)).gaps == ()
    (gone,) = taken(tallies, until(50), alive=False).gaps
    assert "is not running any more and did not end its journal: nothing is known after event 50" in gone
    second = msgspec.structs.replace(until(50), instance="scheduler-2-2", pid=2)
    both = [until(50), second]
    (came,) = tallies.take(judge(both), both, 1.0, (2,)).gaps
    assert came == "scheduler 2 began to record: before that, nothing is known of its cache"


def test_lost_records_are_counted_as_they_grow() -> None:
    tallies = Tallies()
    assert taken(tallies, until(50)).lost == ()
    full = msgspec.structs.replace(until(50), lost_quota=7)
    assert [(one.what, one.records) for one in taken(tallies, full).lost] == [("quota", 7)]
    more = msgspec.structs.replace(until(50), lost_quota=9)
    assert [(one.what, one.records) for one in taken(tallies, more).lost] == [("quota", 2)]


def test_a_bar_has_its_width_and_shows_every_tier() -> None:
    tokens = {Tier.L1: 1, Tier.L2: 10_000, Tier.L3: 0, Tier.RECOMPUTED: 3, Tier.UNKNOWN: 0}
    shown = bar(tokens).plain
    assert len(shown) == BAR and shown.startswith("█") and shown.endswith("░") and shown.count("▓") == BAR - 2
    assert bar(dict.fromkeys(Tier, 0)).plain == ""


def test_the_screen_has_the_newest_requests_rates_and_gaps() -> None:
    screen = Screen("watched")
    screen.take(News(), 0.0)
    news = everything()
    odd = msgspec.structs.replace(
        news.requests[-1], checks=(CrossCheck("metrics: tokens loaded", False, "16 tokens", "32 tokens", "why"),)
    )
    screen.take(msgspec.structs.replace(news, requests=(*news.requests[:-1], odd), gaps=("a gap",)), 4.0)
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(screen.render(4.0))
    line = Counted(0, 2 * 10**9, False, {counting.LOADED: 64.0, counting.EVICTED: 32.0}, {})
    screen.outside("reported", {Tier.L2: 1, Tier.UNKNOWN: 1}, line)
    console.print(screen.render(4.0))
    text = console.export_text()
    assert "▓▓▓▓▓▓▓▓▓▓▓▓············ reported; 32 tokens/s loaded back, 16 tokens/s left L1" in text
    assert "L2 read confirmed" in text and "a gap" in text and "▓" in text
    assert "DISAGREES" in text and "32 tokens" in text
    assert f"{sum(one.tokens for one in news.loads) / 4:.0f} tokens/s loaded back" in text


def offered(address: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5) as answer:
        return str(answer.read().decode())


def test_the_metrics_have_what_was_watched() -> None:
    exporter, news = Exporter(), everything()
    with Listening(exporter, port=0) as listening:
        assert listening.address.startswith("http://127.0.0.1:")
        exporter.take(news, 1.0)
        exporter.counted(Counted(0, 1, False, {counting.CACHED_HOST: 1488.0, counting.LOADED: 1488.0}, {}))
        text = offered(listening.address)
        exporter.counted(Counted(1, 2, True, {}, {}))
        exporter.unanswered()
        after = offered(listening.address)
    confirmed = sum(v.grade.value == "confirmed" and v.tier is Tier.L2 for v in news.requests)
    assert f'kvwitness_requests_total{{grade="confirmed",tier="L2"}} {confirmed}.0' in text and confirmed
    assert f'kvwitness_prompt_tokens_total{{tier="L2"}} {sum(v.tokens.l2 for v in news.requests)}.0' in text
    assert 'kvwitness_evicted_tokens_total{cause="prefill allocation",kind="demoted",tier="L1"}' in text
    assert f"kvwitness_load_back_seconds_count {len(news.loads)}.0" in text
    (copied,) = [line for line in text.splitlines() if line.startswith("kvwitness_load_back_bytes_total ")]
    assert float(copied.split()[1]) == sum(one.bytes for one in news.loads)
    assert 'kvwitness_reported_tokens_total{tier="L2"} 1488.0' in text and "kvwitness_server_up 1.0" in text
    assert "kvwitness_server_restarts_total 1.0" in after and "kvwitness_server_up 0.0" in after
    with pytest.raises(urllib.error.URLError):
        offered(listening.address)


def test_an_address_that_is_taken_is_refused_unless_any_will_do() -> None:
    with socket.socket() as taken_one:
        taken_one.bind(("127.0.0.1", 0))
        taken_one.listen()
        port = taken_one.getsockname()[1]
        with pytest.raises(CannotListen):
            Listening(Exporter(), port=port)
        with Listening(Exporter(), port=port, any_port=True) as listening:
            assert "# HELP" in offered(listening.address)


def test_the_servers_own_numbers_are_held_against_each_other_when_they_rest() -> None:
    reported = Reported()
    reported.server(Server(1, {"tp_size": 2}, ()))

    def take(**gained: float) -> CrossCheck | None:
        names = {"host": counting.CACHED_HOST, "loaded": counting.LOADED}
        line = Counted(1, 2, False, {names[name]: value for name, value in gained.items()}, {})
        reported.take(line)
        return reported.disagreement(line)

    assert take(host=16.0) is None, "the load-back may be counted a moment later"
    assert take(loaded=32.0) is None and take() is None, "summed over two ranks it is the same"
    assert take(host=6.0) is None
    found = take()
    assert found is not None and found.agrees is False and "load-back was refused" in found.explanation
    assert take() is None, "told once"
    assert reported.sentence == "L2 reads of 22 tokens reported by the server, not confirmed"
    reported.take(Counted(1, 2, True, {}, {}))
    assert reported.by_tier == {}
