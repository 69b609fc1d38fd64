"""Preflight: facts in, findings out, and nothing raised on whatever machine this is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cudnn_fusion import preflight
from cudnn_fusion.preflight import DeviceFacts, Finding, GpuFacts, check_gpu, gather, judge, load_cudnn

LIBRARY = "/env/nvidia/cudnn/lib/libcudnn.so.9"
DEVICE = DeviceFacts("NVIDIA H200", (9, 0), 132, 6016, 232448, 65536, 150109880320, 13000)
GOOD = GpuFacts(
    ordinal=0,
    device_count=1,
    device=DEVICE,
    driver_release="580.95.05",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    torch_cudnn=91900,
    frontend="1.32.0",
    cudnn=91900,
    cudnn_libraries=(LIBRARY, "/env/nvidia/cudnn/lib/libcudnn_graph.so.9"),
)


def errors(facts: GpuFacts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level == "error"]


def test_a_good_machine_gets_one_line_that_says_which_cudnn_serves() -> None:
    (finding,) = judge(GOOD)
    assert finding.level == "info"
    assert "9.19.0" in finding.what
    assert LIBRARY in finding.what


def test_a_machine_without_a_gpu_gets_one_line_and_no_error() -> None:
    assert judge(GpuFacts(0, 0, None)) == [Finding("info", "no CUDA device; the CPU engine serves")]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (replace(GOOD, device=replace(DEVICE, driver_api=12080)), "speaks CUDA 12.8"),
        (replace(GOOD, torch_cuda=None, torch="2.13.0+cpu"), "build without CUDA"),
        (replace(GOOD, device=replace(DEVICE, compute_capability=(6, 1))), "compute capability 6.1"),
        (replace(GOOD, torch_cudnn=92000), "torch uses cuDNN 9.20.0 and the frontend uses cuDNN 9.19.0"),
        (replace(GOOD, torch_cudnn=None, torch_cudnn_problem="incompatible"), "torch cannot use its cuDNN"),
        (replace(GOOD, cudnn=8907, torch_cudnn=8907), "cuDNN 8.9.7 is loaded"),
        (replace(GOOD, cudnn=None, cudnn_problem="no module named cudnn"), "no module named cudnn"),
        (
            replace(GOOD, cudnn_libraries=(LIBRARY, "/usr/lib/libcudnn.so.9.20.0")),
            f"2 different libcudnn are loaded: {LIBRARY}, /usr/lib/libcudnn.so.9.20.0",
        ),
        (
            replace(GOOD, cudnn_libraries=(LIBRARY, "/usr/lib/libcudnn_graph.so.9")),
            "parts of cuDNN come from different places: /env/nvidia/cudnn/lib, /usr/lib",
        ),
        (GpuFacts(3, 2, None, "CUDA device 3 was asked for and 2 are visible"), "CUDA device 3"),
        (GpuFacts(0, 0, None, "the CUDA driver library cannot be used", "580.95.05"), "cannot be used"),
    ],
)
def test_each_fault_is_one_error_that_says_what_to_do(facts: GpuFacts, told: str) -> None:
    """Mixed cuDNN libraries are those of cudnn-frontend issue 84 and pytorch issue 185512."""
    (finding,) = errors(facts)
    assert told in finding.what
    assert len(finding.do) > 20
    assert judge(facts)[0] == finding


def test_a_driver_one_minor_version_behind_is_a_warning() -> None:
    findings = judge(replace(GOOD, torch_cuda="13.2"))
    assert [finding.level for finding in findings] == ["warning", "info"]
    assert not errors(replace(GOOD, torch_cuda="12.6"))


def test_libraries_are_read_off_the_memory_map() -> None:
    maps = "\n".join(
        [
            "7f00-7f01 r-xp 00000000 08:01 11 /a b/nvidia/cudnn/lib/libcudnn.so.9",
            "7f01-7f02 r--p 00001000 08:01 11 /a b/nvidia/cudnn/lib/libcudnn.so.9",
            "7f02-7f03 r-xp 00000000 08:01 12 /old/libcudnn_graph.so.9.20.0 (deleted)",
            "7f03-7f04 r-xp 00000000 08:01 13 /x/cudnn/_compiled_module.so",
            "7f04-7f05 rw-p 00000000 00:00 0",
            "7f05-7f06 rw-p 00000000 00:00 0 [heap]",
        ]
    )
    assert preflight.loaded_cudnn_libraries(maps) == (
        "/a b/nvidia/cudnn/lib/libcudnn.so.9",
        "/old/libcudnn_graph.so.9.20.0",
    )


def test_looking_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_gpu(0)
    assert check_gpu(-1)
    monkeypatch.setattr(preflight, "gather", lambda ordinal: 1 / 0)
    (finding,) = check_gpu(0)
    assert finding.level == "error"
    assert "ZeroDivisionError" in finding.what


@pytest.mark.parametrize(
    ("status", "release", "level", "told"),
    [
        ("CUDA_ERROR_NO_DEVICE", None, "info", "no CUDA device"),
        ("CUDA_ERROR_NO_DEVICE", "580.95.05", "info", "no CUDA device"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "580.95.05", "error", "SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_driver_that_refuses_is_told_apart_from_no_gpu(
    monkeypatch: pytest.MonkeyPatch, status: str, release: str | None, level: str, told: str
) -> None:
    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuInit=lambda flags: (SimpleNamespace(name=status),)
    )
    monkeypatch.setattr(preflight, "_driver", lambda: driver)
    monkeypatch.setattr(preflight, "driver_release", lambda: release)
    (finding,) = judge(gather(0))
    assert finding.level == level
    assert told in finding.what


def test_a_missing_driver_library_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise OSError("libcuda.so.1 not found")

    driver = SimpleNamespace(cuInit=no_library)
    monkeypatch.setattr(preflight, "_driver", lambda: driver)
    monkeypatch.setattr(preflight, "driver_release", lambda: None)
    assert [finding.level for finding in judge(gather(0))] == ["info"]


def test_the_search_path_is_as_before_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "/somewhere"):
        if before is None:
            monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        else:
            monkeypatch.setenv("LD_LIBRARY_PATH", before)
        with preflight._searched_first("/torch/lib"):
            assert os.environ["LD_LIBRARY_PATH"].split(":")[0] == "/torch/lib"
        assert os.environ.get("LD_LIBRARY_PATH") == before
        with preflight._searched_first(None):
            assert os.environ.get("LD_LIBRARY_PATH") == before


def test_the_library_that_is_loaded_already_is_the_one_the_frontend_takes() -> None:
    """In a process of its own: the frontend decides once, while it is imported."""
    pytest.importorskip("cudnn")
    if not preflight.loaded_cudnn_libraries():
        pytest.skip("no libcudnn is installed")
    library = next(path for path in preflight.loaded_cudnn_libraries() if "libcudnn.so" in path)
    program = f"""
import ctypes, os, shutil, tempfile
ctypes.CDLL({library!r})
other = tempfile.mkdtemp()
shutil.copy({library!r}, os.path.join(other, "libcudnn.so.9"))
os.environ["LD_LIBRARY_PATH"] = other
from cudnn_fusion import preflight
preflight.load_cudnn()
print(*[path for path in preflight.loaded_cudnn_libraries() if "libcudnn.so" in path], sep="\\n")
shutil.rmtree(other)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [library]


def test_a_missing_frontend_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(preflight.CudnnLoadError, match=r"cudnn-fusion\[gpu\]"):
        load_cudnn()
