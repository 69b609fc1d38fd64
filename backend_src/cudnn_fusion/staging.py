"""Where a pre-tuning run keeps finished plans until all are; a later run goes on with what one has left.

Every run has a directory of its own beside those of other runs of the same program, and reads the others'. A
run that comes to its end removes its own. What runs for the same model directory have left when they ended
goes when all of it is published, or taken over by a later run.
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

_MODEL = "model"
_REMOVED = ".removed-"

Staged = tuple[str, str]
"""Hash of an environment, digest of a plan's key."""


class StagingError(Exception):
    """There is no place for unfinished work; the message names it and what to do."""


class Staging:
    """The staging directory of one run. Close it when done."""

    def __init__(
        self, program: Program, model: Path, base: Path | None = None, *, forced: bool = False
    ) -> None:
        """For a run that publishes into the version directory ``model``.

        ``forced`` runs, which take no plan that is tuned already, go on only from one another.

        Directories lie by the program's content, never by its path, under ``base``, by default the user's
        cache. Raises StagingError when nothing can be written there.
        """
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = program.sha256[:16] + ("-forced" if forced else "")
        self._all = (base or Path(home) / "cudnn_fusion" / "staging") / name
        self.directory = self._all / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._model = str(model.resolve())
        self._lock: int | None = None
        try:
            _make(self.directory)
            with suppress(OSError):  # a file system without locks
                self._lock = _locked(self.directory)
            # Last: nobody removes a directory without it.
            (self.directory / _MODEL).write_text(self._model, encoding="utf-8")
        except OSError as error:
            raise StagingError(
                f"cannot write to {self._all} ({error}); name another place with --staging"
            ) from error
        for half_removed in self._all.glob(f"{_REMOVED}*"):
            shutil.rmtree(half_removed, ignore_errors=True)
        self.store = PlanStore(self.directory)
        others = (path for path in sorted(self._all.iterdir()) if path.is_dir() and path.name[0] != ".")
        self.left = tuple(PlanStore(path) for path in others if path != self.directory)
        """What other runs have finished and not published yet."""

    def clear(self, published: Collection[Staged]) -> None:
        """Removes this run's directory, and what ended runs have left that holds none but ``published``."""
        self._remove_left(set(published))
        _remove(self.directory)

    def close(self) -> None:
        """Says that this run has ended, and removes directories in which there is nothing more."""
        mine = _plans(self.store)
        if mine is not None:
            self._remove_left(mine)
            if not mine:
                _remove(self.directory)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        with suppress(OSError):
            self._all.rmdir()

    def _remove_left(self, elsewhere: set[Staged]) -> None:
        """Removes what ended runs for this model directory have left that is ``elsewhere`` too."""
        for store in self.left:
            found = _plans(store)
            with suppress(OSError):  # it is gone, or locked: a run is at work
                of_this_model = (store.root / _MODEL).read_text(encoding="utf-8") == self._model
                if of_this_model and found is not None and found <= elsewhere:
                    os.close(_locked(store.root))
                    _remove(store.root)


def _make(directory: Path) -> None:
    """As mkdir; another run that ends may remove the parent in between. Raises OSError."""
    for _ in range(10):
        with suppress(FileNotFoundError):
            directory.mkdir(parents=True)
            return
    directory.mkdir(parents=True)


def _locked(directory: Path) -> int:
    """A descriptor with a lock on the directory, until it is closed. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _plans(store: PlanStore) -> set[Staged] | None:
    """The plans of a store; None where some cannot be read now, which is not to say that there are none."""
    environments = [stored.hash for stored in store.environments()]
    plans = {(name, plan.key.digest()) for name in environments for plan in store.plans(name)}
    return plans if len(plans) == sum(1 for _ in store.root.glob("*/entries/*.json")) else None


def _remove(directory: Path) -> None:
    """Out of sight at once, then away: half a directory is never read."""
    hidden = directory.with_name(f"{_REMOVED}{secrets.token_hex(8)}")
    with suppress(OSError):
        os.rename(directory, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
