"""Plans in directories: read by the server, published by the tuner.

What a reader can rely on, whatever happened to the files:

- a plan is returned only if its file, its key, its environment and its blob are all as they were published;
- anything else is a miss with a reason, never an exception, and one warning for each damaged file;
- reading writes nothing, and makes no directory.

What writers can rely on: every file appears whole or not at all (temporary file, fsync, rename), so any
number of them work in one directory without locks, and none can be killed at a wrong moment.

Layout, under the root::

    <environment hash>/manifest.json         the environment in clear
    <environment hash>/entries/<key>.json    a plan; <key> is PlanKey.digest()
    <environment hash>/signatures/<key>      its signature, if it is signed (see `cudnn_fusion.trust`)
    <environment hash>/blobs/<sha256>.plan   what an engine loads
    <environment hash>/buckets/<bucket>.<first 16 digits of the program's sha256>.json

The JSON files are sealed (see `cudnn_fusion.sealed_files`).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cudnn_fusion.environment import Compatibility, compare
from cudnn_fusion.plan import (
    BucketRecord,
    Plan,
    PlanFormatError,
    PlanKey,
    moment,
    sha256_hex,
)
from cudnn_fusion.sealed_files import (
    AbsentError,
    DamagedError,
    PlanStoreError,
    read_file,
    read_record,
    seal,
    sync_directory,
    write,
    write_error,
)
from cudnn_fusion.trust import Verifier

__all__ = ["Found", "Miss", "PlanStore", "PlanStoreError", "StoredEnvironment"]

LARGEST_BLOB_BYTES = 2**30
LARGEST_SIGNATURE_BYTES = 1024

_LOG = logging.getLogger("cudnn_fusion.plan_store")
_ENVIRONMENT = re.compile(r"[0-9a-f]{16}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_BUCKET = re.compile(r"[^.].*\.json")
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Found:
    """A verified plan; ``blob`` is None if the plan has none (torch)."""

    plan: Plan
    blob: bytes | None


@dataclass(frozen=True)
class Miss:
    """Why there is no plan, in one line."""

    reason: str


@dataclass(frozen=True)
class StoredEnvironment:
    """A directory of plans. ``compatibility`` is None when its manifest cannot be used: see ``reason``."""

    hash: str
    compatibility: Compatibility | None
    reason: str = ""


class PlanStore:
    """The plans under one root: a version's ``plans`` directory, an overlay or a staging directory.

    The root may be missing, read-only or not a directory: reads are then misses, writes raise
    PlanStoreError. Safe to use from several threads and processes. With a ``verifier`` plans that it does
    not find signed are misses.
    """

    def __init__(self, root: Path, verifier: Verifier | None = None) -> None:
        self.root = Path(root)
        self.verifier = verifier
        self._warned: set[Path] = set()
        self._warned_lock = threading.Lock()

    def find(self, compatibility: Compatibility, key: PlanKey) -> Found | Miss:
        """The plan for exactly this key in exactly this environment, with its blob; never raises."""
        here = self.root / compatibility.hash()
        try:
            self._verified_environment(here.name)
            plan = self._read_entry(here.name, key.digest())
            return Found(plan, self._read_blob(here, plan))
        except AbsentError:
            return Miss(self._why_absent(compatibility, key))
        except DamagedError as problem:
            return Miss(self._warn(problem))

    def find_elsewhere(self, compatibility: Compatibility, key: PlanKey) -> list[tuple[Compatibility, Plan]]:
        """Plans for this key in other environments of the same kind, newest first; blobs are not read."""
        plans = []
        for other in self._other_environments(compatibility):
            try:
                plans.append((other, self._read_entry(other.hash(), key.digest())))
            except AbsentError:
                continue
            except DamagedError as problem:
                self._warn(problem)
        return sorted(plans, key=lambda found: moment(found[1].made_at), reverse=True)

    def environments(self) -> list[StoredEnvironment]:
        """All environments that have a directory here, sorted by hash."""
        found = []
        for name in _names(self.root, _ENVIRONMENT):
            try:
                found.append(StoredEnvironment(name, self._verified_environment(name)))
            except AbsentError:
                continue
            except DamagedError as problem:
                found.append(StoredEnvironment(name, None, self._warn(problem)))
        return found

    def plans(self, environment_hash: str) -> list[Plan]:
        """All undamaged plans of one environment, sorted by key; blobs are not read."""
        if not self._is_usable(environment_hash):
            return []
        found = []
        for name in _names(self.root / environment_hash / "entries", _ENTRY):
            try:
                found.append(self._read_entry(environment_hash, name.removesuffix(".json")))
            except AbsentError:
                continue
            except DamagedError as problem:
                self._warn(problem)
        return found

    def buckets(self, compatibility: Compatibility, program_sha256: str | None = None) -> list[BucketRecord]:
        """The tuned buckets of one environment, of all programs or of one, sorted by their sizes."""
        environment = compatibility.hash()
        if not self._is_usable(environment):
            return []
        found = []
        for name in _names(self.root / environment / "buckets", _BUCKET):
            try:
                found.append(self._read_bucket(environment, name))
            except AbsentError:
                continue
            except DamagedError as problem:
                self._warn(problem)
        wanted = [record for record in found if program_sha256 in (None, record.program_sha256)]
        return sorted(wanted, key=lambda record: (record.sizes, record.program_sha256))

    def buckets_elsewhere(
        self, compatibility: Compatibility, program_sha256: str | None = None
    ) -> list[BucketRecord]:
        """The tuned buckets of other environments of the same kind; one for each environment that has it."""
        others = self._other_environments(compatibility)
        return [record for other in others for record in self.buckets(other, program_sha256)]

    def summary(self) -> str:
        """One line for each environment: what it is and how many plans and buckets it holds."""
        lines = []
        for stored in self.environments():
            if stored.compatibility is None:
                lines.append(f"{stored.hash}: not usable: {stored.reason}")
                continue
            plans = self.plans(stored.hash)
            timed = sum(plan.timed for plan in plans)
            buckets = len(self.buckets(stored.compatibility))
            lines.append(
                f"{stored.hash}: {stored.compatibility.label()}: {len(plans)} plans ({timed} timed), "
                f"{buckets} buckets"
            )
        return "\n".join(lines) or f"0 plans in {self.root}"

    def signature(self, environment_hash: str, key: PlanKey) -> bytes | None:
        """The signature beside a plan; None where it has none or it cannot be read."""
        try:
            return read_file(
                self.root / environment_hash / "signatures" / key.digest(), LARGEST_SIGNATURE_BYTES
            )
        except (AbsentError, DamagedError):
            return None

    def publish(
        self, compatibility: Compatibility, plan: Plan, blob: bytes | None, signature: bytes | None = None
    ) -> None:
        """Makes a plan visible, replacing an older one for the same key: the blob, the signature, the entry.

        ``plan.blob_sha256`` must be the blob's sha256, None without one. Raises PlanFormatError when the
        plan does not hold what the format asks, PlanStoreError when it cannot be written.
        """
        content = _checked_content(Plan, plan)
        actual = None if blob is None else sha256_hex(blob)
        if plan.blob_sha256 != actual:
            raise PlanFormatError(
                f"plan.blob_sha256 is {plan.blob_sha256} and the blob's sha256 is {actual}: set it with "
                "plan.sha256_hex(blob), and pass the blob if and only if it is set"
            )
        here = self._claim(compatibility)
        if blob is not None:
            self._publish_blob(here, blob)
        if signature is not None:
            self.publish_signature(compatibility, plan.key, signature)
        write(here / "entries" / f"{plan.key.digest()}.json", seal(here.name, content))

    def publish_signature(self, compatibility: Compatibility, key: PlanKey, signature: bytes) -> None:
        """Puts a signature beside a plan. Raises PlanStoreError."""
        write(self._claim(compatibility) / "signatures" / key.digest(), signature)

    def publish_bucket(self, compatibility: Compatibility, record: BucketRecord) -> None:
        """Makes a tuned bucket visible, after the plans it names. Raises as `publish` does."""
        content = _checked_content(BucketRecord, record)
        here = self._claim(compatibility)
        write(here / "buckets" / _bucket_file(record), seal(here.name, content))

    def merge_from(self, other: PlanStore, digests: Mapping[str, Collection[str]] | None = None) -> int:
        """Copies every finished plan and bucket of ``other``; the number of plans copied.

        With ``digests`` (of plan keys, by environment hash) only these plans, and buckets of no others. A
        timed plan is never replaced by an untimed one; otherwise the newer one stays. An environment that is
        new here appears in one step, by a rename. Raises PlanStoreError.
        """
        known = [stored.compatibility for stored in other.environments()]
        return sum(
            self._merge(
                other, compatibility, None if digests is None else digests.get(compatibility.hash(), ())
            )
            for compatibility in known
            if compatibility is not None
        )

    def _merge(self, other: PlanStore, compatibility: Compatibility, only: Collection[str] | None) -> int:
        environment = compatibility.hash()
        if not any(_among(only, plan.key.digest()) for plan in other.plans(environment)):
            return 0
        if not os.path.lexists(self.root / environment):
            with suppress(FileExistsError):  # another writer was first: add to what it made
                return self._merge_in_one_step(other, compatibility, only)
        return self._merge_one_by_one(other, compatibility, only)

    def _merge_in_one_step(
        self, other: PlanStore, compatibility: Compatibility, only: Collection[str] | None
    ) -> int:
        """Raises FileExistsError when the environment's directory has appeared meanwhile."""
        hidden = PlanStore(self.root / f".incoming-{os.getpid()}-{secrets.token_hex(8)}")
        environment = compatibility.hash()
        try:
            copied = hidden._merge_one_by_one(other, compatibility, only)
            if copied:
                os.rename(hidden.root / environment, self.root / environment)
                sync_directory(self.root)
            return copied
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise FileExistsError(problem.errno, problem.strerror) from problem
            raise write_error(self.root / environment, problem) from problem
        finally:
            shutil.rmtree(hidden.root, ignore_errors=True)

    def _merge_one_by_one(
        self, other: PlanStore, compatibility: Compatibility, only: Collection[str] | None
    ) -> int:
        copied = 0
        for plan in other.plans(compatibility.hash()):
            if not _among(only, plan.key.digest()):
                continue
            incoming = other.find(compatibility, plan.key)
            present = self.find(compatibility, plan.key)
            if isinstance(incoming, Found) and (
                isinstance(present, Miss) or incoming.plan.is_better_than(present.plan)
            ):
                signature = other.signature(compatibility.hash(), plan.key)
                self.publish(compatibility, incoming.plan, incoming.blob, signature)
                copied += 1
            elif isinstance(present, Found) and isinstance(incoming, Found) and present.plan == incoming.plan:
                # Signed elsewhere since: where the key is.
                signature = other.signature(compatibility.hash(), plan.key)
                if signature is not None:
                    self.publish_signature(compatibility, plan.key, signature)
        entries = {plan.key.digest() for plan in self.plans(compatibility.hash())}
        present_buckets = {_bucket_file(record): record for record in self.buckets(compatibility)}
        for record in other.buckets(compatibility):
            if not all(_among(only, digest) for digest in record.entries):
                continue
            if not entries.issuperset(record.entries):
                continue
            here = present_buckets.get(_bucket_file(record))
            if here is None or record.is_better_than(here):
                self.publish_bucket(compatibility, record)
        return copied

    def _claim(self, compatibility: Compatibility) -> Path:
        """The environment's directory, with its manifest. One that says otherwise is left as it is."""
        here = self.root / compatibility.hash()
        try:
            self._verified_environment(here.name)
        except AbsentError:
            write(here / "manifest.json", seal(here.name, compatibility.to_json()))
        except DamagedError as problem:
            raise PlanStoreError(
                f"{problem.path} is not this environment's manifest ({problem}), so nothing is written "
                f"beside it: move {here} away, then publish again"
            ) from problem
        return here

    def _publish_blob(self, here: Path, blob: bytes) -> None:
        name = sha256_hex(blob)
        path = here / "blobs" / f"{name}.plan"
        with suppress(AbsentError, DamagedError):
            if read_file(path, LARGEST_BLOB_BYTES) == blob:
                with suppress(OSError):
                    os.utime(path)  # What is in use again is not left over: see StoreKeeper.leftovers.
                return
        write(path, blob)

    def _verified_environment(self, environment: str) -> Compatibility:
        """What a directory's manifest says, if it is its own. Raises AbsentError, DamagedError."""
        path = self.root / environment / "manifest.json"
        try:
            compatibility = _read(path, environment, Compatibility.from_json)
        except AbsentError as problem:
            if os.path.isdir(path.parent / "entries"):
                raise DamagedError(path, "is missing, although plans lie beside it") from problem
            raise
        if compatibility.hash() != environment:
            raise DamagedError(path, f"describes another environment ({compatibility.label()})")
        return compatibility

    def _is_usable(self, environment: str) -> bool:
        if not _ENVIRONMENT.fullmatch(environment):
            return False
        try:
            self._verified_environment(environment)
        except AbsentError:
            return False
        except DamagedError as problem:
            self._warn(problem)
            return False
        return True

    def _read_entry(self, environment: str, digest: str) -> Plan:
        path = self.root / environment / "entries" / f"{digest}.json"
        plan = _read(path, environment, Plan.from_json)
        if plan.key.digest() != digest:
            raise DamagedError(path, f"holds the plan of another key ({plan.key.digest()[:16]}...)")
        if self.verifier is not None:
            signature = self.signature(environment, plan.key)
            if signature is None or not self.verifier.has_signed(environment, plan, signature):
                what = "is not signed" if signature is None else "is not what was signed, or by another key"
                raise DamagedError(path, f"{what}, and only signed plans are trusted here")
        return plan

    def _read_bucket(self, environment: str, name: str) -> BucketRecord:
        path = self.root / environment / "buckets" / name
        record = _read(path, environment, BucketRecord.from_json)
        if _bucket_file(record) != name:
            raise DamagedError(path, f"holds the record of another bucket ({_bucket_file(record)})")
        return record

    def _read_blob(self, here: Path, plan: Plan) -> bytes | None:
        if plan.blob_sha256 is None:
            return None
        path = here / "blobs" / f"{plan.blob_sha256}.plan"
        try:
            blob = read_file(path, LARGEST_BLOB_BYTES)
        except AbsentError as problem:
            raise DamagedError(path, "is missing") from problem
        if sha256_hex(blob) != plan.blob_sha256:
            raise DamagedError(path, f"its {len(blob)} bytes do not match their checksum")
        return blob

    def _other_environments(self, compatibility: Compatibility) -> list[Compatibility]:
        known = [stored.compatibility for stored in self.environments()]
        return [c for c in known if c is not None and c != compatibility and c.kind == compatibility.kind]

    def _why_absent(self, compatibility: Compatibility, key: PlanKey) -> str:
        """Names the stored environment that comes nearest, among those that have the key if any has."""
        others = self._other_environments(compatibility)
        having = [c for c in others if os.path.isfile(self._entry_path(c, key))]
        own = os.path.isdir(self.root / compatibility.hash())
        if having or (others and not own):
            nearest = min((compare(other, compatibility) for other in having or others), key=len)
            told = "; ".join(str(difference) for difference in nearest)
            stored = "this segment's plan is" if having else "plans are"
            return f"{stored} stored for another environment only ({told})"
        if own:
            return "no plan is stored for this segment at these sizes and settings"
        return f"no plans for this environment in {self.root}"

    def _entry_path(self, compatibility: Compatibility, key: PlanKey) -> Path:
        return self.root / compatibility.hash() / "entries" / f"{key.digest()}.json"

    def _warn(self, problem: DamagedError) -> str:
        """The reason in one line, logged once for each file."""
        reason = " ".join(f"{problem.path.name}: {problem}".split())
        with self._warned_lock:
            new = problem.path not in self._warned
            self._warned.add(problem.path)
        if new:
            _LOG.warning("ignored %s: %s", problem.path, " ".join(str(problem).split()))
        return reason


def _checked_content(kind: type[Plan] | type[BucketRecord], record: Plan | BucketRecord) -> dict[str, Any]:
    """The record as JSON, after reading it back: nothing is written that could not be read."""
    content = record.to_json()
    if kind.from_json(content) != record:
        raise PlanFormatError(
            f"this {kind.__name__} does not survive being written: use tuples, str, int, float"
        )
    return content


def _read(path: Path, environment: str, decode: Callable[[object], _Record]) -> _Record:
    """A sealed record, decoded. Raises AbsentError, DamagedError."""
    content = read_record(path, environment)
    try:
        return decode(content)
    except (ValueError, RecursionError) as problem:
        raise DamagedError(path, str(problem)) from problem


def _among(only: Collection[str] | None, digest: str) -> bool:
    return only is None or digest in only


def _bucket_file(record: BucketRecord) -> str:
    name = record.bucket.name
    if len(name) > 150:
        name = f"bucket-{sha256_hex(name.encode())[:32]}"
    return f"{name}.{record.program_sha256[:16]}.json"


def _names(directory: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    """Names in ``directory`` that match, sorted; none when it cannot be listed."""
    try:
        names = os.listdir(directory)
    except OSError:
        return iter(())
    return iter(sorted(name for name in names if pattern.fullmatch(name)))
