"""``--resume``: a run that was cut short goes on from its bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvwitness.tracer.bundle.ending import why_stopped
from kvwitness.tracer.bundle.layout import sha256
from kvwitness.tracer.bundle.read import journal_names, open_bundle
from kvwitness.tracer.bundle.source import open_source
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.driving import Job, server_info
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.resume import Earlier, NothingToResume, earlier_part
from kvwitness.tracer.protocol.settings import setting_differences


def resumed(job: Job, bundle: Path) -> Job:
    """The rest of the run in ``bundle``, by the same options. Raises :class:`UserError`."""
    with bundle_errors():
        opened = open_bundle(bundle)
    if opened.changed:
        raise UserError(f"it was changed ({opened.changed[0]})", str(bundle), f"see `kvwitness verify {bundle}`")
    try:
        earlier = earlier_part(opened.requests, opened.environment, with_control=job.control is not None)
    except NothingToResume as error:
        raise UserError(str(error), str(bundle), "start a new run") from error
    with job.client() as client:
        _refuse_other_settings(earlier, server_info(client).raw_server, job.url)
    stopped = why_stopped(opened.environment) or "it reached its end"
    return msgspec.structs.replace(
        job,
        options=earlier.options,
        document=_document(earlier.options),
        before=earlier.before,
        journals=_journals(bundle),
        earlier=(*_earlier_ends(opened.environment), stopped),
    )


def _refuse_other_settings(earlier: Earlier, now: Mapping[str, Any], url: str) -> None:
    if differences := setting_differences(earlier.server, now):
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        raise UserError(
            f"the server has other settings than in the run's earlier part ({differences[0]}{more})",
            url,
            "start it with the old ones, or start a new run",
        )


def _document(options: AbcOptions) -> str | None:
    if options.document is None:
        return None
    path = Path(options.document)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the run's document cannot be read: {error}", str(path), "put it back") from error
    if sha256(text.encode()) != options.document_sha256:
        raise UserError("the run's document was changed", str(path), "put the old one back, or start a new run")
    return text


def _journals(bundle: Path) -> tuple[Path, ...]:
    """The journals in ``bundle`` as files of their own: the bundle itself may be replaced."""
    folder = Path(tempfile.mkdtemp(prefix="kvwitness-resume-"))
    kept = []
    with bundle_errors(), open_source(bundle) as source:
        for name in journal_names(source):
            path = folder / Path(name).name
            path.write_bytes(source.read(name))
            kept.append(path)
    return tuple(kept)


def _earlier_ends(environment: Mapping[str, Any]) -> tuple[str, ...]:
    run = environment.get("run")
    ends = run.get("earlier_parts") if isinstance(run, Mapping) else None
    return tuple(str(one) for one in ends) if isinstance(ends, list) else ()
