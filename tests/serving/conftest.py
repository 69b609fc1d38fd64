"""Servers for tests: started by a factory, stopped by the fixture, nothing left behind at the end.

``serve`` stops its servers after the test, ``serve_module`` after the module, ``serve_session`` at the end.
Each is called with a repository's path or with models by name (see `repositories.make_repository`) and with
`TritonServer`'s own arguments, and returns a server that is ready.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from repositories import make_repository

from cudnn_fusion.shm_regions import list_regions, unused
from cudnn_fusion.triton_server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MARK = f"CUDNN_FUSION_TEST_SESSION={uuid.uuid4().hex}"
"""In the environment of every server started here: its processes are found by it, and only they."""

_running: list[TritonServer] = []


def marked_processes() -> dict[str, str]:
    """Process id to command line of what servers of this test session have started and still runs."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (process / "environ").read_bytes():
                found[process.name] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def eventually(condition, timeout_s: float = 10.0) -> bool:
    """Whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind():
    before = set(list_regions())
    yield
    assert eventually(lambda: not marked_processes()), f"still running: {marked_processes()}"
    # Regions in use belong to others on this machine.
    left = unused(set(list_regions()) - before)
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture
def server_environment():
    """Environment for programs that a test starts itself, so that their processes are checked for too."""
    name, _, value = MARK.partition("=")
    return {name: value}


@pytest.fixture
def server_processes():
    """Gives the command lines of server processes that were not there before the test."""
    before = set(marked_processes())
    return lambda: [line for pid, line in marked_processes().items() if pid not in before]


@contextlib.contextmanager
def _factory(folder: Path):
    with contextlib.ExitStack() as stack:
        number = 0

        def start(models, **arguments) -> TritonServer:
            nonlocal number
            number += 1
            if isinstance(models, dict):
                repository = make_repository(folder / f"repository{number}", models)
                arguments.setdefault("models", tuple(models))
            else:
                repository = models
            name, _, value = MARK.partition("=")
            arguments["env"] = {**arguments.get("env", {}), name: value}
            arguments.setdefault("log_file", folder / f"triton{number}.log")
            server = TritonServer(repository, **arguments)
            _running.append(server)
            stack.callback(_running.remove, server)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def serve(tmp_path):
    with _factory(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory):
    with _factory(tmp_path_factory.mktemp("module")) as start:
        yield start


@pytest.fixture(scope="session")
def serve_session(tmp_path_factory):
    with _factory(tmp_path_factory.mktemp("session")) as start:
        yield start


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A function from a precision to the small network exported in it, as a model directory; not tuned."""
    import small_net

    from cudnn_fusion.declarations import InputDeclaration
    from cudnn_fusion.model_directory import write_model
    from cudnn_fusion.program import export_program

    made: dict[str, Path] = {}

    def export(precision: str) -> Path:
        if precision not in made:
            declarations = [InputDeclaration.parse(text) for text in small_net.INPUTS]
            program = export_program(small_net.small_net(), declarations, precision, name="net")
            made[precision] = tmp_path_factory.mktemp(precision) / "net"
            write_model(*program, made[precision])
        return made[precision]

    return export


@pytest.fixture(scope="session")
def tuned(exported, tmp_path_factory):
    """The small network in fp32, tuned on this machine's CPU at batches 1, 4 and 16 for height 16."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(exported("fp32"), folder / "net")
    buckets = ";".join(f"batch={batch},height=16" for batch in (1, 4, 16))
    command = [sys.executable, str(ROOT / "tools" / "pretune.py"), str(folder / "net")]
    # As in the server: threads that spin while they wait for each other make tuning slow on a busy machine.
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000"}
    options = ["--buckets", buckets, "--staging", str(folder / "staging")]
    subprocess.run([*command, *options], check=True, env=environment)
    return folder / "net"


@pytest.fixture(scope="session")
def model_server(serve_session, tmp_path_factory):
    """A server for models that tests put into it (see `model_server.ModelServer`)."""
    from model_server import ModelServer

    folders = [tmp_path_factory.mktemp(name) for name in ("repository", "elsewhere")]
    # `serve_session` takes one repository; the second one comes as an argument of the server's own.
    server = serve_session(
        folders[0], extra_args=["--model-control-mode=explicit", f"--model-repository={folders[1]}"]
    )
    models = ModelServer(server, *folders)
    yield models
    models.close()


@pytest.fixture(scope="session")
def net(model_server, tuned):
    """The tuned network, loaded. Tests that change it or look at its log take a model of their own."""
    with model_server.put("net", tuned) as model:
        yield model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the last lines of every running server's log to the report of a test that failed."""
    report = yield
    if report.failed:
        for server in _running:
            tail = "\n".join(server.log().splitlines()[-40:])
            report.sections.append((f"Triton's log ({server.http_url})", tail))
    return report
