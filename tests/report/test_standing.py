"""What the report says when there is less to say: failed experiments, weak evidence, bundles that do not verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from journal_tools import ABC, changed, described, to_bytes
from spans.recorded import RIDS

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.model import Grade, Reason, Tier
from kvwitness.tracer.report.load import Evidence, load_evidence
from kvwitness.tracer.report.messages import words_for
from kvwitness.tracer.report.outcome import Cause, Outcome, Standing, outcome_of
from kvwitness.tracer.report.page import build_page
from kvwitness.tracer.report.render import render_html

from .pages import Parsed, markdown_of, page_of
from .runs import ENVIRONMENT, abc_records, bundle_of, record

NO_CLAIM = "The experiment failed, and nothing is claimed."


def with_c(rid: str) -> list[Any]:
    """The records of a run whose C was the request ``rid`` of the journal."""
    plain = [one for one in abc_records() if one.series in "AB"]
    return [*plain, msgspec.structs.replace(record(rid, "C", 90), cached_tokens=None, cached_tokens_details=None)]


def c_is(evidence: Evidence, **changes: Any) -> Outcome:
    """The outcome if the verdict about C were another one."""
    reason = changes.pop("range_reason", None)
    verdicts = []
    for verdict in evidence.verdicts:
        if verdict.rid == RIDS["C"]:
            if reason is not None:
                first, *rest = verdict.ranges
                first = msgspec.structs.replace(first, reason=reason, tier=Tier.RECOMPUTED, detail="as seen")
                verdict = msgspec.structs.replace(verdict, ranges=(first, *rest))
            verdict = msgspec.structs.replace(verdict, **changes)
        verdicts.append(verdict)
    return outcome_of(msgspec.structs.replace(evidence, verdicts=tuple(verdicts)))


def assert_failed(path: Path, cause: str, change: str) -> None:
    page = page_of(path)
    claim = page.text("claim")
    assert NO_CLAIM in claim
    assert "experiment failed" in claim
    assert cause in claim
    assert change in claim
    assert "confirmed for" not in claim
    assert "No reuse, of any tier, is claimed" in page.text("not_claimed")
    text = markdown_of(path)
    assert NO_CLAIM in text and cause in text and change in text


def test_c_still_in_l1(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", with_c(RIDS["C2"]))
    assert_failed(path, "still in L1 in 1 of 1 requests", "Send more or longer prompts between B and C")


def test_s13_c_is_another_prompt_by_the_digests(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", with_c(RIDS["fill 1"]))
    assert_failed(path, "C's prompt is not A's in 1 of 1 requests", "Send the same prompt as A")
    assert "it differs first in one of the tokens 0 to 15 (page 0)" in page_of(path).text("claim")


def test_s13_c_differs_in_one_token_of_the_prompts_that_were_kept(tmp_path: Path) -> None:
    """What it read from L2 up to there is seen, and shows nothing about A's prompt."""
    kept = tuple(range(1503))
    ids = {"A": kept, "C": (*kept[:700], 9999, *kept[701:])}
    records = [msgspec.structs.replace(one, prompt_ids=ids.get(one.series, ())) for one in abc_records()]
    path = bundle_of(tmp_path / "b", records)
    assert_failed(path, "C's prompt is not A's in 1 of 1 requests", "Send the same prompt as A")
    where = f"request {RIDS['C']} is not request {RIDS['A']} again: it differs first in token 700 (page 43)"
    assert where in page_of(path).text("claim") and where in markdown_of(path)


def test_s13_c_has_another_hash_and_no_journal(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", abc_records(prompt_sha256="9" * 64), journals=())
    assert_failed(path, "C's prompt is not A's in 1 of 1 requests", "Send the same prompt as A")
    assert "another prompt was sent (by its hash)" in page_of(path).text("claim")


def test_c_never_sent(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "run": {"stopped": "interrupted by the user after 3 requests"}}
    records = [one for one in abc_records() if one.series in "AB"]
    path = bundle_of(tmp_path / "b", records, environment=environment)
    assert_failed(path, "C was never sent", "See why the run stopped, and go on with it")
    stopped = "The run did not reach its end: interrupted by the user after 3 requests"
    assert stopped in page_of(path).text("claim") and stopped in markdown_of(path)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (Reason.LEFT_L2_BEFORE_READ, Cause.LEFT_L2),
        (Reason.NEVER_BACKED_UP, Cause.NEVER_BACKED_UP),
        (Reason.PROMISED_NOT_LOADED, Cause.NOT_LOADED),
        (Reason.RESIDENT_NOT_MATCHED, Cause.NOT_MATCHED),
        (Reason.RESIDENT_ELSEWHERE, Cause.ELSEWHERE),
        (Reason.INCONCLUSIVE, Cause.RECOMPUTED),
    ],
)
def test_every_way_to_recompute_has_its_cause(bundle: Path, reason: Reason, cause: Cause) -> None:
    evidence = load_evidence(bundle)
    found = c_is(evidence, tier=Tier.RECOMPUTED, grade=Grade.RECOMPUTED, range_reason=reason)
    assert (found.standing, found.grade) == (Standing.FAILED, Grade.UNKNOWN)
    assert [(one.cause, one.count, one.detail) for one in found.failures] == [(cause, 1, "as seen")]


def test_a_refuted_hit_and_a_read_from_storage_are_failures(bundle: Path) -> None:
    evidence = load_evidence(bundle)
    refuted = c_is(evidence, tier=Tier.L2, grade=Grade.REFUTED, range_reason=Reason.PROMISED_NOT_LOADED)
    assert [one.cause for one in refuted.failures] == [Cause.NOT_LOADED]
    assert [one.cause for one in c_is(evidence, tier=Tier.L3).failures] == [Cause.LEFT_L2]


def test_one_failed_repeat_is_enough(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "b", [*abc_records(), *with_c(RIDS["fill 4"])[-1:]])
    assert_failed(path, "C's prompt is not A's in 1 of 2 requests", "Send the same prompt as A")


def test_a_missing_event_lowers_the_claim_and_is_named(tmp_path: Path) -> None:
    events = changed(read_journal(ABC).events, ev.BackupAcked, lambda event: None)
    journal = tmp_path / ABC.name
    journal.write_bytes(to_bytes(events))
    page = page_of(bundle_of(tmp_path / "b", journals=[journal]))
    claim = page.text("claim")
    assert "the read is confirmed for 0 of 1 requests" in claim
    assert "Grade: reported" in claim
    assert "Missing link: Backed up" in claim
    assert "To obtain it: check the write policy" in claim
    assert "MISSING" in page.text("chain")
    russian = page_of(tmp_path / "b", "ru").text("claim")
    assert "Недостающее звено: Скопирован в L2" in russian
    assert "проверьте политику записи" in russian


@pytest.mark.parametrize(
    ("answer", "words", "grade"),
    [
        ({}, "The server attributes prompt tokens of series C", "reported"),
        ({"cached_tokens": 1488, "cached_tokens_details": None}, "consistent with reuse", "consistent with reuse"),
        ({"cached_tokens": None, "cached_tokens_details": None}, "Nothing is claimed about series C", "unknown"),
    ],
)
def test_where_hooks_are_not_possible(tmp_path: Path, answer: dict[str, Any], words: str, grade: str) -> None:
    environment = {**ENVIRONMENT, "run": {"journals": "none: the server runs elsewhere"}}
    page = page_of(bundle_of(tmp_path / "b", abc_records(**answer), journals=(), environment=environment))
    claim = page.text("claim")
    assert words in claim
    assert f"Grade: {grade}" in claim
    assert "No journal knows 1 of 1 requests of C" in claim
    assert "only the server's own answer speaks for them: the server runs elsewhere." in claim
    assert "The journals tell of no stay" in page.text("residency")


def test_a_journal_that_was_cut_off_is_the_reason(tmp_path: Path) -> None:
    whole = read_journal(ABC).events
    journal = tmp_path / ABC.name
    journal.write_bytes(to_bytes(whole[: len(whole) // 2]))
    claim = page_of(bundle_of(tmp_path / "b", journals=[journal])).text("claim")
    assert "the bundle's journals do not hold them" in claim
    assert "Grade: reported" in claim


def test_hooks_that_are_not_in_place_are_named(bundle: Path) -> None:
    evidence = load_evidence(bundle)
    instance = evidence.instances[0]
    hooks = tuple(
        msgspec.structs.replace(hook, status="mismatch", detail="other parameters") if "born" in hook.links else hook
        for hook in instance.hooks
    )
    verdicts = tuple(
        msgspec.structs.replace(verdict, grade=Grade.CONSISTENT) if verdict.rid == RIDS["C"] else verdict
        for verdict in evidence.verdicts
    )
    bent = msgspec.structs.replace(
        evidence, instances=(msgspec.structs.replace(instance, hooks=hooks),), verdicts=verdicts
    )
    (why,) = build_page(bent, words_for("en")).claim.why
    assert why.text.startswith('Link "Born" cannot be established on')
    assert "is not installed (mismatch: other parameters)" in why.recorded


def test_settings_that_changed_between_the_series(bundle: Path) -> None:
    evidence = load_evidence(bundle)
    first = evidence.instances[0]
    second = msgspec.structs.replace(first, instance="later", facts=described({**first.facts.shown, "page_size": 64}))
    verdicts = tuple(
        msgspec.structs.replace(verdict, instance="later") if verdict.rid == RIDS["C"] else verdict
        for verdict in evidence.verdicts
    )
    restarted = msgspec.structs.replace(evidence, instances=(first, second), verdicts=verdicts)
    page = build_page(restarted, words_for("en"))
    assert page.claim.sentence == NO_CLAIM
    assert [(one.name, one.one, one.other) for one in page.outcome.changed] == [("instance.page_size", "16", "64")]
    assert page.timing.contrasts == ()
    assert "not compared" in page.timing.notes[0]


def test_a_bundle_that_does_not_verify_proves_nothing(bundle: Path) -> None:
    (bundle / "summary.md").write_text("all fine")
    page = page_of(bundle)
    assert "This bundle does not verify" in page.text("alarm")
    assert "changed: summary.md" in page.text("alarm")
    claim = page.text("claim")
    assert "Nothing is claimed. Grade: not verified" in claim
    assert "NOT VERIFIED: L2 read confirmed" in page.text("requests")
    assert page.text("chain").endswith("Not shown: the bundle does not verify.")
    assert {row[-2] for row in page.tables["requests-table"][1:]} == {"not verified"}
    assert "did not verify" in page.text("recheck")
    assert "does not verify" in page.text("residency")
    assert markdown_of(bundle).splitlines()[2].startswith("> **This bundle does not verify.**")
    assert "Пакет не прошёл проверку" in page_of(bundle, "ru").text("alarm")


def test_a_control_run(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "run": {"options": {"control": True}}}
    plain = page_of(bundle_of(tmp_path / "b", with_c(RIDS["fill 1"]), environment=environment))
    assert "Control run: without HiCache, C was recomputed" in plain.text("claim")
    reused = page_of(bundle_of(tmp_path / "r", environment=environment))
    assert NO_CLAIM in reused.text("claim")
    assert "its server reused tokens in 1 of 1 requests" in reused.text("claim")


def test_traffic_without_series(tmp_path: Path) -> None:
    page = page_of(bundle_of(tmp_path / "b", [], environment={}))
    assert "Requests with a verdict: 10. Confirmed reads: L1 2, L2 1, L3 0." in page.text("claim")
    assert f"Request {RIDS['C']}: L2 read confirmed" in page.text("chain")
    assert "No time to the first token was measured" in page.text("timing")
    assert "The bundle lists nothing as unreadable" in page.text("conditions")


def test_an_empty_bundle(tmp_path: Path) -> None:
    page = page_of(bundle_of(tmp_path / "b", [], [], {}))
    assert "Requests with a verdict: 0." in page.text("claim")
    assert "None were recorded" in page.text("requests")
    assert "all of them are unknown" in page.text("conditions")
    assert markdown_of(tmp_path / "b", "ru")


def test_answers_that_differ_are_said(tmp_path: Path) -> None:
    claim = page_of(bundle_of(tmp_path / "b", abc_records(output_ids=(9,)))).text("claim")
    assert "The answers differ: the tokens of only 0 of 1 requests of C" in claim
    # S19: the read is proven, and what came of it is not what A got.
    assert "corruption_suspected: 1 of them read L2, as is proven, and answered otherwise than A" in claim
    assert "Grade: confirmed" in claim
    assert "corruption_suspected" in markdown_of(tmp_path / "b") and "corruption_suspected" in page_of(
        tmp_path / "b", "ru"
    ).text("claim")
    assert "could not be compared" in page_of(bundle_of(tmp_path / "n", abc_records(output_ids=()))).text("claim")


def test_a_later_first_token_never_changes_the_grade(tmp_path: Path) -> None:
    slow = load_evidence(bundle_of(tmp_path / "slow", abc_records(ttft_s=30.0)))
    fast = load_evidence(bundle_of(tmp_path / "fast", abc_records(ttft_s=0.001)))
    assert outcome_of(slow) == outcome_of(fast)


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> $x_1$ ]]> `*_|[a](http://b) \u202e"


@pytest.mark.parametrize("language", ["en", "ru"])
def test_hostile_strings_stay_strings(tmp_path: Path, language: str) -> None:
    environment = {"unknown": [HOSTILE], "run": {"journals": HOSTILE, "stopped": HOSTILE}, HOSTILE: {HOSTILE: HOSTILE}}
    records = [
        *abc_records(),
        record(HOSTILE, "C", 90, error=HOSTILE, ttft_s=0.1),
        record("x" + HOSTILE, HOSTILE, 91),
        record(HOSTILE * 40, "A", 92),
    ]
    path = bundle_of(tmp_path / "b", records, environment=environment)
    page = page_of(path, language)
    assert page.unclosed == []
    assert page.references() == []
    assert len(page.scripts) == 1 and "alert" not in page.scripts[0]
    assert not [tag for tag, values in page.tags if tag == "img" or any(key.startswith("on") for key in values)]
    assert "<script>alert(1)</script>" in page.text("requests")
    text = markdown_of(path, language)
    assert "<script>" not in text.replace("\\<script\\>", "")


def test_hostile_prefix_names_reach_the_chart_as_text(bundle: Path) -> None:
    evidence = load_evidence(bundle)
    instance = evidence.instances[0]
    residencies = tuple(msgspec.structs.replace(one, owner=HOSTILE) for one in instance.residencies)
    bent = msgspec.structs.replace(evidence, instances=(msgspec.structs.replace(instance, residencies=residencies),))
    page = Parsed(render_html(build_page(bent, words_for("en")), words_for("en")))
    assert page.unclosed == [] and len(page.scripts) == 1


def test_reports_by_the_command(kvwitness: Any, bundle: Path, tmp_path: Path) -> None:
    result = kvwitness("report", bundle)
    assert result.exit_code == 0
    target = tmp_path / "bundle.report.html"
    assert result.stdout.splitlines()[-1] == f"report: {target}"
    assert "(confirmed)" in result.stdout
    assert target.read_text().startswith("<!DOCTYPE html>")
    first = target.read_bytes()
    kvwitness("report", bundle)
    assert target.read_bytes() == first
    told = json.loads(kvwitness("report", bundle, "--format", "md", "--lang", "ru", "--json").stdout)
    assert told["report"] == str(tmp_path / "bundle.report.md")
    assert (told["standing"], told["grade"], told["intact"]) == ("proven", "confirmed", True)
    assert "подтверждено" in told["claim"]
    (bundle / "summary.md").write_text("all fine")
    bad = kvwitness("report", bundle)
    assert bad.exit_code == 1
    assert "does not verify" in bad.stderr and len(bad.stderr.splitlines()) == 1
    assert bad.stdout.startswith("Nothing is claimed. (not verified)")


def test_errors_of_the_command_are_one_line(kvwitness: Any, bundle: Path, tmp_path: Path) -> None:
    for args, said in (
        ((tmp_path / "nothing",), "there is no such file or folder"),
        ((bundle, "--out", bundle / "report.html"), "a file there would change the bundle"),
        ((bundle, "--out", tmp_path / "no" / "report.html"), "the report cannot be written"),
        ((bundle, "--format", "pdf"), "'pdf' is not one of"),
    ):
        result = kvwitness("report", *args)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and said in line
    assert kvwitness("verify", bundle).exit_code == 0
