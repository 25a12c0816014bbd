"""Sign a bundle's statement, and tell whether a signature is that of a key.

The signature stands beside the statement, in a DSSE envelope whose payload is the bytes of ``statement.json``.
The key is never taken from the bundle: whoever checks a signature has to bring the public key.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as LibraryError
from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from kvwitness.tracer.bundle.errors import BundleError
from kvwitness.tracer.bundle.layout import ENVELOPE, one_line, pretty_json
from kvwitness.tracer.bundle.statement import PAYLOAD_TYPE

PublicKey: TypeAlias = SSlibKey
PrivateKey: TypeAlias = CryptoSigner

PUBLIC_SUFFIX: Final = ".pub"
_SHOWN: Final = 16
_LARGEST_KEY: Final = 1 << 16
_MAKE_ONE: Final = "`kvwitness key new FILE` makes a pair of keys"


class Outcome(StrEnum):
    """What was found about a signature."""

    VALID = "valid"
    WRONG_KEY = "wrong_key"
    CHANGED_STATEMENT = "changed_statement"
    UNSIGNED = "unsigned"
    NOT_CHECKED = "not_checked"
    """It is signed, and no key was given to check it with."""


class SignatureCheck(msgspec.Struct, frozen=True):
    """The signature of a bundle. Keys are named by their id (securesystemslib's, a sha256 over the public key)."""

    outcome: Outcome
    detail: str
    signed_by: tuple[str, ...] = ()
    """Ids that the envelope names; only a check with the key shows that they are right."""
    key: str | None = None
    """Id of the key that it was checked with."""


class EnvelopeInvalid(ValueError):
    """The envelope is not one that kvwitness writes; the message says why."""


def short(keyid: str) -> str:
    """As much of a key's id as people compare."""
    return one_line(keyid)[:_SHOWN]


# --- keys ------------------------------------------------------------------------------------------------


def make_key(path: Path) -> PublicKey:
    """Make an ed25519 pair: ``path`` (PKCS #8 PEM, readable by its owner alone) and ``path``.pub.

    Raises :class:`BundleError`; a file that is there already is never overwritten.
    """
    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = path.with_name(path.name + PUBLIC_SUFFIX)
    for target in (path, beside):
        if os.path.lexists(target):
            raise BundleError("something is there already", str(target), "name another file")
    try:
        _write_new(path, pem, 0o600)
        _write_new(beside, shown, 0o644)
    except OSError as error:
        raise BundleError(error.strerror or str(error), str(path), "name a place that you may write to") from error
    return SSlibKey.from_crypto(public)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)


def is_encrypted(path: Path) -> bool:
    """Whether a private key needs a passphrase. Raises :class:`BundleError`."""
    return b"ENCRYPTED" in _read_key(path)


def read_private_key(path: Path, passphrase: str | None = None) -> PrivateKey:
    """Read a private key (PEM: ed25519, ECDSA or RSA). Raises :class:`BundleError`."""
    raw = _read_key(path)
    if b"PUBLIC KEY" in raw:
        raise BundleError("it is a public key", str(path), "sign with the private key that belongs to it")
    try:
        key = serialization.load_pem_private_key(raw, passphrase.encode() if passphrase else None)
        return CryptoSigner(key)
    except (ValueError, TypeError, UnsupportedAlgorithm, LibraryError) as error:
        if passphrase or b"ENCRYPTED" in raw:
            raise BundleError("the passphrase does not open it", str(path), "repeat with the right one") from error
        raise BundleError("it is no private key in PEM form", str(path), _MAKE_ONE) from error


def read_public_key(path: Path) -> PublicKey:
    """Read a public key (PEM). Raises :class:`BundleError`."""
    raw = _read_key(path)
    if b"PRIVATE KEY" in raw:
        raise BundleError("it is a private key", str(path), f"check with the public one ({path.name}{PUBLIC_SUFFIX}?)")
    try:
        return SSlibKey.from_crypto(serialization.load_pem_public_key(raw))
    except (ValueError, TypeError, UnsupportedAlgorithm, LibraryError) as error:
        raise BundleError("it is no public key in PEM form", str(path), _MAKE_ONE) from error


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_KEY)
    except OSError as error:
        raise BundleError(error.strerror or str(error), str(path), _MAKE_ONE) from error


# --- envelopes -------------------------------------------------------------------------------------------


def sign_statement(statement: bytes, key: PrivateKey, before: bytes | None = None) -> bytes:
    """The bytes of ``statement.dsse.json``: the statement signed with ``key``, beside the signatures of ``before``.

    Raises :class:`EnvelopeInvalid` when ``before`` is no envelope of this statement.
    """
    envelope = Envelope(statement, PAYLOAD_TYPE, {}) if before is None else _decode(before)
    if envelope.payload != statement:
        raise EnvelopeInvalid("it signs another statement")
    envelope.sign(key)
    return pretty_json(envelope.to_dict())


def check_signature(statement: bytes, raw: bytes | None, key: PublicKey | None) -> SignatureCheck | None:
    """What the envelope ``raw`` says about the bytes of a statement; None for an unsigned one when no key is given.

    Raises :class:`EnvelopeInvalid`.
    """
    if raw is None:
        if key is None:
            return None
        return SignatureCheck(Outcome.UNSIGNED, f"there is no {ENVELOPE} to check with the key", key=key.keyid)
    envelope = _decode(raw)
    signed_by = tuple(envelope.signatures)
    names = ", ".join(map(short, signed_by)) or "nobody"
    asked = key.keyid if key is not None else None
    if envelope.payload != statement:
        detail = f"what {names} signed is another statement than the bundle's"
        return SignatureCheck(Outcome.CHANGED_STATEMENT, detail, signed_by, asked)
    if key is None:
        return SignatureCheck(Outcome.NOT_CHECKED, f"signed by {names}", signed_by)
    if any(_verifies(envelope, name, key) for name in signed_by):
        return SignatureCheck(Outcome.VALID, f"signed by {short(key.keyid)}", signed_by, key.keyid)
    if key.keyid in signed_by:
        detail = f"the signature of {short(key.keyid)} is not one of this statement"
        return SignatureCheck(Outcome.CHANGED_STATEMENT, detail, signed_by, key.keyid)
    detail = f"signed by {names}, the key that was given is {short(key.keyid)}"
    return SignatureCheck(Outcome.WRONG_KEY, detail, signed_by, key.keyid)


def _verifies(envelope: Envelope, name: str, key: PublicKey) -> bool:
    # The name that an envelope gives a signature is a hint: the key alone decides.
    try:
        key.verify_signature(envelope.signatures[name], envelope.pae())
    except (UnverifiedSignatureError, VerificationError):
        return False
    return True


def _decode(raw: bytes) -> Envelope:
    try:
        data: Any = msgspec.json.decode(raw)
        envelope = Envelope.from_dict(data)
    except (msgspec.MsgspecError, LibraryError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
            RecursionError) as error:  # fmt: skip
        raise EnvelopeInvalid("it is no DSSE envelope, or is cut off") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise EnvelopeInvalid("what it signs is no in-toto statement")
    return envelope
