"""``kvwitness sign`` and ``kvwitness key``: sign a bundle's statement, and make a key to sign with."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvwitness.tracer.bundle.sign import sign_bundle
from kvwitness.tracer.bundle.signing import PUBLIC_SUFFIX, is_encrypted, make_key, read_private_key, short
from kvwitness.tracer.cli.bundles import bundle_errors
from kvwitness.tracer.cli.errors import UserError
from kvwitness.tracer.cli.output import json_option, note, print_json


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Private key, a PEM file.")
@json_option
def sign(bundle: Path, key_file: Path, as_json: bool) -> None:
    """Sign BUNDLE, a folder or a .zip: its statement, and through that every file and verdict.

    The bundle is verified first, and refused when anything is wrong with it. The signature is kept in the bundle
    (statement.dsse.json), beside those of other keys. A key with a passphrase is asked for it.

    \b
    Example:
      kvwitness key new me.pem
      kvwitness sign bundle --key me.pem
      kvwitness verify bundle --key me.pem.pub
    """
    with bundle_errors():
        passphrase = _ask(key_file) if is_encrypted(key_file) else None
        signed = sign_bundle(bundle, read_private_key(key_file, passphrase))
    if as_json:
        print_json(signed)
    else:
        click.echo(f"signed: {bundle} by the key {short(signed.key)}")


def _ask(key_file: Path) -> str:
    if not sys.stdin.isatty():
        raise UserError("it has a passphrase, and there is no terminal to ask on", str(key_file), "sign on a terminal")
    answer: str = click.prompt(f"Passphrase of {key_file}", hide_input=True, err=True)
    return answer


@click.group()
def key() -> None:
    """Make keys to sign bundles with.

    \b
    Example:
      kvwitness key new me.pem
    """


@key.command("new", short_help="Make an ed25519 pair.")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def new_key(file: Path, as_json: bool) -> None:
    """Make a new ed25519 pair: FILE, the private key, and FILE.pub, the one to hand out.

    FILE has no passphrase and can be read by you alone. `openssl genpkey -algorithm ed25519 -aes256 -out FILE` makes
    one with a passphrase, `openssl pkey -in FILE -pubout -out FILE.pub` its public key.

    \b
    Example:
      kvwitness key new me.pem
    """
    with bundle_errors():
        public = make_key(file)
    beside = file.with_name(file.name + PUBLIC_SUFFIX)
    if as_json:
        print_json({"private": str(file), "public": str(beside), "key": public.keyid})
    else:
        click.echo(f"{file}: private key, keep it to yourself")
        click.echo(f"{beside}: public key {short(public.keyid)}, for those who verify")
        note(f"sign with it: kvwitness sign BUNDLE --key {file}")
