"""Where a pre-tuning run keeps finished plans until all are; the next run goes on with what one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from cudnn_fusion.lowered import Program


class StagingError(Exception):
    """There is no place for unfinished work; the message names it and what to do."""


class Staging:
    """A directory for one program, by its content and never by its path. Runs at the same time share it."""

    def __init__(self, program: Program, base: Path | None = None, *, forced: bool = False) -> None:
        """``forced`` runs, which take no plan that is tuned already, go on only from one another.

        ``base`` is the user's cache by default. Raises StagingError when nothing can be written there.
        """
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = program.sha256[:16] + ("-forced" if forced else "")
        self.directory = (base or Path(home) / "cudnn_fusion" / "staging") / name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError as error:
            raise StagingError(
                f"cannot write to {self.directory} ({error}); name another place with --staging"
            ) from error
        if not os.access(self.directory, os.W_OK):
            raise StagingError(f"cannot write to {self.directory}; name another place with --staging")

    def clear(self) -> None:
        """Removes the directory, whose plans are published, unless another run is using it."""
        if self._lock is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Lets other runs clear the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
