"""What Ctrl-C does to a tool that must not lose work, nor hang, nor print a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT


def end_at_once() -> None:
    """Lets Ctrl-C end the process with `EXIT_CODE` and a word."""
    signal.signal(signal.SIGINT, _end)


def raise_once() -> None:
    """Lets the first Ctrl-C raise KeyboardInterrupt, and a second one end the process at once."""
    signal.signal(signal.SIGINT, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    end_at_once()
    raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    # Written past Python's buffers, which the interrupted code may hold.
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
