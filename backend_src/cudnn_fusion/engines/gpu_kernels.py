"""GPU kernels taken out of a captured CUDA graph, kept as bytes, and launched again elsewhere.

Torch's compiler (inductor) writes kernels in Triton that fuse what torch's own do one by one, but keeps them
behind tracing in each process, or behind a C++ library that must be built. Here its work is run once under
capture, and every kernel node is recorded: machine code, grid, block, shared memory, and its arguments, in
which pointers are told apart by the buffers they point into. Loading that needs neither inductor nor Triton.

Sources of facts: CUDA driver API, graph management (`cuGraphKernelNodeGetParams`) and `cuFuncGetParamInfo`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from cudnn_fusion.cuda_graphs import NotAChainError, checked, driver, in_order
from cudnn_fusion.records import canonical_json, record_from_json, record_to_json
from cudnn_fusion.segment import spanned

MAX_KERNELS = 64
"""More than this are not worth keeping: torch compiles a region into a few kernels."""

_ALIGNMENT_BYTES = 512
_FORMAT = 1
_POINTER_BYTES = 8
_MOST = (1 << 31) - 1
"""The largest number that the driver's launch takes, by CUDA's technical specifications: blocks along x."""
_LOWEST_ADDRESS = 1 << 32
"""Device addresses are above it; sizes that a kernel gets as numbers are below."""


class NotPortableError(Exception):
    """Captured work cannot be run from its recorded kernels; the message says why."""


@dataclass(frozen=True)
class Argument:
    """One kernel argument: ``constant`` bytes (hex), or an address ``offset`` bytes into buffer ``buffer``.

    Buffers are numbered: the region's inputs in their order, its output, then one for intermediate values.
    """

    constant: str | None
    buffer: int | None = None
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``code`` is the index of its machine code."""

    code: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Kernels:
    """Launches in order, the machine code they need, and the bytes of their intermediate buffer."""

    launches: tuple[Launch, ...]
    code: tuple[bytes, ...]
    scratch_bytes: int

    def to_bytes(self) -> bytes:
        """A line of JSON, then the machine code."""
        head = _Head(_FORMAT, self.launches, tuple(map(len, self.code)), self.scratch_bytes)
        return canonical_json(record_to_json(head)).encode() + b"\n" + b"".join(self.code)

    @classmethod
    def from_bytes(cls, blob: bytes) -> Kernels:
        """Raises ValueError for bytes that `to_bytes` has not written."""
        line, _, rest = blob.partition(b"\n")
        try:
            head = record_from_json(_Head, json.loads(line))
            if head.format != _FORMAT or sum(head.code_bytes) != len(rest):
                raise ValueError("another format or length")
            if min((head.scratch_bytes, *head.code_bytes)) < 0:
                raise ValueError("a negative size")
            for launch in head.launches:
                _check(launch, len(head.code_bytes))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a record of GPU kernels: {error}") from error
        ends = list(accumulate(head.code_bytes))
        code = tuple(rest[end - size : end] for end, size in zip(ends, head.code_bytes, strict=True))
        return cls(head.launches, code, head.scratch_bytes)


@dataclass(frozen=True)
class _Head:
    format: int
    launches: tuple[Launch, ...]
    code_bytes: tuple[int, ...]
    scratch_bytes: int


def _check(launch: Launch, codes: int) -> None:
    """Raises ValueError for a launch that `record` does not make."""
    if not 0 <= launch.code < codes:
        raise ValueError(f"{launch.name} is code {launch.code} of {codes}")
    if min((*launch.grid, *launch.block)) < 1 or launch.shared_bytes < 0:
        raise ValueError(f"{launch.name} has a negative or empty grid, block or shared memory")
    if max((*launch.grid, *launch.block, launch.shared_bytes)) > _MOST:
        raise ValueError(f"{launch.name} has a grid, block or shared memory beyond what a launch can state")
    for argument in launch.arguments:
        if (argument.constant is None) == (argument.buffer is None):
            raise ValueError(f"{launch.name} has an argument that is not one of a constant and a buffer")
        if argument.buffer is not None and min(argument.buffer, argument.offset) < 0:
            raise ValueError(f"{launch.name} reads before the first buffer")
        bytes.fromhex(argument.constant or "")


def record(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device
) -> tuple[Kernels, torch.Tensor]:
    """Captures ``run``, which reads ``inputs`` and has run before, and records its kernels.

    Also gives the tensor that it returned, whose layout the recorded kernels write. Raises NotPortableError:
    work that is no kernel of Triton's, or an argument whose meaning is unknown.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with _Allocations(device) as allocations, torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        result = run()
    buffers = [_extent(tensor) for tensor in (*inputs, result)]
    scratch = _Scratch([a for a in allocations if not any(_within(a[0], b) for b in buffers)])
    compiled = _compiled_kernels()
    code: dict[bytes, int] = {}
    launches = []
    for node in _kernel_nodes(graph.raw_cuda_graph()):
        binary = compiled.get(int(node.func))
        if binary is None:
            raise NotPortableError("a kernel is from a library, whose machine code is not at hand")
        arguments = tuple(_argument(raw, buffers, scratch) for raw in _argument_bytes(node))
        launches.append(
            Launch(
                code.setdefault(binary, len(code)),
                _function_name(node.func),
                (node.gridDimX, node.gridDimY, node.gridDimZ),
                (node.blockDimX, node.blockDimY, node.blockDimZ),
                node.sharedMemBytes,
                arguments,
            )
        )
    if not launches:
        raise NotPortableError("nothing was launched")
    return Kernels(tuple(launches), tuple(code), scratch.size_bytes), result


class _Scratch:
    """Buffers of intermediate values, packed into one."""

    def __init__(self, allocations: Sequence[tuple[int, int]]) -> None:
        sizes: dict[int, int] = {}
        for address, size in allocations:
            sizes[address] = max(size, sizes.get(address, 0))
        merged: list[list[int]] = []
        for address in sorted(sizes):
            end = address + sizes[address]
            if merged and address < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([address, end])
        self._places: list[tuple[int, int, int]] = []
        self.size_bytes = 0
        for start, end in merged:
            self._places.append((start, end, self.size_bytes))
            self.size_bytes += -(-(end - start) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def offset(self, address: int) -> int | None:
        """Bytes into the packed buffer; None for an address outside."""
        return next((place + address - s for s, e, place in self._places if s <= address < e), None)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + spanned(tensor) * tensor.element_size()


def _within(address: int, extent: tuple[int, int]) -> bool:
    return extent[0] <= address < extent[1]


def _argument(raw: bytes, buffers: Sequence[tuple[int, int]], scratch: _Scratch) -> Argument:
    if len(raw) == _POINTER_BYTES:
        address = int.from_bytes(raw, "little")
        for number, extent in enumerate(buffers):
            if _within(address, extent):
                return Argument(None, number, address - extent[0])
        offset = scratch.offset(address)
        if offset is not None:
            return Argument(None, len(buffers), offset)
        if _LOWEST_ADDRESS <= address < 1 << 62:
            raise NotPortableError("a kernel reads a buffer that is neither an input nor its own")
    elif len(raw) > _POINTER_BYTES:
        raise NotPortableError("a kernel takes a structure as argument")
    return Argument(raw.hex())


class _Allocations:
    """(address, bytes) of what torch's allocator hands out inside of the with block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: list[tuple[int, int]] = []

    def __enter__(self) -> list[tuple[int, int]]:
        torch.cuda.memory._record_memory_history("all", context=None, device=self._device)
        return self._found

    def __exit__(self, *_: object) -> None:
        snapshot = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(None, device=self._device)
        for events in snapshot["device_traces"]:
            self._found += [(e["addr"], e["size"]) for e in events if e["action"] == "alloc"]


def _compiled_kernels() -> dict[int, bytes]:
    """Machine code of every kernel that Triton has loaded in this process, by its function's handle."""
    from triton.compiler import CompiledKernel

    found = {}
    for kernel in gc.get_objects():
        # Not isinstance, which asks weak proxies whose object may be gone.
        if type(kernel) is CompiledKernel and isinstance(getattr(kernel, "function", None), int):
            found[kernel.function] = bytes(kernel.asm["cubin"])
    return found


def _kernel_nodes(graph: int) -> list[Any]:
    """Parameters of the kernel nodes, in the order in which they run. Raises NotPortableError."""
    api = driver()
    _, count = checked(api.cuGraphGetNodes(graph))
    nodes, _ = checked(api.cuGraphGetNodes(graph, count))
    if count > MAX_KERNELS:
        raise NotPortableError(f"{count} kernels; at most {MAX_KERNELS} are kept")
    try:
        order = in_order(graph)
    except NotAChainError as error:
        raise NotPortableError(str(error)) from error
    by_handle = {int(node): node for node in nodes}
    found = []
    for handle in order:
        kind = checked(api.cuGraphNodeGetType(by_handle[handle]))[0]
        if kind != api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            raise NotPortableError(f"the captured work has a node that is no kernel: {kind.name}")
        found.append(checked(api.cuGraphKernelNodeGetParams(by_handle[handle]))[0])
    return found


def _argument_bytes(node: Any) -> list[bytes]:
    api = driver()
    found: list[bytes] = []
    while True:
        code, _, size = api.cuFuncGetParamInfo(node.func, len(found))
        if code != api.CUresult.CUDA_SUCCESS:
            return found
        address = ctypes.c_void_p.from_address(int(node.kernelParams) + _POINTER_BYTES * len(found)).value
        found.append(ctypes.string_at(address or 0, size))


def _function_name(function: Any) -> str:
    name = checked(driver().cuFuncGetName(function))[0]
    return bytes(name).decode()


class LoadedKernels:
    """Recorded kernels, ready to be launched on the device that is current."""

    def __init__(self, kernels: Kernels) -> None:
        self.scratch_bytes = kernels.scratch_bytes
        api = driver()
        modules = [_module(code) for code in kernels.code]
        self._launches: list[tuple[Any, ...]] = []
        for launch in kernels.launches:
            module = modules[launch.code]
            function = checked(api.cuModuleGetFunction(module, launch.name.encode()))[0]
            if launch.shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
                attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(api.cuFuncSetAttribute(function, attribute, launch.shared_bytes))
            self._launches.append((function, launch))

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches all of them; ``addresses`` are of the inputs, the output and the scratch buffer."""
        api = driver()
        for function, launch in self._launches:
            values = [_value(argument, addresses) for argument in launch.arguments]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            checked(
                api.cuLaunchKernel(
                    function,
                    *launch.grid,
                    *launch.block,
                    launch.shared_bytes,
                    stream,
                    ctypes.addressof(pointers),
                    0,
                )
            )


_SHARED_BYTES_WITHOUT_ASKING = 48 << 10


def _value(argument: Argument, addresses: Sequence[int]) -> Any:
    if argument.buffer is not None:
        return ctypes.c_uint64(addresses[argument.buffer] + argument.offset)
    raw = bytes.fromhex(argument.constant or "")
    return (ctypes.c_char * len(raw)).from_buffer_copy(raw)


_modules: dict[tuple[int, bytes], Any] = {}
_modules_lock = threading.Lock()


def _module(code: bytes) -> Any:
    """The machine code as a module of the current context; equal code is loaded once."""
    api = driver()
    context = int(checked(api.cuCtxGetCurrent())[0])
    with _modules_lock:
        if (context, code) not in _modules:
            _modules[context, code] = checked(api.cuModuleLoadData(code))[0]
        return _modules[context, code]
