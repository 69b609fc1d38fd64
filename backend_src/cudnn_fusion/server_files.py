"""Finding a Triton server on this machine and laying out what its Python backend needs.

Two layouts are known: an installed Triton (``/opt/tritonserver``, as in NVIDIA's containers), which has its
backends ready, and the server inside the nvidia-pytriton wheel, which keeps the Python backend's parts in
separate folders, one stub for each Python version.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTAINER_ROOT = Path("/opt/tritonserver")
ROOT_VARIABLE = "TRITON_SERVER_ROOT"
STUB_NAME = "triton_python_backend_stub"
BACKEND_PARTS = ("libtriton_python.so", "triton_python_backend_utils.py")

_SYSTEM_LIBRARIES = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/local/lib",
)


class ServerNotFoundError(RuntimeError):
    """There is no Triton server here that can run models with this Python."""


@dataclass(frozen=True)
class ServerFiles:
    """A Triton server and the parts of its Python backend.

    ``python_backend`` holds libtriton_python.so and triton_python_backend_utils.py; ``stub`` is the program
    that runs models in this Python's version. ``backends`` is a complete backend directory, or None where one
    has to be laid out. ``libraries`` is the folder of the server's bundled libraries, if it has one.
    """

    executable: Path
    python_backend: Path
    stub: Path
    backends: Path | None
    libraries: Path | None


def find_server() -> ServerFiles:
    """The Triton server to use on this machine.

    Looks at the environment variable TRITON_SERVER_ROOT, ``tritonserver`` on PATH, /opt/tritonserver and
    the nvidia-pytriton wheel, and takes the first that has a stub for the running Python. Raises
    ServerNotFoundError naming every place and what was wrong with it.
    """
    looked_at = []
    for place, root in _places():
        if root is None:
            looked_at.append(f"{place}: not there")
            continue
        files = _files_under(root)
        if isinstance(files, ServerFiles):
            return files
        looked_at.append(f"{place} ({root}): {files}")
    places = "".join(f"\n  - {line}" for line in looked_at)
    raise ServerNotFoundError(
        f"No Triton server for Python {_python_version()} was found. Looked at:{places}\n"
        "Install one with `pip install 'cudnn-fusion[server]'`, or set "
        f"{ROOT_VARIABLE} to the folder that holds bin/tritonserver."
    )


def lay_out(files: ServerFiles, folder: Path) -> Path:
    """Makes what the server needs under ``folder`` (empty, private); returns its backend directory.

    Besides the backend directory, ``folder/lib`` gets a link to the shared libpython that the stub
    is linked with. Raises ServerNotFoundError when this Python has none.
    """
    libraries = folder / "lib"
    libraries.mkdir(parents=True)
    if libpython := find_libpython(files):
        (libraries / libpython.name).symlink_to(libpython)
    if files.backends is not None:
        return files.backends
    python_backend = folder / "backends" / "python"
    python_backend.mkdir(parents=True)
    for part in BACKEND_PARTS:
        shutil.copy(files.python_backend / part, python_backend / part)
    stub = shutil.copy(files.stub, python_backend / STUB_NAME)
    os.chmod(stub, 0o755)
    return folder / "backends"


def server_environment(files: ServerFiles, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what the server and its stubs need, ``folder`` being the one given to `lay_out`.

    The interpreter inside the stub takes ``python3`` from PATH to find its packages, so the running
    interpreter's folder comes first. Stubs that heed it write no byte code beside models; the others are kept
    from it by a file that an export puts there. Raises ServerNotFoundError when ``python3`` is another
    Python.
    """
    scripts = Path(sys.executable).parent
    python3 = scripts / "python3"
    if not python3.exists() or python3.resolve() != Path(sys.executable).resolve():
        raise ServerNotFoundError(
            f"{python3} is not the running Python ({sys.executable}); Triton starts models with `python3`: "
            "run from a virtual environment (`python -m venv .venv`), which has the right one."
        )
    libraries = [folder / "lib", files.libraries, base.get("LD_LIBRARY_PATH")]
    return {
        **base,
        "PATH": f"{scripts}{os.pathsep}{base.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": os.pathsep.join(str(path) for path in libraries if path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def find_libpython(files: ServerFiles) -> Path | None:
    """The shared libpython that the stub is linked with; None when the server brings it along.

    Raises ServerNotFoundError when it is not on this machine.
    """
    name = _libpython_name(files.stub)
    if name is None or (files.libraries and (files.libraries / name).is_file()):
        return None
    folders = list(_libpython_folders())
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ServerNotFoundError(
        f"{name} was not found in {', '.join(map(str, folders))}. Triton runs models in a program that is "
        f"linked with it, and {sys.base_prefix} was built without a shared library: install it (Debian and "
        f"Ubuntu: `apt-get install libpython{_python_version()}`), build Python with --enable-shared, or add "
        "its folder to LD_LIBRARY_PATH."
    )


def _places() -> Iterator[tuple[str, Path | None]]:
    """Where a server may be, best first: a name for messages and its root, or None if absent."""
    root = os.environ.get(ROOT_VARIABLE)
    yield f"environment variable {ROOT_VARIABLE}", Path(root) if root else None
    on_path = shutil.which("tritonserver")
    yield "tritonserver on PATH", Path(on_path).resolve().parent.parent if on_path else None
    yield str(CONTAINER_ROOT), CONTAINER_ROOT if CONTAINER_ROOT.is_dir() else None
    wheel = importlib.util.find_spec("pytriton")  # finds without importing: the import starts threads
    locations = (wheel.submodule_search_locations or []) if wheel else []
    yield "Python package nvidia-pytriton", Path(locations[0]) / "tritonserver" if locations else None


def _files_under(root: Path) -> ServerFiles | str:
    """The server under ``root``, or a phrase that says what is wrong with it."""
    executable = root / "bin" / "tritonserver"
    if not executable.is_file():
        return "has no bin/tritonserver"
    if not os.access(executable, os.X_OK):
        return f"{executable} is not executable: chmod +x it"
    python_backend = root / "backends" / "python"
    for part in BACKEND_PARTS:
        if not (python_backend / part).is_file():
            return f"has no backends/python/{part}"
    stubs = root / "python_backend_stubs"
    stub = stubs / _python_version() / STUB_NAME if stubs.is_dir() else python_backend / STUB_NAME
    if not stub.is_file():
        return f"has no stub for Python {_python_version()} ({stub})"
    built_for = _stub_python(stub)
    if built_for and built_for != _python_version():
        return f"its stub runs models with Python {built_for}, this is {_python_version()}"
    bundled = root.parent.parent / "nvidia_pytriton.libs"
    return ServerFiles(
        executable=executable,
        python_backend=python_backend,
        stub=stub,
        backends=None if stubs.is_dir() else root / "backends",
        libraries=bundled if stubs.is_dir() and bundled.is_dir() else None,
    )


def _libpython_folders() -> Iterator[Path]:
    configured = sysconfig.get_config_var("LIBDIR")
    if configured:
        yield Path(configured)
        yield Path(configured) / (sysconfig.get_config_var("MULTIARCH") or "")
    yield Path(sys.base_prefix) / "lib"
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry)
    yield from map(Path, _SYSTEM_LIBRARIES)


def _libpython_name(stub: Path) -> str | None:
    """File name of the libpython that ``stub`` is linked with, ``libpython3.11.so.1.0``."""
    found = re.search(rb"libpython3[\w.-]*\.so[\d.]*", stub.read_bytes())
    return found.group().decode() if found else None


def _stub_python(stub: Path) -> str | None:
    """The Python version that ``stub`` embeds, ``3.11``; a bundled libpython has a hash in its name."""
    found = re.match(r"libpython3(?:-[0-9a-f]+)?\.(\d+)", _libpython_name(stub) or "")
    return f"3.{found.group(1)}" if found else None


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
