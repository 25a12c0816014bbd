"""``ro-crate-metadata.json``: what a bundle is, in the words that research archives read (RO-Crate 1.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvwitness.tracer.bundle.layout import (
    ENVIRONMENT,
    JOURNALS,
    MANIFEST,
    MANIFEST_HASH,
    METRICS,
    REQUESTS,
    SPANS,
    STATEMENT,
    SUMMARY,
    VERDICTS,
    FileEntry,
    pretty_json,
)
from kvwitness.tracer.model import RequestVerdict

CRATE_VERSION: Final = "1.2"

_BINARY, _JSON, _LINES, _TEXT = "application/octet-stream", "application/json", "application/jsonl", "text/plain"
_ABOUT: Final = {
    ENVIRONMENT: (_JSON, "Host, server and settings, and what could not be read of them"),
    REQUESTS: (_LINES, "What the client sent and saw, one request a line"),
    VERDICTS: (_JSON, "The verdict about each request, with the chain of evidence that it rests on"),
    SPANS: (_LINES, "The same as OpenTelemetry spans (OTLP/JSON)"),
    SUMMARY: ("text/markdown", "The same for people"),
    MANIFEST: (_JSON, "Size and sha256 of every file of the bundle"),
    MANIFEST_HASH: (_TEXT, "sha256 of the manifest"),
    STATEMENT: (_JSON, "in-toto statement: the files, their sha256 and what was concluded from them"),
}
_ABOUT_FOLDER: Final = {
    JOURNALS: (_BINARY, "Journal of one process: the events that kvwitness recorded inside SGLang"),
    METRICS: (_TEXT, "The server's metrics at one moment"),
}
_DESCRIBING: Final = (MANIFEST, MANIFEST_HASH, STATEMENT)


def render_crate(
    *,
    created: str,
    version: str,
    files: Sequence[FileEntry],
    verdicts: Sequence[RequestVerdict],
    environment: Mapping[str, Any],
) -> bytes:
    """The bytes of ``ro-crate-metadata.json``; the same inputs give the same bytes.

    ``files`` are those that were written before. The signature is not described: it may be added later.
    """
    # With its HTTP client it takes half a second to import, and only writing needs it.
    from rocrate.rocrate import ROCrate

    crate = ROCrate(version=CRATE_VERSION)
    run = environment.get("run")
    name = run.get("id") if isinstance(run, Mapping) else None
    crate.name = f"kvwitness evidence bundle {name}" if isinstance(name, str) else "kvwitness evidence bundle"
    crate.description = (
        f"Recorded events and verdicts about {len(verdicts)} requests to an SGLang server with HiCache: from which "
        "tier (GPU memory, host memory, storage) each request's KV state came. "
        f"Written by kvwitness {version}; `kvwitness verify` checks it."
    )
    crate.root_dataset["datePublished"] = created
    crate.license = crate.add_jsonld(
        {
            "@id": "#license",
            "@type": "CreativeWork",
            "name": "Not stated",
            "description": "Whoever made this bundle has not said under which terms it may be used: ask them.",
        }
    )
    for entry in files:
        media, about = _about(entry.path)
        crate.add_file(
            dest_path=entry.path,
            properties={
                "name": entry.path,
                "description": about,
                "encodingFormat": media,
                "contentSize": str(entry.bytes),
                "sha256": entry.sha256,
            },
        )
    for path in _DESCRIBING:
        media, about = _about(path)
        crate.add_file(dest_path=path, properties={"name": path, "description": about, "encodingFormat": media})
    return pretty_json(crate.metadata.generate())


def _about(path: str) -> tuple[str, str]:
    """Media type, and one line."""
    return _ABOUT.get(path) or _ABOUT_FOLDER.get(path.partition("/")[0]) or (_BINARY, path)
