"""Which plans are trusted: a plan carries native code.

A signature (Ed25519) covers a plan's whole record, with the checksum of its blob, and its environment. Who
signs and who verifies is decided by keys alone: nothing here reads a clock or a network.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cudnn_fusion.plan import Plan, canonical_json

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class TrustError(Exception):
    """A key cannot be used: says what is wrong and what to do."""


class Verifier:
    """Tells plans signed by the owner of a public key (32 bytes, base64) from others."""

    def __init__(self, public_key: str) -> None:
        """Raises TrustError."""
        ed25519 = _library()
        try:
            raw = base64.b64decode(public_key, validate=True)
            self._key = ed25519.Ed25519PublicKey.from_public_bytes(raw)
        except (binascii.Error, ValueError) as error:
            raise TrustError(
                f"{public_key[:60]!r} is no public key: give the 44 characters that `plans.py keygen` printed"
            ) from error

    def has_signed(self, environment: str, plan: Plan, signature: bytes) -> bool:
        """Whether the signature is of this plan in this environment, by the key's owner."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, _message(environment, plan))
        except (InvalidSignature, ValueError):  # a record that cannot be written was signed by nobody
            return False
        return True


class Signer:
    """Signs plans with the private key in a file (PEM, PKCS 8)."""

    def __init__(self, private_key: Path) -> None:
        """Raises TrustError."""
        ed25519 = _library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(private_key.read_bytes(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise TrustError(
                f"{private_key} holds no private key: {error}; `plans.py keygen` makes one"
            ) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise TrustError(
                f"{private_key} holds a key of another kind than Ed25519; `plans.py keygen` makes one"
            )
        self._key = key

    @property
    def public_key(self) -> str:
        """The public key, base64."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def sign(self, environment: str, plan: Plan) -> bytes:
        """The signature of this plan in this environment, 64 bytes."""
        signature: bytes = self._key.sign(_message(environment, plan))
        return signature


def make_key(private_key: Path) -> str:
    """Writes a new private key that only its owner can read; gives the public one. Raises TrustError."""
    ed25519 = _library()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with open(os.open(private_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    except OSError as error:
        raise TrustError(
            f"{private_key} is not written: {error.strerror}; name a file that is not there"
        ) from error
    return Signer(private_key).public_key


def _message(environment: str, plan: Plan) -> bytes:
    return canonical_json(["cudnn_fusion plan", environment, plan.to_json()]).encode()


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise TrustError("signatures need the package cryptography: pip install cryptography") from error
    return ed25519


def distrust(overlay: Path) -> str | None:
    """Why an overlay is not read: not a directory, or something in it can be changed by others than this
    process's user and root. None if it is trusted."""
    if not os.path.isdir(overlay):
        return "is not a directory"
    owners = {os.geteuid(), 0}
    for path in _everything(overlay):
        try:
            status = os.lstat(path)
        except FileNotFoundError:  # a temporary file of a writer
            continue
        except OSError as problem:
            return f"{path} cannot be looked at: {problem.strerror}"
        if stat.S_ISLNK(status.st_mode):
            return f"{path} is a link; put the plans themselves there"
        if status.st_uid not in owners:
            return f"{path} belongs to user {status.st_uid}; only this server's user and root may own it"
        if status.st_mode & OTHERS_WRITE:
            return f"{path} can be written by its group or by everybody: chmod go-w it"
    return None


def _everything(directory: Path) -> Iterator[str]:
    """The directory itself, once links to it are followed, and all in it."""
    root = os.path.realpath(directory)
    yield root
    for folder, folders, files in os.walk(root):
        yield from (os.path.join(folder, name) for name in (*folders, *files))
