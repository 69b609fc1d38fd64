"""Whether this machine can run the product at all: x86-64 Linux, glibc, Python.

Written in syntax that Python 3.6 reads, and without imports from the package, so that an old interpreter
gets a sentence and not a SyntaxError. Runs as a script too::

    python3 backend_src/cudnn_fusion/platform_check.py

prints one sentence for each problem and exits with 1, or exits with 0.
"""

import os
import platform
import sys

OLDEST_GLIBC = (2, 35)
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)


class UnsupportedPlatformError(RuntimeError):
    """This operating system, processor, C library or Python is not supported."""


def problems(system: str, machine: str, libc: str, python: "tuple[int, int]") -> "list[str]":
    """What is in the way here, one sentence each: what was found, what is needed, what to do.

    ``system`` and ``machine`` are spelled as `platform.system` and `platform.machine` do (``Linux``,
    ``x86_64``), ``libc`` is name and version (``glibc 2.36``; empty when it is not glibc), ``python`` is
    major and minor version. An empty list means supported.
    """
    found = []
    if system != "Linux":
        found.append(
            f"The operating system is {system or 'unknown'}; Linux is needed: "
            "use a Linux machine or a Linux container."
        )
    if machine.lower() not in ("x86_64", "amd64"):
        found.append(
            f"The processor is {machine or 'unknown'}; x86-64 is needed: "
            "use an x86-64 machine (Triton's Python backend and the wheels used here are built for it)."
        )
    if system == "Linux" and (_glibc_version(libc) or (0, 0)) < OLDEST_GLIBC:
        found.append(
            f"The C library is {libc or 'not glibc'}; glibc {_dotted(OLDEST_GLIBC)} or newer is needed: "
            "use Ubuntu 22.04, Debian 12 or newer (Alpine's musl does not work)."
        )
    if not OLDEST_PYTHON <= tuple(python) <= NEWEST_PYTHON:
        found.append(
            f"Python is {_dotted(python)}; {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)} is needed: "
            "make the environment with one of these, for example `python3.12 -m venv .venv`."
        )
    return found


def problems_here() -> "list[str]":
    """`problems` of the running interpreter on this machine."""
    return problems(platform.system(), platform.machine(), _libc_here(), sys.version_info[:2])


def require_supported_platform() -> None:
    """Raises UnsupportedPlatformError, naming every problem, unless this machine is supported."""
    found = problems_here()
    if found:
        raise UnsupportedPlatformError("cudnn-fusion cannot run here. " + " ".join(found))


def _libc_here() -> str:
    """``glibc 2.36``; empty where the C library is another one."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):  # musl, macOS and Windows do not know the name
        return ""


def _glibc_version(libc: str) -> "tuple[int, ...] | None":
    """(2, 36) of ``glibc 2.36``; None for anything else."""
    name, _, version = libc.partition(" ")
    parts = version.split(".")[:2]
    if name != "glibc" or not all(part.isdigit() for part in parts):
        return None
    return tuple(int(part) for part in parts)


def _dotted(version: "tuple[int, ...]") -> str:
    return ".".join(str(part) for part in version)


if __name__ == "__main__":
    sentences = problems_here()
    for sentence in sentences:
        print(sentence)
    sys.exit(1 if sentences else 0)
