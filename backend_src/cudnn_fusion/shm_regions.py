"""The shared-memory regions of Triton's Python backend: counting them and removing forgotten ones.

A server that is killed cannot remove its regions, and they hold memory (``/dev/shm``) until the machine
restarts. A region is removed only when nothing uses it, which is asked twice: no process here maps it or
holds it open (``/proc``), and the kernel grants a write lease on it, which it refuses while anybody has
it open, processes in other containers that share ``/dev/shm`` included.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
REGION_PATTERN = "triton_python_backend_shm_region_*"

_log = logging.getLogger(__name__)

_FileId = tuple[int, int]
"""Device and inode number: the same file by whatever path a process sees it."""


def list_regions() -> list[Path]:
    """Every region present now, used or not, sorted by name."""
    return sorted(SHARED_MEMORY.glob(REGION_PATTERN))


def count_regions() -> int:
    """How many regions are present now, used or not."""
    return len(list_regions())


def sweep_shared_memory() -> list[str]:
    """Removes the regions that nothing uses; returns their paths.

    Regions that cannot be asked about or removed (another user's) are left, with a warning.
    """
    return remove_unused(list_regions())


def unused(regions: Iterable[Path]) -> list[Path]:
    """Those of ``regions`` that nothing uses."""
    # The regions are listed before the processes are read: one that a starting server has made by then is
    # open or mapped, and so is seen.
    candidates = list(regions)
    used = _files_in_use() if candidates else set()
    return [region for region in candidates if _is_unused(region, used)]


def remove_unused(regions: Iterable[Path]) -> list[str]:
    """Removes those of ``regions`` that nothing uses; returns their paths."""
    removed = []
    for region in unused(regions):
        try:
            region.unlink()
        except OSError as error:
            _log.warning("left %s in place: %s", region, error.strerror)
        else:
            removed.append(str(region))
    return removed


def _is_unused(region: Path, used: set[_FileId]) -> bool:
    try:
        status = region.stat()
        return (status.st_dev, status.st_ino) not in used and not _opened_elsewhere(region)
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.warning("cannot tell whether %s is in use and leave it: %s", region, error.strerror)
        return False


def _opened_elsewhere(region: Path) -> bool:
    """Whether the kernel knows of any other open or mapping of ``region``."""
    descriptor = os.open(region, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        # EINVAL is a file system without leases, where /proc has to do; anything else means "in use".
        return error.errno != errno.EINVAL
    finally:
        os.close(descriptor)  # gives the lease back
    return False


def _files_in_use() -> set[_FileId]:
    """The regions that processes map or hold open, as far as /proc shows them."""
    used: set[_FileId] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            used |= _mapped_files(process) | _open_files(process)
    return used


def _mapped_files(process: Path) -> set[_FileId]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # it has ended, or is another user's
        return set()
    found = set()
    for line in lines:
        if "triton_python_backend" in line:
            _, _, _, device, inode, _ = line.split(maxsplit=5)
            major, minor = (int(part, 16) for part in device.split(":"))
            found.add((os.makedev(major, minor), int(inode)))
    return found


def _open_files(process: Path) -> set[_FileId]:
    found = set()
    try:
        for descriptor in (process / "fd").iterdir():
            if "triton_python_backend" in os.readlink(descriptor):
                status = descriptor.stat()
                found.add((status.st_dev, status.st_ino))
    except OSError:  # it has ended, closed the file, or is another user's
        pass
    return found
