"""Keep secrets out of everything that is collected: a value is replaced, the fact that there was one stays."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

REDACTED: Final = "<redacted>"

# Singular "token" only behind a word that makes it a credential: "max_total_tokens" and "bos_token" must survive.
_SECRET_WORDS: Final = (
    r"(?:api|access|account|admin|private|secret|signing|encryption|watermark)[_-]?key(?:[_-](?:id|[a-z]))?"
    r"|(?:auth|access|api|bearer|hf|hub|refresh|session|id)[_-]token"
    r"|secret|password|passwd|passphrase|credentials?|authorization"
)
_SECRET_NAME: Final = re.compile(rf"(?:^|[_\-.])(?:{_SECRET_WORDS})$", re.IGNORECASE)
_SECRET_OPTION: Final = re.compile(rf"(?i)(--?(?:[\w.\-]*[_\-.])?(?:{_SECRET_WORDS}))(=|\s+)(\"[^\"]*\"|'[^']*'|\S+)")
_URL_USER: Final = re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^/\s@]+@", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a setting, option or variable of this name holds a credential."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


def redact(value: Any, name: str = "") -> Any:
    """``value`` (as parsed from JSON) without credentials, at any depth. Unset secrets stay unset."""
    if name and is_secret_name(name):
        return value if value is None or value in ("", False, True) else REDACTED
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Sequence):
        if all(isinstance(item, str) for item in value):
            return list(redact_command(value))
        return [redact(item) for item in value]
    return value


def redact_text(text: str) -> str:
    """A free text (a command line, a JSON object in a string, a URL) without credentials."""
    if text[:1] in "{[" and text[:1]:
        try:
            return json.dumps(redact(json.loads(text)))
        except ValueError:
            pass
    return _URL_USER.sub(rf"\1{REDACTED}@", _SECRET_OPTION.sub(rf"\1\2{REDACTED}", text))


def redact_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line, argument by argument: ``--api-key X``, ``--api-key=X`` and ``API_KEY=X`` lose ``X``."""
    out: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            out.append(REDACTED)
            hide_next = False
        elif equals and is_secret_name(name):
            out.append(f"{name}={REDACTED}")
            hide_next = False
        else:
            hide_next = argument.startswith("-") and is_secret_name(argument)
            out.append(redact_text(argument))
    return tuple(out)
