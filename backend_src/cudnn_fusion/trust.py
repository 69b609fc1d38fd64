"""Which directories of plans are trusted: a plan carries native code."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
