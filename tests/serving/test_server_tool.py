"""The real server under its class and under tools/serve.py."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from conftest import eventually
from model_server import children
from repositories import ECHO, SourceModel, make_repository, on_cpu, python_model, simple_config

from cudnn_fusion import server_files, shm_regions, triton_server
from cudnn_fusion.triton_server import ServerNotFoundError, ServerStartError, TritonServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def echo(serve_module):
    return serve_module({"echo": ECHO})


@pytest.fixture
def no_server(monkeypatch, tmp_path):
    """A machine on which no server is installed."""
    monkeypatch.delenv(server_files.ROOT_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_files, "CONTAINER_ROOT", tmp_path / "opt")
    monkeypatch.setattr(server_files.importlib.util, "find_spec", lambda name: None)


def installed_layout(root: Path, stub: bytes) -> Path:
    """An empty Triton as its containers have it, with ``stub`` as the stub's content."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tritonserver").touch(mode=0o755)
    (root / "backends" / "python").mkdir(parents=True)
    for part in server_files.BACKEND_PARTS:
        (root / "backends" / "python" / part).touch()
    (root / "backends" / "python" / server_files.STUB_NAME).write_bytes(stub)
    return root


def input_of(client, name, data):
    tensor = client.InferInput(name, data.shape, "FP32")
    tensor.set_data_from_numpy(data)
    return tensor


# Finding a server


def test_the_wheels_server_is_found_without_importing_it():
    code = "import sys; from cudnn_fusion.triton_server import find_server as f; f(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pytriton" not in ended.stdout.split()


def test_without_a_server_every_place_and_the_remedy_are_named(no_server, monkeypatch, tmp_path):
    monkeypatch.setenv(server_files.ROOT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ServerNotFoundError) as error:
        triton_server.find_server()
    for part in ("TRITON_SERVER_ROOT", "nowhere", "PATH", "opt", "nvidia-pytriton", "cudnn-fusion[server]"):
        assert part in str(error.value)


def test_an_installed_server_with_a_stub_for_this_python_is_used(no_server, monkeypatch, tmp_path):
    name = f"libpython3.{sys.version_info.minor}.so.1.0".encode()
    root = installed_layout(tmp_path / "triton", b"ELF\0" + name + b"\0")
    monkeypatch.setenv(server_files.ROOT_VARIABLE, str(root))
    files = triton_server.find_server()
    assert files.executable == root / "bin" / "tritonserver"
    assert files.backends == root / "backends"


def test_an_installed_server_for_another_python_is_refused_with_the_reason(no_server, monkeypatch, tmp_path):
    root = installed_layout(tmp_path / "triton", b"ELF\0libpython3.7m.so.1.0\0")
    monkeypatch.setenv(server_files.ROOT_VARIABLE, str(root))
    with pytest.raises(ServerNotFoundError, match=r"runs models with Python 3\.7"):
        triton_server.find_server()


def test_a_python_without_shared_library_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(server_files, "_libpython_folders", lambda: iter([tmp_path]))
    name = f"libpython3.{sys.version_info.minor}.so.1.0"
    root = installed_layout(tmp_path / "triton", name.encode())
    files = server_files._files_under(root)
    with pytest.raises(ServerNotFoundError, match=rf"{name} was not found in .*--enable-shared"):
        server_files.lay_out(files, tmp_path / "private")


def test_the_container_layout_serves(serve, monkeypatch, tmp_path):
    wheel = triton_server.find_server()
    root = tmp_path / "triton"
    (root / "backends").mkdir(parents=True)
    (root / "bin").symlink_to(wheel.executable.parent)
    (root / "backends" / "python").symlink_to(server_files.lay_out(wheel, tmp_path / "parts") / "python")
    monkeypatch.setenv(server_files.ROOT_VARIABLE, str(root))
    assert triton_server.find_server().backends == root / "backends"
    # An installed server finds its libraries by itself; this one is made of the wheel's parts.
    server = serve({"echo": ECHO}, env={"LD_LIBRARY_PATH": str(wheel.libraries)})
    assert "echo" in server.metrics()


# The class


def test_echo_over_grpc_and_http_and_metrics(echo):
    data = np.random.default_rng(0).standard_normal((3, 1024)).astype(np.float32)
    for client, url in ((tritonclient.grpc, echo.grpc_url), (tritonclient.http, echo.http_url)):
        with client.InferenceServerClient(url) as connection:
            answer = connection.infer("echo", [input_of(client, "INPUT", data)])
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), data)
    assert 'nv_inference_count{model="echo",version="1"} 6' in echo.metrics()
    assert echo.log_errors() == []
    assert "successfully loaded 'echo'" in echo.log()


def test_ports_are_chosen_and_may_be_given(serve):
    (port,) = triton_server.free_ports([0])
    server = serve({"echo": ECHO}, grpc_port=port)
    assert server.grpc_url == f"127.0.0.1:{port}"
    assert len({server.http_url, server.grpc_url, server.metrics_url.split("/")[2]}) == 3


def test_stop_leaves_no_process_no_region_and_no_file(tmp_path, server_environment, server_processes):
    regions = shm_regions.list_regions()
    server = TritonServer(
        make_repository(tmp_path / "models", {"echo": ECHO}), models=["echo"], env=server_environment
    )
    with server:
        folder = server._folder
        assert len(set(shm_regions.list_regions()) - set(regions)) >= 1
        assert any("stub" in line for line in server_processes())
    assert server.stop() == 0
    assert server_processes() == []
    assert shm_regions.unused(set(shm_regions.list_regions()) - set(regions)) == []
    assert not folder.exists()
    assert "successfully loaded 'echo'" in server.log()


def test_what_a_killed_server_leaves_is_cleaned_up(server_processes, serve):
    regions = set(shm_regions.list_regions())
    server = serve({"echo": ECHO})
    os.kill(server.pid, signal.SIGKILL)
    assert server.stop() == -signal.SIGKILL
    assert server_processes() == []
    assert shm_regions.unused(set(shm_regions.list_regions()) - regions) == []


def test_a_stub_that_will_not_end_is_killed(serve, server_processes):
    code = python_model(initialize="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    code += "    def finalize(self):\n        time.sleep(600)\n"
    server = serve(
        {"stubborn": SourceModel(simple_config("stubborn"), code)}, exit_timeout_s=1, ready_timeout_s=30
    )
    server.stop()
    assert server_processes() == []


def test_a_signal_waits_until_the_server_sleeps():
    """While its main thread works, Triton may hold the lock that its signal handler takes."""
    program = "import time\nend = time.monotonic() + 0.7\nwhile time.monotonic() < end: pass\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        started = time.monotonic()
        triton_server._until_it_waits(process)
        assert time.monotonic() - started >= 0.7
    finally:
        process.kill()
        process.wait()
    triton_server._until_it_waits(process)  # one that has ended is not waited for


def test_what_outlives_the_server_in_its_group_is_killed(monkeypatch):
    monkeypatch.setattr(triton_server, "_STUB_GRACE_S", 0.3)
    leader = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 &"], start_new_session=True)
    leader.wait()
    assert triton_server._group_has_members(leader)
    triton_server._end_group(leader)
    assert not triton_server._group_has_members(leader)


def test_the_server_ends_with_the_program_that_started_it(tmp_path, server_environment, server_processes):
    make_repository(tmp_path / "models", {"echo": ECHO})
    code = (
        "import sys, time; from cudnn_fusion.triton_server import TritonServer\n"
        f"with TritonServer({str(tmp_path / 'models')!r}, models=['echo'], "
        f"log_file=__import__('pathlib').Path({str(tmp_path / 'log')!r})):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    # A program that is killed cannot remove its temporary files: they go where pytest cleans up.
    environment = {**os.environ, **server_environment, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as program:
        assert program.stdout.readline() == b"ready\n"
        assert any("tritonserver" in line for line in server_processes())
        program.kill()
    assert eventually(lambda: not server_processes(), timeout_s=20)


@pytest.mark.parametrize("arguments", [(), ("--exit-on-error=false",)])
def test_a_model_that_fails_to_load_is_named_with_its_error(serve, arguments):
    model = SourceModel(simple_config("broken"), python_model("raise RuntimeError('the weights are gone')"))
    with pytest.raises(ServerStartError, match=r"(?s)broken.*the weights are gone"):
        serve({"broken": model}, extra_args=arguments)


def test_a_model_that_never_gets_ready_is_given_up_in_time(serve):
    model = SourceModel(simple_config("slow"), python_model("time.sleep(600)"))
    with pytest.raises(ServerStartError, match="not ready after 3 s"):
        serve({"slow": model}, ready_timeout_s=3, exit_timeout_s=1)


def test_a_server_that_ends_at_once_shows_its_words(serve):
    with pytest.raises(ServerStartError, match=r"(?s)exit code 1.*unrecognized option"):
        serve({"echo": ECHO}, extra_args=["--no-such-option"])


def test_a_repository_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a directory.*export\.py"):
        TritonServer(tmp_path / "nowhere")


def servers_below(pid: int) -> list[int]:
    """Children of a process that run tritonserver, not on their way to it."""
    return [int(c) for c in children(pid) if b"tritonserver\0" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_the_tool_kills_a_server_that_hangs_when_asked_to_end(tmp_path, server_environment, server_processes):
    make_repository(tmp_path / "models", {"echo": ECHO})
    code = (
        "from cudnn_fusion.triton_server import TritonServer\nfrom tools.serve import run_in_foreground\n"
        f"server = TritonServer({str(tmp_path / 'models')!r}, exit_timeout_s=1, inherit_output=True)\n"
        "raise SystemExit(128 - run_in_foreground(server))"
    )
    environment = {**os.environ, **server_environment, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT) as tool:
        assert eventually(lambda: servers_below(tool.pid), timeout_s=30)
        for server in servers_below(tool.pid):
            os.kill(server, signal.SIGSTOP)
        tool.send_signal(signal.SIGTERM)
        # Which signal ends it depends on how far its start had come.
        assert tool.wait(30) in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    assert server_processes() == []


# Shared memory


@pytest.fixture
def regions():
    """Three files named as regions are and one named otherwise; removed at the end."""
    prefix = "/dev/shm/triton_python_backend_shm_region_"
    paths = [Path(f"{prefix}test{os.getpid()}_{number}") for number in range(3)]
    paths.append(Path(f"/dev/shm/test_other_{os.getpid()}"))
    for path in paths:
        path.write_bytes(bytes(4096))
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_only_regions_that_nothing_uses_are_swept(regions):
    mapped, opened, orphan, other = regions
    before = triton_server.count_regions()
    holder = (
        "import mmap, sys, os, ctypes\n"
        "a = open(sys.argv[1], 'r+b'); m = mmap.mmap(a.fileno(), 4096); a.close()\n"
        "b = open(sys.argv[2], 'rb')\n"
        "print('holding', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(mapped), str(opened)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"holding\n"
        removed = triton_server.sweep_shared_memory()
        assert str(orphan) in removed
        assert mapped.exists()
        assert opened.exists()
        assert triton_server.count_regions() == before - len(removed)
        process.stdin.close()
        process.wait()
    assert {str(mapped), str(opened)} <= set(triton_server.sweep_shared_memory())
    assert other.exists()


@pytest.mark.parametrize("hidden", ["_files_in_use", "_opened_elsewhere"])
def test_either_way_of_asking_is_enough_to_keep_a_region(regions, monkeypatch, hidden):
    """Processes of other containers are not in /proc, and some file systems have no leases."""
    nothing = {"_files_in_use": set, "_opened_elsewhere": lambda region: False}
    monkeypatch.setattr(shm_regions, hidden, nothing[hidden])
    with regions[0].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        triton_server.sweep_shared_memory()
        assert regions[0].exists()
        assert not regions[2].exists()


def test_a_running_servers_regions_are_kept(echo):
    triton_server.sweep_shared_memory()
    data = np.ones((1, 8), np.float32)
    with tritonclient.grpc.InferenceServerClient(echo.grpc_url) as client:
        answer = client.infer("echo", [input_of(tritonclient.grpc, "INPUT", data)])
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), data)


# tools/serve.py


@pytest.fixture
def serve_tool(tmp_path, server_environment):
    """Starts tools/serve.py with these arguments; ended with the test."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "serve.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **server_environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def port_arguments():
    ports = triton_server.free_ports([0, 0, 0])
    return [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_tool_serves_until_a_signal_and_sweeps_first(
    serve_tool, tmp_path, number, regions, server_processes
):
    make_repository(tmp_path / "model_repository", {"echo": ECHO})
    tool = serve_tool(*port_arguments(), "--", "--log-info=true")
    lines = []
    while "Started Metrics Service" not in "".join(lines):
        lines.append(tool.stdout.readline())
        assert lines[-1], "".join(lines)
    tool.send_signal(number)
    rest, _ = tool.communicate(timeout=60)
    assert tool.returncode == 0, rest
    assert any("removed" in line and regions[2].name in line for line in lines)
    assert server_processes() == []


def test_the_tool_ends_with_the_servers_exit_code(serve_tool, tmp_path):
    model = SourceModel(simple_config("broken"), python_model("raise RuntimeError('no weights')"))
    make_repository(tmp_path / "models", {"broken": model})
    tool = serve_tool("--model-repository", "models", *port_arguments())
    output, _ = tool.communicate(timeout=60)
    assert tool.returncode == 1
    assert "no weights" in output


def test_the_tool_names_a_port_that_is_taken(serve_tool, tmp_path):
    make_repository(tmp_path / "model_repository", {"echo": ECHO})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tool = serve_tool(*port_arguments(), f"--grpc-port={port}")
        output, _ = tool.communicate(timeout=30)
    assert tool.returncode == 2
    assert f"Port {port} (grpc)" in output
    assert "--grpc-port" in output


def test_the_tool_says_that_a_repository_is_missing(serve_tool):
    tool = serve_tool("--model-repository", "nowhere", *port_arguments())
    output, _ = tool.communicate(timeout=30)
    assert tool.returncode == 2
    assert "nowhere is not a directory" in output


# Helpers of these tests


def test_instance_groups_are_moved_to_the_cpu_and_nothing_else_is_changed():
    config = 'name: "m"\ninstance_group [ { kind: KIND_GPU, count: 2, gpus: [ 0, 1 ] } ]\nmax_batch_size: 1\n'
    expected = 'name: "m"\ninstance_group [ { kind: KIND_CPU, count: 2, } ]\nmax_batch_size: 1\n'
    assert on_cpu(config) == expected
