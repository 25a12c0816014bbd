"""``statement.json``: an in-toto Statement v1 about a bundle.

Its subjects are the manifest and every file that the manifest lists; its predicate says what was concluded, by which
kvwitness, and what the hooks had to find in SGLang for that. The same bundle gives the same bytes, so that a
signature over them can be checked by anyone who has the bundle, and so that the predicate can be derived again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from kvwitness.tracer.bundle.ending import why_stopped
from kvwitness.tracer.bundle.layout import (
    MANIFEST,
    STATEMENT,
    Manifest,
    SkippedJournal,
    encode_manifest,
    not_as_written,
    pretty_json,
    sha256,
)
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier, TokensPerTier

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:kvwitness:verdicts:v1"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
"""Media type of a statement within a DSSE envelope."""


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the bundle."""

    name: str
    digest: dict[str, str]


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What judged the evidence."""

    name: str
    version: str


class Concluded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One verdict; ``verdicts.json``, which is a subject, has it with all its links."""

    rid: str
    instance: str
    attempt: int
    tier: Tier
    grade: Grade
    reason: Reason
    sentence: str
    prompt_tokens: int
    tokens: TokensPerTier


class ContractHook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One hook as it was left in a process, and the links of the chain that rest on it."""

    name: str
    target: str
    status: str
    links: tuple[str, ...]


class HookContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What the hooks of one scheduler process found in its SGLang."""

    instance: str
    sglang: str | None
    tree_class: str | None
    tree_core: str | None
    journal_closed: bool
    """False: the process was still running, or was killed."""
    hooks: tuple[ContractHook, ...]
    failures: dict[str, int]
    """Calls in which a hook's own code failed, by hook."""


class Predicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is stated about the files."""

    tool: Tool
    bundle_schema: int
    created: str
    stopped: str | None
    """Why the run did not reach its end; None when it did."""
    skipped_journals: tuple[SkippedJournal, ...]
    verdicts: tuple[Concluded, ...]
    hook_contracts: tuple[HookContract, ...]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``statement.json``."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType")
    predicate: Predicate


class StatementInvalid(ValueError):
    """``statement.json`` is not a statement that this version reads; the message says why."""


def make_statement(manifest: Manifest, judged: Judgement, environment: Mapping[str, Any]) -> Statement:
    """The statement about a bundle that is otherwise complete."""
    return Statement(
        type=STATEMENT_TYPE,
        subject=tuple(_subjects(manifest)),
        predicate_type=PREDICATE_TYPE,
        predicate=Predicate(
            tool=Tool("kvwitness", manifest.kvwitness),
            bundle_schema=manifest.schema,
            created=manifest.created,
            stopped=why_stopped(environment),
            skipped_journals=manifest.skipped_journals,
            verdicts=tuple(map(_concluded, judged.verdicts)),
            hook_contracts=tuple(map(_contract, judged.instances)),
        ),
    )


def encode_statement(statement: Statement) -> bytes:
    """The bytes of ``statement.json``: the same statement gives the same bytes."""
    return pretty_json(statement)


def decode_statement(raw: bytes) -> Statement:
    """Read ``statement.json``. Raises :class:`StatementInvalid`."""
    try:
        statement = msgspec.json.decode(raw, type=Statement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StatementInvalid(f"{STATEMENT}: {not_as_written(error)}") from error
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise StatementInvalid(f"{STATEMENT}: it is no statement of kvwitness's kind")
    return statement


def digests_of(statement: Statement) -> dict[str, str]:
    """The sha256 that the statement gives each file."""
    return {subject.name: subject.digest.get("sha256", "") for subject in statement.subject}


def predicate_difference(stated: Predicate, derived: Predicate) -> str | None:
    """In words the first part of the predicate that is not what the bundle's evidence gives."""
    for field in msgspec.structs.fields(Predicate):
        if getattr(stated, field.name) != getattr(derived, field.name):
            return f"its {field.encode_name} are not those that the bundle's evidence gives"
    return None


def _subjects(manifest: Manifest) -> Iterator[Subject]:
    yield Subject(MANIFEST, {"sha256": sha256(encode_manifest(manifest))})
    for entry in manifest.files:
        yield Subject(entry.path, {"sha256": entry.sha256})


def _concluded(verdict: RequestVerdict) -> Concluded:
    return Concluded(
        rid=verdict.rid,
        instance=verdict.instance,
        attempt=verdict.attempt,
        tier=verdict.tier,
        grade=verdict.grade,
        reason=verdict.reason,
        sentence=verdict.sentence,
        prompt_tokens=verdict.prompt_tokens,
        tokens=verdict.tokens,
    )


def _contract(facts: InstanceFacts) -> HookContract:
    process = facts.facts.process
    return HookContract(
        instance=facts.instance,
        sglang=process.sglang if process is not None else None,
        tree_class=facts.facts.instance.tree_class,
        tree_core=facts.facts.instance.tree_core,
        journal_closed=facts.closed,
        hooks=tuple(ContractHook(h.name, h.target, h.status, h.links) for h in facts.hooks),
        failures=dict(sorted(facts.hook_failures.items())),
    )
