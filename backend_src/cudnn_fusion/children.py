"""Processes of this package beside a server's: they end with it and leave its signals to it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path


def interpreter() -> str:
    """The Python of this environment, which has this package; the first on PATH may be another one.

    ``sys.executable`` alone does not do: in a program that embeds Python it may be empty.
    """
    own = Path(sys.prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(own) if own.exists() else (sys.executable or shutil.which("python3") or "python3")


def live_and_die_with_parent() -> None:
    """To be called in the child: the server's signals are the server's to handle, a killed server leaves
    nothing behind, and requests come first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.nice(10)
