"""Planning with the real cuDNN for a described H200, in processes that see a stand-in for the CUDA driver."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))


def nvrtc_directory() -> Path:
    """Where the package nvidia-cuda-nvrtc has its library."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else []:
        for library in Path(root).glob("*/lib/libnvrtc.so.*"):
            return library.parent
    pytest.fail("libnvrtc is missing: pip install 'cudnn-fusion[cpu]'")


def build_driver(source: Path, folder: Path) -> None:
    """Compiles ``source`` to a libcuda.so.1 in ``folder``."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("a C compiler is missing: it builds the stand-in for the CUDA driver (apt install gcc)")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)


@pytest.fixture(scope="session")
def planning_environment(tmp_path_factory):
    """The environment of a process in which cuDNN's runtime-compiled engines can compile."""
    folder = tmp_path_factory.mktemp("driver")
    build_driver(HERE / "driver_stand_in.c", folder)
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{nvrtc_directory()}"}


@pytest.fixture(scope="session")
def driverless_environment(tmp_path_factory):
    """The environment of a process whose CUDA driver has none of the functions that cuDNN asks for."""
    folder = tmp_path_factory.mktemp("no_driver")
    source = folder / "nothing.c"
    source.write_text("int nothing;\n")
    build_driver(source, folder)
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{nvrtc_directory()}"}


@pytest.fixture(scope="session")
def plan(planning_environment):
    """Plans cases (see `planning.segment_of`) in one process; gives an answer for each."""

    def run(*cases: dict) -> list[dict]:
        done = subprocess.run(
            [sys.executable, str(HERE / "planning.py")],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            env=planning_environment,
            check=False,
        )
        assert done.returncode == 0, f"planning ended with {done.returncode}: {done.stderr[-2000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def script(planning_environment):
    """Runs Python text that may import `planning`; gives its finished process."""

    def run(
        text: str, *arguments: object, stdin: str = "", environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        environment = planning_environment if environment is None else environment
        return subprocess.run(
            [sys.executable, "-c", text, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            env={**environment, "PYTHONPATH": str(HERE)},
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def tool(planning_environment, tmp_path_factory):
    """Runs one of tools/*.py; gives the finished process."""
    cache = tmp_path_factory.mktemp("cache")

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**planning_environment, "XDG_CACHE_HOME": str(cache)},
            cwd=ROOT,
            check=False,
        )

    return run
