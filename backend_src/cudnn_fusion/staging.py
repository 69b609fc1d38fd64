"""Where a pre-tuning run keeps finished plans until all are; a later run goes on with what one has left.

Every run has a directory of its own beside those of other runs of the same program, and reads the others'. A
run that comes to its end removes its own, and what ended runs have left if all of it is published now.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from cudnn_fusion.lowered import Program
from cudnn_fusion.plan_store import PlanStore

Staged = tuple[str, str]
"""Hash of an environment, digest of a plan's key."""


class StagingError(Exception):
    """There is no place for unfinished work; the message names it and what to do."""


class Staging:
    """The staging directory of one run. Close it when done."""

    def __init__(self, program: Program, base: Path | None = None, *, forced: bool = False) -> None:
        """``forced`` runs, which take no plan that is tuned already, go on only from one another.

        Directories lie by the program's content, never by its path, under ``base``, by default the user's
        cache. Raises StagingError when nothing can be written there.
        """
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = program.sha256[:16] + ("-forced" if forced else "")
        self._all = (base or Path(home) / "cudnn_fusion" / "staging") / name
        self.directory = self._all / f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.directory.mkdir(parents=True)
        except OSError as error:
            raise StagingError(
                f"cannot write to {self._all} ({error}); name another place with --staging"
            ) from error
        self._lock: int | None = None
        with suppress(OSError):  # a file system without locks
            self._lock = _locked(self.directory)
        self.store = PlanStore(self.directory)
        others = (path for path in sorted(self._all.iterdir()) if path.is_dir() and path.name[0] != ".")
        self.left = tuple(PlanStore(path) for path in others if path != self.directory)
        """What other runs have finished and not published yet."""

    def clear(self, published: Collection[Staged]) -> None:
        """Removes this run's directory, and those of ended runs with no plan but ``published`` ones."""
        for store in self.left:
            if _plans(store) <= set(published):
                with suppress(OSError):  # where it is locked, a run is at work
                    os.close(_locked(store.root))
                    _remove(store.root)
        _remove(self.directory)

    def close(self) -> None:
        """Says that this run has ended. A directory without a plan goes."""
        if not _plans(self.store):
            _remove(self.directory)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            self._all.rmdir()


def _locked(directory: Path) -> int:
    """A descriptor with a lock on the directory, until it is closed. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _plans(store: PlanStore) -> set[Staged]:
    found = [stored.hash for stored in store.environments()]
    return {(environment, plan.key.digest()) for environment in found for plan in store.plans(environment)}


def _remove(directory: Path) -> None:
    """Out of sight at once, then away: half a directory is never read."""
    hidden = directory.with_name(f".removed-{secrets.token_hex(8)}")
    with suppress(OSError):
        os.rename(directory, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
