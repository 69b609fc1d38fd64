"""Stores of plans kept in order: checked file by file, compared, tidied, carried in one file.

Everything here is safe beside servers that read the store and tuners that publish into it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cudnn_fusion.environment import Compatibility
from cudnn_fusion.plan import Plan, moment
from cudnn_fusion.plan_store import Found, PlanStore, PlanStoreError, StoredEnvironment
from cudnn_fusion.sealed_files import AbsentError, DamagedError, write_error
from cudnn_fusion.trust import Signer

UNREFERENCED_FOR = timedelta(hours=24)
"""A blob appears before the plan that names it: one without a plan is left over only after that time."""
LARGEST_ARCHIVE_BYTES = 2**36


class UpkeepError(Exception):
    """A store or an archive cannot be used as asked: says what to do."""


@dataclass(frozen=True)
class Problem:
    """A file of a store that no reader will use, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class PlanDifference:
    """A key whose plans differ between two stores; None where a store has none."""

    environment: str
    label: str
    key: str
    first: Plan | None
    second: Plan | None


@dataclass(frozen=True)
class Leftover:
    """What a tidying removes: a directory of an old environment, or a file that no plan names."""

    path: Path
    bytes: int
    reason: str


class StoreKeeper(PlanStore):
    """A store, with what its owner does to it beside reading and publishing."""

    def problems(self) -> Iterator[Problem]:
        """Every file that cannot be used, every plan whose blob cannot, every bucket that names no plan."""
        for stored in self.environments():
            here = self.root / stored.hash
            if stored.compatibility is None:
                yield Problem(here / "manifest.json", stored.reason)
                continue
            usable: set[str] = set()
            for path in sorted((here / "entries").glob("*.json")):
                digest = path.name.removesuffix(".json")
                try:
                    self._read_blob(here, self._read_entry(stored.hash, digest))
                    usable.add(digest)
                except AbsentError:  # removed meanwhile
                    continue
                except DamagedError as problem:
                    yield Problem(problem.path, str(problem))
            for path in sorted((here / "buckets").glob("*.json")):
                try:
                    record = self._read_bucket(stored.hash, path.name)
                except AbsentError:
                    continue
                except DamagedError as problem:
                    yield Problem(problem.path, str(problem))
                    continue
                absent = [digest for digest in record.entries if digest not in usable]
                if absent:
                    yield Problem(path, f"names {len(absent)} plans that are not usable here")

    def leftovers(
        self, unseen: timedelta, now: datetime, keep: Compatibility | None = None
    ) -> list[Leftover]:
        """Environments in which nothing has been tuned for ``unseen``, except ``keep``; and blobs that no
        plan names and no writer is about to name."""
        found: list[Leftover] = []
        for stored in self.environments():
            here = self.root / stored.hash
            newest = self._newest(stored)
            if stored.compatibility is None or newest is None or stored.compatibility == keep:
                continue  # what cannot be read is for its owner to judge
            if now - newest > unseen:
                reason = f"{stored.compatibility.label()}: nothing tuned since {newest.date().isoformat()}"
                found.append(Leftover(here, _size(here), reason))
                continue
            named = self._named(stored.hash)
            for blob in sorted((here / "blobs").glob("*.plan")):
                age = _age(blob, now)
                if (
                    blob.name.removesuffix(".plan") not in named
                    and age is not None
                    and age > UNREFERENCED_FOR
                ):
                    found.append(Leftover(blob, _size(blob), "no plan names it"))
        return found

    def remove(self, leftover: Leftover) -> None:
        """Removes it, unless a plan has come to name it; a directory disappears in one step for readers.

        Raises PlanStoreError.
        """
        path = leftover.path
        try:
            if path.is_dir():
                hidden = self.root / f".removed-{os.getpid()}-{secrets.token_hex(8)}"
                os.rename(path, hidden)
                shutil.rmtree(hidden)
            elif (_age(path, datetime.now(UTC)) or timedelta()) > UNREFERENCED_FOR and (
                path.name.removesuffix(".plan") not in self._named(path.parent.parent.name)
            ):
                os.remove(path)
        except FileNotFoundError:  # another one was faster
            return
        except OSError as problem:
            raise write_error(path, problem) from problem

    def sign(self, signer: Signer) -> int:
        """Signs every plan that is usable; the number of plans. Raises PlanStoreError."""
        count = 0
        for stored in self.environments():
            if stored.compatibility is None:
                continue
            for plan in self.plans(stored.hash):
                if isinstance(self.find(stored.compatibility, plan.key), Found):
                    signature = signer.sign(stored.hash, plan)
                    self.publish_signature(stored.compatibility, plan.key, signature)
                    count += 1
        return count

    def export(self, archive: Path) -> int:
        """Writes all that is usable into one compressed file; the number of plans. Raises UpkeepError and
        PlanStoreError."""
        if archive.is_dir():
            raise UpkeepError(f"{archive} is a directory; name the file to write")
        with _beside(archive) as made, tempfile_directory(archive.parent) as folder:
            copied = PlanStore(folder).merge_from(self)
            if not copied:
                raise UpkeepError(f"{self.root} holds no plans; run tools/pretune.py first")
            with tarfile.open(made, "w:gz") as file:
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        file.add(path, path.relative_to(folder).as_posix(), recursive=False)
        return copied

    def import_from(self, archive: Path) -> int:
        """Merges an archive's plans, each checked as it is read; the number of plans taken.

        Raises UpkeepError and PlanStoreError.
        """
        if not archive.is_file():
            raise UpkeepError(f"{archive} is not a file; give one that `plans.py export` has written")
        with tempfile_directory(self.root) as folder:
            try:
                with tarfile.open(archive, "r:gz") as file:
                    members = [member for member in file if member.isreg()]
                    if sum(member.size for member in members) > LARGEST_ARCHIVE_BYTES:
                        raise UpkeepError(f"{archive} unpacks to more than {LARGEST_ARCHIVE_BYTES >> 30} GiB")
                    file.extractall(folder, members, filter="data")
            except (tarfile.TarError, OSError, EOFError, zlib.error) as problem:
                raise UpkeepError(f"{archive} cannot be unpacked: {problem}") from problem
            incoming = PlanStore(folder)
            if not any(incoming.plans(stored.hash) for stored in incoming.environments()):
                raise UpkeepError(f"{archive} holds no plans that can be read")
            return self.merge_from(incoming)

    def _named(self, environment_hash: str) -> set[str | None]:
        """Checksums of the blobs that plans name."""
        return {plan.blob_sha256 for plan in self.plans(environment_hash)}

    def _newest(self, stored: StoredEnvironment) -> datetime | None:
        if stored.compatibility is None:
            return None
        made = [plan.made_at for plan in self.plans(stored.hash)]
        made += [record.made_at for record in self.buckets(stored.compatibility)]
        return max((moment(text) for text in made if text), default=None)


def differences(first: PlanStore, second: PlanStore) -> list[PlanDifference]:
    """Keys that one of two stores has alone, or for which they chose differently, by environment."""
    found: list[PlanDifference] = []
    known = [*first.environments(), *second.environments()]
    labels = {s.hash: s.compatibility.label() for s in known if s.compatibility is not None}
    for environment, label in sorted(labels.items()):
        ours = {plan.key.digest(): plan for plan in first.plans(environment)}
        theirs = {plan.key.digest(): plan for plan in second.plans(environment)}
        for key in sorted(ours.keys() | theirs.keys()):
            pair = ours.get(key), theirs.get(key)
            if pair[0] is None or pair[1] is None or _choice(pair[0]) != _choice(pair[1]):
                found.append(PlanDifference(environment, label, key, *pair))
    return found


def _choice(plan: Plan) -> tuple[str, str | None]:
    return plan.candidate.label(), plan.blob_sha256


def _age(path: Path, now: datetime) -> timedelta | None:
    try:
        return now - datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return None


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def tempfile_directory(parent: Path) -> Iterator[Path]:
    """A hidden directory in ``parent`` that is gone afterwards. Raises PlanStoreError."""
    folder = parent / f".carried-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        raise write_error(folder, problem) from problem
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place when all went well. Raises PlanStoreError."""
    made = path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        yield made
        os.replace(made, path)
    except OSError as problem:
        raise write_error(path, problem) from problem
    finally:
        made.unlink(missing_ok=True)


__all__ = [
    "Leftover",
    "PlanDifference",
    "PlanStoreError",
    "Problem",
    "StoreKeeper",
    "UpkeepError",
    "differences",
]
