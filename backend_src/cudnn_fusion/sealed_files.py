"""Files that are whole or refused: how a store reads and writes, without knowing what a plan is.

A sealed file is one line of JSON: ``{"sha256":"<64 digits>",`` and the rest of a canonical JSON object
``{"content", "environment", "format"}``. The digits are the sha256 of that object without this first field,
so damage is found before anything is parsed. ``environment`` is the hash of the environment it was written
for: a file copied into another environment's directory is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from cudnn_fusion.records import FORMAT_VERSION, canonical_json

LARGEST_RECORD_BYTES = 16 * 2**20

_SEAL = re.compile(rb'\{"sha256":"([0-9a-f]{64})",')
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class PlanStoreError(RuntimeError):
    """A plan cannot be published: names the path and what to do."""


class AbsentError(Exception):
    """There is no such file. For the store's own use: readers of a store get a miss."""


class DamagedError(Exception):
    """A file cannot be used: ``path`` and why. For the store's own use."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def seal(environment: str, content: dict[str, Any]) -> bytes:
    """A sealed file's bytes, for ``content`` that belongs to the environment with this hash."""
    document = {"content": content, "environment": environment, "format": FORMAT_VERSION}
    body = canonical_json(document).encode()
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


def read_record(path: Path, environment: str) -> object:
    """The content of a sealed JSON file that belongs to ``environment``. Raises AbsentError, DamagedError."""
    data = read_file(path, LARGEST_RECORD_BYTES)
    mark = _SEAL.match(data)
    if mark is None:
        raise DamagedError(path, f"its {len(data)} bytes do not begin with a checksum")
    body = b"{" + data[mark.end() :]
    if hashlib.sha256(body).hexdigest() != mark.group(1).decode():
        raise DamagedError(path, "does not match its checksum")
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        raise DamagedError(path, f"is not JSON: {problem}") from problem
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        version = ascii(document.get("format"))[:20] if isinstance(document, dict) else "none"
        raise DamagedError(path, f"has format version {version}, expected {FORMAT_VERSION}")
    if document.get("environment") != environment:
        raise DamagedError(path, f"belongs to environment {ascii(document.get('environment'))[:20]}")
    return document.get("content")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def read_file(path: Path, largest_bytes: int) -> bytes:
    """A regular file's bytes. Raises AbsentError, or DamagedError for whatever else is at this path."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(path, "is not a regular file")
            if status.st_size > largest_bytes:
                raise DamagedError(path, f"has {status.st_size} bytes, more than {largest_bytes}")
            return file.read(largest_bytes + 1)
    except OSError as problem:
        if problem.errno in _ABSENT:
            raise AbsentError from problem
        raise DamagedError(path, f"cannot be read: {problem.strerror}") from problem


def require_regular(path: Path) -> None:
    """Raises OSError when ``path`` is no regular file: to open a named pipe would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write(path: Path, data: bytes) -> None:
    """Makes ``path`` hold ``data``, at once for every reader and whatever happens. Raises PlanStoreError."""
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        _make_directory(path.parent)
        # The mode that the umask leaves, not a private one: the server may run as another user.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(path, problem) from problem


def write_error(path: Path, problem: OSError) -> PlanStoreError:
    """What to raise when the system refuses to write ``path``."""
    return PlanStoreError(
        f"cannot write {path}: {problem.strerror}; make its directory writable and free some space"
    )


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with suppress(FileExistsError):
        directory.mkdir()
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names in ``directory`` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)
