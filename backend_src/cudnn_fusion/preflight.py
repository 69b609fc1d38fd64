"""Is this machine's GPU software fit to serve? Looked at once, before anything is planned or loaded.

`gather` collects facts and `judge`, a pure function, turns them into findings that a person can act on.
Nothing here raises because of what a machine has or lacks, except `read_device` and `load_cudnn`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST_CUDNN = 90000
"""The oldest cuDNN that the frontend's serialized plans work with."""
OLDEST_COMPUTE_CAPABILITY = (7, 0)

_NO_DEVICE = "CUDA_ERROR_NO_DEVICE"
_INSTALL = "install the GPU packages: pip install 'cudnn-fusion[gpu]'"
_import_lock = threading.Lock()


class GpuUnavailableError(RuntimeError):
    """A CUDA device cannot be used: none is there, the driver refuses, or cuda-python is missing."""


class CudnnLoadError(RuntimeError):
    """cuDNN or its frontend cannot be loaded."""


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it. ``level`` is ``error``, ``warning`` or ``info``."""

    level: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.what}. {self.do}" if self.do else self.what


@dataclass(frozen=True)
class DeviceFacts:
    """A CUDA device as its driver describes it. ``driver_api`` is the driver's API version (13000)."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bus_bits: int
    shared_memory_per_block_optin_bytes: int
    registers_per_block: int
    total_memory_bytes: int
    driver_api: int


@dataclass(frozen=True)
class GpuFacts:
    """All that `judge` looks at. Versions are None where the thing is missing.

    ``cuda_problem`` is why the CUDA driver could not be asked although a kernel driver is there;
    ``cudnn_problem`` why cuDNN did not load and ``torch_cudnn_problem`` why torch's did not answer.
    ``cudnn_libraries`` are the paths of all libcudnn files mapped into this process.
    """

    ordinal: int
    device_count: int
    device: DeviceFacts | None
    cuda_problem: str | None = None
    driver_release: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_cudnn: int | None = None
    torch_cudnn_problem: str | None = None
    frontend: str | None = None
    cudnn: int | None = None
    cudnn_problem: str | None = None
    cudnn_libraries: tuple[str, ...] = ()


def check_gpu(device: int) -> list[Finding]:
    """Everything that speaks for or against serving on CUDA device ``device``; never raises.

    ``device`` is an ordinal in the numbering that CUDA_VISIBLE_DEVICES leaves to this process.
    """
    try:
        return judge(gather(device))
    except Exception as problem:
        return [
            Finding(
                "error",
                f"the GPU software could not be looked at: {type(problem).__name__}: {problem}",
                "Check the driver with nvidia-smi and the packages with pip check",
            )
        ]


def load_cudnn() -> None:
    """Imports the frontend (``import cudnn``) so that it uses the libcudnn that torch brought, if any.

    Left alone, the frontend takes the first libcudnn on LD_LIBRARY_PATH, which may be a second one. Raises
    CudnnLoadError when the frontend or a libcudnn is missing. Safe to call again.
    """
    try:
        importlib.import_module("torch")
        with _import_lock, _searched_first(_directory_of_loaded_cudnn()):
            frontend: Any = importlib.import_module("cudnn")
        frontend.backend_version()
    except ImportError as problem:
        raise CudnnLoadError(f"the cuDNN frontend cannot be imported ({problem}); {_INSTALL}") from problem
    except (OSError, RuntimeError, AssertionError) as problem:
        raise CudnnLoadError(
            f"the cuDNN frontend found no usable libcudnn ({problem}); install a CUDA build of torch, which "
            "brings one, or on a machine without a GPU: pip install nvidia-cudnn-cu13"
        ) from problem


def cudnn_version() -> int:
    """The version of the cuDNN backend that the frontend uses (91900). Raises CudnnLoadError."""
    load_cudnn()
    frontend: Any = importlib.import_module("cudnn")
    return int(frontend.backend_version())


def read_device(ordinal: int) -> DeviceFacts:
    """Asks the CUDA driver about one device; makes no context. Raises GpuUnavailableError."""
    driver = _driver()
    count = _count(driver)
    if not 0 <= ordinal < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise GpuUnavailableError(f"CUDA device {ordinal} was asked for and {count} are visible{seen}")
    device = _ask(driver, "cuDeviceGet", ordinal)
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(
            _ask(driver, "cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device)
        )

    return DeviceFacts(
        name=_ask(driver, "cuDeviceGetName", 256, device).split(b"\0")[0].decode("utf-8", "replace").strip(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_bus_bits=attribute("GLOBAL_MEMORY_BUS_WIDTH"),
        shared_memory_per_block_optin_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        registers_per_block=attribute("MAX_REGISTERS_PER_BLOCK"),
        total_memory_bytes=int(_ask(driver, "cuDeviceTotalMem", device)),
        driver_api=int(_ask(driver, "cuDriverGetVersion")),
    )


def driver_release() -> str | None:
    """The NVIDIA kernel driver's release (``580.95.05``), or None where there is none to be seen."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
        if found:
            return found.group(1)
    except OSError:
        pass
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        release = nvml.nvmlSystemGetDriverVersion()
        return release.decode() if isinstance(release, bytes) else str(release)
    except Exception:  # no such package, no driver, or a driver of another release: unknown either way
        return None


def frontend_version() -> str | None:
    """The installed frontend's version, read without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_cudnn_libraries(maps: str | None = None) -> tuple[str, ...]:
    """Paths of all libcudnn files in this process, sorted; ``maps`` stands in for /proc/self/maps."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
    paths = set()
    for line in maps.splitlines():
        columns = line.split(maxsplit=5)
        path = columns[5].removesuffix(" (deleted)") if len(columns) == 6 else ""
        if re.fullmatch(r"libcudnn(_\w+)?\.so(\.\d+)*", os.path.basename(path)):
            paths.add(path)
    return tuple(sorted(paths))


def gather(ordinal: int) -> GpuFacts:
    """The facts about this process and one device. Loads torch and cuDNN only if a CUDA device is there."""
    release = driver_release()
    try:
        count = _count(_driver())
    except GpuUnavailableError as problem:
        return GpuFacts(ordinal, 0, None, str(problem) if release else None, release)
    if count == 0:
        return GpuFacts(ordinal, 0, None, None, release)
    try:
        device = read_device(ordinal)
    except GpuUnavailableError as problem:
        return GpuFacts(ordinal, count, None, str(problem), release)

    torch: Any = importlib.import_module("torch")
    torch_cudnn, torch_cudnn_problem = _torch_cudnn(torch)
    try:
        cudnn, cudnn_problem = cudnn_version(), None
    except CudnnLoadError as problem:
        cudnn, cudnn_problem = None, str(problem)
    return GpuFacts(
        ordinal,
        count,
        device,
        driver_release=release,
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        torch_cudnn=torch_cudnn,
        torch_cudnn_problem=torch_cudnn_problem,
        frontend=frontend_version(),
        cudnn=cudnn,
        cudnn_problem=cudnn_problem,
        cudnn_libraries=loaded_cudnn_libraries(),
    )


def judge(facts: GpuFacts) -> list[Finding]:
    """Findings for ``facts``, errors first. A machine without a CUDA device gets exactly one, level info."""
    if facts.cuda_problem is not None:
        return [Finding("error", facts.cuda_problem, _advice_without_device(facts))]
    if facts.device is None:
        return [Finding("info", "no CUDA device; the CPU engine serves")]
    findings = [
        *_judge_device(facts.device),
        *_judge_driver(facts, facts.device),
        *_judge_cudnn(facts),
        *_judge_libraries(facts.cudnn_libraries),
    ]
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.level))


def _advice_without_device(facts: GpuFacts) -> str:
    if facts.device_count:
        return "Use a device that is visible to this process, or change CUDA_VISIBLE_DEVICES"
    return (
        f"The kernel driver {facts.driver_release} is loaded, so a GPU is probably there: start the "
        "container with --gpus, install cuda-python, and compare with what nvidia-smi says"
    )


def _judge_device(device: DeviceFacts) -> Iterator[Finding]:
    if device.compute_capability < OLDEST_COMPUTE_CAPABILITY:
        yield Finding(
            "error",
            f"{device.name} has compute capability {_dotted(device.compute_capability)}, and fused cuDNN "
            f"graphs need {_dotted(OLDEST_COMPUTE_CAPABILITY)} or newer",
            "Use a newer GPU, or serve this model with parameter ENGINE set to reference",
        )


def _judge_driver(facts: GpuFacts, device: DeviceFacts) -> Iterator[Finding]:
    if facts.torch_cuda is None:
        yield Finding(
            "error",
            f"{device.name} is there, but torch {facts.torch} is a build without CUDA",
            "Install a CUDA build of torch, or hide the GPU with CUDA_VISIBLE_DEVICES= to serve on the CPU",
        )
        return
    driver = (device.driver_api // 1000, device.driver_api % 1000 // 10)
    runtime = tuple(int(part) for part in re.findall(r"\d+", facts.torch_cuda)[:2])
    release = f" (release {facts.driver_release})" if facts.driver_release else ""
    told = (
        f"the driver{release} speaks CUDA {_dotted(driver)} and torch was built for CUDA {facts.torch_cuda}"
    )
    if driver[:1] < runtime[:1]:
        yield Finding("error", told, "Update the NVIDIA driver, or install a torch build for an older CUDA")
    elif driver < runtime:
        yield Finding(
            "warning", told, "This works within one major version, but an updated NVIDIA driver is safer"
        )


def _judge_cudnn(facts: GpuFacts) -> Iterator[Finding]:
    if facts.cudnn_problem is not None or facts.cudnn is None:
        yield Finding("error", facts.cudnn_problem or "cuDNN is not loaded", "Then start the server again")
        return
    if facts.cudnn < OLDEST_CUDNN:
        yield Finding(
            "error",
            f"cuDNN {cudnn_text(facts.cudnn)} is loaded, and frontend {facts.frontend} needs "
            f"{cudnn_text(OLDEST_CUDNN)} or newer",
            "Install a torch build that brings a newer cuDNN, and remove older ones from LD_LIBRARY_PATH",
        )
    if facts.torch_cudnn_problem is not None:
        yield Finding(
            "error",
            f"torch cannot use its cuDNN: {facts.torch_cudnn_problem}",
            "Remove directories with another cuDNN from LD_LIBRARY_PATH, then start the server again",
        )
    elif facts.torch_cudnn is not None and facts.torch_cudnn != facts.cudnn:
        yield Finding(
            "error",
            f"torch uses cuDNN {cudnn_text(facts.torch_cudnn)} and the frontend uses cuDNN "
            f"{cudnn_text(facts.cudnn)}",
            f"Make both use one: remove other cuDNN directories from LD_LIBRARY_PATH, or install the version "
            f"that torch was built with (nvidia-cudnn-cu13 {cudnn_text(facts.torch_cudnn)})",
        )
    main = [path for path in facts.cudnn_libraries if _is_main_library(path)]
    yield Finding(
        "info",
        f"cuDNN {cudnn_text(facts.cudnn)} from {', '.join(main) or 'an unknown path'}, "
        f"frontend {facts.frontend}",
    )


def _judge_libraries(paths: tuple[str, ...]) -> Iterator[Finding]:
    main = [path for path in paths if _is_main_library(path)]
    do = "Remove all but one cuDNN from LD_LIBRARY_PATH and from the environment, then start the server again"
    if len(main) > 1:
        yield Finding("error", f"{len(main)} different libcudnn are loaded: {', '.join(main)}", do)
        return
    directories = sorted({os.path.dirname(path) for path in paths})
    if len(directories) > 1:
        yield Finding("error", f"parts of cuDNN come from different places: {', '.join(directories)}", do)


def cudnn_text(version: int) -> str:
    """``9.19.0`` for 91900, ``8.9.7`` for 8907."""
    if version < 10000:
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def _is_main_library(path: str) -> bool:
    return os.path.basename(path).startswith("libcudnn.so")


def _torch_cudnn(torch: Any) -> tuple[int | None, str | None]:
    """torch's cuDNN version, or why it has none that works."""
    try:
        return torch.backends.cudnn.version(), None
    except Exception as problem:
        return None, str(problem)


def _directory_of_loaded_cudnn() -> str | None:
    main = [path for path in loaded_cudnn_libraries() if _is_main_library(path)]
    return os.path.dirname(main[0]) if main else None


@contextmanager
def _searched_first(directory: str | None) -> Iterator[None]:
    """Puts ``directory`` first on LD_LIBRARY_PATH: the frontend reads that variable while it is imported."""
    before = os.environ.get("LD_LIBRARY_PATH")
    if directory is not None:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in (directory, before) if part)
    try:
        yield
    finally:
        if directory is not None and before is None:
            del os.environ["LD_LIBRARY_PATH"]
        elif directory is not None and before is not None:
            os.environ["LD_LIBRARY_PATH"] = before


def _driver() -> Any:
    """cuda-python's driver bindings. Raises GpuUnavailableError when they are missing."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as problem:
        raise GpuUnavailableError(f"cuda-python cannot be imported ({problem}); {_INSTALL}") from problem


def _count(driver: Any) -> int:
    """Number of visible devices. Raises GpuUnavailableError when the driver does not answer."""
    try:
        _ask(driver, "cuInit", 0)
        return int(_ask(driver, "cuDeviceGetCount"))
    except GpuUnavailableError as problem:
        if _NO_DEVICE in str(problem):
            return 0
        raise


def _ask(driver: Any, function: str, *arguments: Any) -> Any:
    """One call of the CUDA driver: its result (None if it has none). Raises GpuUnavailableError."""
    try:
        status, *results = getattr(driver, function)(*arguments)
    except Exception as problem:  # the bindings raise types of their own when libcuda is missing
        raise GpuUnavailableError(f"the CUDA driver library cannot be used: {problem}") from problem
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GpuUnavailableError(f"the CUDA driver answered {status.name} to {function}")
    return results[0] if results else None
