"""Recorded kernels: their bytes, what arguments are told to mean, and how they are launched.

The CUDA driver is a stand-in that notes what it is asked.
"""

import ctypes
import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from cudnn_fusion import cuda_graphs
from cudnn_fusion.engines import gpu_kernels
from cudnn_fusion.engines.gpu_kernels import (
    MAX_KERNELS,
    Argument,
    Kernels,
    Launch,
    LoadedKernels,
    NotPortableError,
    _argument,
    _argument_bytes,
    _extent,
    _kernel_nodes,
    _Scratch,
)

KERNELS = Kernels(
    (
        Launch(0, "first", (1, 2, 3), (4, 5, 6), 0, (Argument(None, 0, 16), Argument("0a000000"))),
        Launch(1, "second", (7, 1, 1), (128, 1, 1), 70000, (Argument(None, 2), Argument(""))),
        Launch(0, "first", (1, 1, 1), (32, 1, 1), 12, ()),
    ),
    (b"\x7fELF\n\nfirst", b"second\x00\n"),
    1024,
)


def changed(*path, to):
    """The bytes with one item of the head replaced."""
    line, _, rest = KERNELS.to_bytes().partition(b"\n")
    head = json.loads(line)
    item = head
    for key in path[:-1]:
        item = item[key]
    item[path[-1]] = to
    return json.dumps(head).encode() + b"\n" + rest


def without(*path):
    line, _, rest = KERNELS.to_bytes().partition(b"\n")
    head = json.loads(line)
    item = head
    for key in path[:-1]:
        item = item[key]
    del item[path[-1]]
    return json.dumps(head).encode() + b"\n" + rest


FIRST = ("launches", 0)
ARGUMENT = (*FIRST, "arguments", 1)


@pytest.mark.parametrize("kernels", [KERNELS, Kernels((), (), 0), replace(KERNELS, code=(b"", b"x\n"))])
def test_bytes_say_all(kernels):
    assert Kernels.from_bytes(kernels.to_bytes()) == kernels


def test_bytes_are_one_line_and_the_machine_code():
    line, _, rest = KERNELS.to_bytes().partition(b"\n")
    assert json.loads(line)["code_bytes"] == [11, 8]
    assert rest == b"".join(KERNELS.code)


def test_an_unchanged_head_is_read():
    """So that what the next test says is for the change."""
    assert Kernels.from_bytes(changed("format", to=1)) == KERNELS


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\n",
        b"{}",
        b"[]\n",
        b"1\n",
        b"null\n",
        b'"format"\n',
        b"not JSON\n",
        b"\xff\xfe\x00\xd8" + KERNELS.to_bytes(),
        b"\n" + KERNELS.to_bytes(),
        KERNELS.to_bytes() + b"\x00",
        KERNELS.to_bytes().replace(b"\n", b"", 1),
        changed("format", to=2),
        changed("format", to="1"),
        changed("code_bytes", to=[11, 7]),
        changed("code_bytes", to=[11]),
        changed("code_bytes", to=[11.0, 8.0]),
        changed("code_bytes", to=["11", "8"]),
        changed("code_bytes", to=19),
        changed("scratch_bytes", to=None),
        changed("scratch_bytes", to="many"),
        changed("launches", to=None),
        changed("launches", to=3),
        changed("launches", to={"code": 0}),
        changed(*FIRST, to=[]),
        changed(*FIRST, "code", to=None),
        changed(*FIRST, "grid", to=[1, 2]),
        changed(*FIRST, "grid", to=[1, 2, 3, 4]),
        changed(*FIRST, "grid", to=7),
        changed(*FIRST, "block", to=[1, None, 1]),
        changed(*FIRST, "shared_bytes", to=[]),
        changed(*FIRST, "arguments", to=None),
        changed(*ARGUMENT, to="0a"),
        changed(*ARGUMENT, "offset", to=None),
        *(without(key) for key in ("format", "launches", "code_bytes", "scratch_bytes")),
        *(without(*FIRST, key) for key in ("code", "name", "grid", "block", "shared_bytes", "arguments")),
        *(without(*ARGUMENT, key) for key in ("constant", "buffer", "offset")),
    ],
)
def test_damaged_bytes_are_refused(blob):
    with pytest.raises(ValueError, match="not a record of GPU kernels"):
        Kernels.from_bytes(blob)


def test_bytes_cut_anywhere_are_refused():
    blob = KERNELS.to_bytes()
    for length in range(len(blob)):
        with pytest.raises(ValueError, match="not a record of GPU kernels"):
            Kernels.from_bytes(blob[:length])


@pytest.mark.parametrize(
    "blob",
    [
        changed(*FIRST, "code", to=2),
        changed(*FIRST, "code", to=-1),
        changed("code_bytes", to=[-1, 20]),
        changed(*ARGUMENT, "constant", to=5),
        changed(*ARGUMENT, "constant", to="0x0a"),
        changed(*ARGUMENT, "constant", to=None),
        changed(*ARGUMENT, "buffer", to=0),
        changed(*FIRST, "arguments", 0, "buffer", to="0"),
        changed(*FIRST, "arguments", 0, "buffer", to=-1),
        changed(*FIRST, "arguments", 0, "offset", to=1.5),
        changed(*FIRST, "grid", to="123"),
        changed(*FIRST, "name", to=None),
        changed("launches", to={}),
        changed("scratch_bytes", to=-1024),
        changed("scratch_bytes", to=10.5),
        changed("scratch_bytes", to=float("inf")),
        b"[" * 100_000 + b"\n",
    ],
    ids=[
        "code beyond the last",
        "code before the first",
        "negative length",
        "constant of a number",
        "constant not hex",
        "neither constant nor buffer",
        "both constant and buffer",
        "buffer of a string",
        "negative buffer",
        "offset of half a byte",
        "grid of a string",
        "no name",
        "launches of an object",
        "negative scratch",
        "scratch of half a byte",
        "infinite scratch",
        "too deep",
    ],
)
def test_heads_that_no_record_has_are_refused(blob):
    with pytest.raises(ValueError, match="not a record of GPU kernels"):
        Kernels.from_bytes(blob)


def test_scratch_buffers_are_packed_in_the_order_of_addresses():
    scratch = _Scratch([(0x5000, 600), (0x1000, 1), (0x9000, 512)])
    assert [scratch.offset(address) for address in (0x1000, 0x5000, 0x9000)] == [0, 512, 1536]
    assert scratch.size_bytes == 2048


def test_an_address_inside_of_a_scratch_buffer_keeps_its_distance():
    scratch = _Scratch([(0x1000, 8), (0x5000, 600)])
    assert scratch.offset(0x1007) == 7
    assert scratch.offset(0x5000 + 599) == 512 + 599


@pytest.mark.parametrize("address", [0, 0xFFF, 0x1008, 0x11FF, 0x5000 + 600, 1 << 40])
def test_an_address_outside_of_all_scratch_buffers_has_no_place(address):
    assert _Scratch([(0x1000, 8), (0x5000, 600)]).offset(address) is None


def test_without_scratch_buffers_nothing_is_needed():
    assert _Scratch([]).size_bytes == 0
    assert _Scratch([]).offset(0) is None


@pytest.mark.parametrize("sizes", [(512, 4096), (4096, 512)])
def test_memory_handed_out_twice_is_there_once_with_the_larger_size(sizes):
    scratch = _Scratch([(0x1000, size) for size in sizes])
    assert scratch.size_bytes == 4096
    assert scratch.offset(0x1000 + 4095) == 4095


@pytest.mark.parametrize(
    ("allocations", "end"),
    [
        ([(0x1000, 0x800), (0x1400, 0x800)], 0x1C00),
        ([(0x1400, 0x800), (0x1000, 0x800)], 0x1C00),
        ([(0x1000, 0x800), (0x1200, 0x200)], 0x1800),
        ([(0x1000, 0x400), (0x1200, 0x400), (0x1400, 0x400)], 0x1800),
        ([(0x1000, 0x800), (0x1200, 0x100), (0x1400, 0x800)], 0x1C00),
    ],
)
def test_overlapping_memory_keeps_its_distances(allocations, end):
    scratch = _Scratch(allocations)
    assert scratch.size_bytes == end - 0x1000
    for address in (0x1000, 0x1400, end - 1):
        assert scratch.offset(address) == address - 0x1000
    assert scratch.offset(end) is None


def test_adjacent_memory_is_two_buffers_none_of_which_reaches_into_the_other():
    scratch = _Scratch([(0x1000, 100), (0x1064, 100)])
    assert scratch.offset(0x1063) == 99
    assert scratch.offset(0x1064) == 512
    assert scratch.size_bytes == 1024


BUFFERS = [(0x7000_0000_0000, 0x7000_0000_1000), (0x7000_0000_2000, 0x7000_0000_2400)]
SCRATCH = _Scratch([(0x7000_0001_0000, 512), (0x7000_0002_0000, 512)])


def pointer(address):
    return address.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("address", "buffer", "offset"),
    [
        (0x7000_0000_0000, 0, 0),
        (0x7000_0000_0FFF, 0, 0xFFF),
        (0x7000_0000_2010, 1, 0x10),
        (0x7000_0001_0000, 2, 0),
        (0x7000_0002_0004, 2, 516),
    ],
)
def test_addresses_are_told_apart_by_the_buffers_they_point_into(address, buffer, offset):
    """Inputs and the output by their numbers; the number behind them is of the scratch buffer."""
    assert _argument(pointer(address), BUFFERS, SCRATCH) == Argument(None, buffer, offset)


def test_of_two_inputs_in_one_place_the_first_is_meant():
    assert _argument(pointer(BUFFERS[0][0]), [BUFFERS[0], *BUFFERS], SCRATCH) == Argument(None, 0, 0)


@pytest.mark.parametrize(
    "address",
    [0x7000_0000_1000, 0x7000_0000_1FFF, 0x6FFF_FFFF_FFFF, 0x7000_0001_0200, 1 << 32, (1 << 62) - 1],
)
def test_other_peoples_addresses_are_not_portable(address):
    with pytest.raises(NotPortableError, match="neither an input nor its own"):
        _argument(pointer(address), BUFFERS, SCRATCH)


@pytest.mark.parametrize("size", [9, 16, 24])
def test_structures_are_not_portable(size):
    with pytest.raises(NotPortableError, match="structure"):
        _argument(bytes(size), BUFFERS, SCRATCH)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x01",
        b"\x00\x00\xc8\x42",
        (1 << 31).to_bytes(4, "little"),
        pointer(0),
        pointer(4096),
        pointer((1 << 32) - 1),
        (-1).to_bytes(8, "little", signed=True),
        b"",
    ],
)
def test_numbers_stay_as_they_are(raw):
    argument = _argument(raw, BUFFERS, SCRATCH)
    assert argument == Argument(raw.hex())
    assert bytes(gpu_kernels._value(argument, [])) == raw


@pytest.mark.parametrize(
    ("tensor", "start", "size"),
    [
        (torch.zeros(2, 3, 4), 0, 96),
        (torch.zeros(2, 3, 4, dtype=torch.float16), 0, 48),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), 0, 384),
        (torch.zeros(4, 6).t(), 0, 96),
        (torch.zeros(4, 6)[:, 1:3], 4, (3 * 6 + 2) * 4),
        (torch.zeros(4, 6)[1::2], 24, (2 * 6 + 6) * 4),
        (torch.zeros(1, 6).expand(5, 6), 0, 24),
        (torch.zeros(()), 0, 4),
    ],
    ids=["packed", "half", "channels last", "transposed", "columns", "rows", "expanded", "scalar"],
)
def test_an_extent_is_from_the_first_element_to_the_last(tensor, start, size):
    base = tensor.untyped_storage().data_ptr()
    assert _extent(tensor) == (base + start, base + start + size)


@pytest.mark.parametrize(
    "dims",
    [(0,), (0, 3), (3, 0), (2, 0, 5)],
)
def test_nothing_is_within_an_empty_tensor(dims):
    """It is at address 0: a number that a kernel takes would be told to be an address in it."""
    tensor = torch.zeros(dims)
    assert tensor.data_ptr() == 0
    start, end = _extent(tensor)
    assert end <= start


class Driver:
    """What is used of the CUDA driver. ``refused`` maps names of functions to an error's name."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=SimpleNamespace(name="KERNEL"))
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, nodes=(), edges=(), kinds=None, sizes=(), refused=None):
        self.nodes, self.edges, self.kinds, self.sizes = list(nodes), list(edges), kinds or {}, sizes
        self.refused = refused or {}
        self.context = 1
        self.loaded = []
        self.attributes = []
        self.launched = []

    def _answer(self, function, *values):
        if function in self.refused:
            return SimpleNamespace(name=self.refused[function]), *(None for _ in values)
        return self.CUresult.CUDA_SUCCESS, *values

    def cuGraphGetNodes(self, graph, count=0):
        return self._answer("nodes", self.nodes[:count], len(self.nodes))

    def cuGraphGetEdges(self, graph, count=0):
        origins, targets = [edge[0] for edge in self.edges], [edge[1] for edge in self.edges]
        return self._answer("edges", origins[:count], targets[:count], [None] * count, len(self.edges))

    def cuGraphNodeGetType(self, node):
        kind = self.kinds.get(node)
        found = SimpleNamespace(name=kind) if kind else self.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        return self._answer("type", found)

    def cuGraphKernelNodeGetParams(self, node):
        return self._answer("params", f"kernel {node}")

    def cuFuncGetParamInfo(self, function, index):
        if index >= len(self.sizes):
            return SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"), None, None
        return self._answer("info", sum(self.sizes[:index]), self.sizes[index])

    def cuCtxGetCurrent(self):
        return self._answer("context", self.context)

    def cuModuleLoadData(self, code):
        self.loaded.append((self.context, code))
        return self._answer("load", f"module {code!r}")

    def cuModuleGetFunction(self, module, name):
        return self._answer("function", (module, name))

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))
        return self._answer("attribute")

    def cuLaunchKernel(self, function, *geometry_and_more):
        *geometry, shared_bytes, stream, pointers, _ = geometry_and_more
        sizes = self.sizes[len(self.launched)] if self.sizes else []
        array = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        arguments = [ctypes.string_at(array[i], size) for i, size in enumerate(sizes)]
        self.launched.append((function, tuple(geometry), shared_bytes, stream, arguments))
        return self._answer("launch")


@pytest.fixture
def driver(monkeypatch):
    """Gives a way to put a stand-in in the driver's place."""

    def put(**arguments):
        stand_in = Driver(**arguments)
        for module in (cuda_graphs, gpu_kernels):
            monkeypatch.setattr(module, "driver", lambda: stand_in)
        monkeypatch.setattr(gpu_kernels, "_modules", {})
        return stand_in

    return put


def test_kernels_are_given_in_their_order(driver):
    driver(nodes=[7, 8, 9], edges=[(9, 7), (7, 8)])
    assert _kernel_nodes(0) == ["kernel 9", "kernel 7", "kernel 8"]


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        ([1, 2], []),
        ([1, 2, 3], [(1, 2), (1, 3)]),
        ([1, 2, 3], [(1, 3), (2, 3)]),
        ([1, 2, 3, 4], [(1, 2), (3, 4)]),
        ([1, 2, 3, 4], [(1, 2), (1, 3), (2, 4), (3, 4)]),
    ],
    ids=["apart", "branch", "join", "two chains", "diamond"],
)
def test_what_is_no_chain_is_not_portable(driver, nodes, edges):
    driver(nodes=nodes, edges=edges)
    with pytest.raises(NotPortableError, match="one after the other"):
        _kernel_nodes(0)


def test_what_is_no_kernel_is_not_portable(driver):
    driver(nodes=[7, 8], edges=[(7, 8)], kinds={8: "MEMCPY"})
    with pytest.raises(NotPortableError, match="no kernel: MEMCPY"):
        _kernel_nodes(0)


@pytest.mark.parametrize("more", [0, 1])
def test_only_few_kernels_are_kept(driver, more):
    nodes = list(range(MAX_KERNELS + more))
    driver(nodes=nodes, edges=list(pairwise(nodes)))
    if more:
        with pytest.raises(NotPortableError, match=f"{MAX_KERNELS + 1} kernels; at most {MAX_KERNELS}"):
            _kernel_nodes(0)
    else:
        assert len(_kernel_nodes(0)) == MAX_KERNELS


def test_errors_of_the_driver_are_named(driver):
    driver(refused={"nodes": "CUDA_ERROR_INVALID_HANDLE"})
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_HANDLE"):
        _kernel_nodes(0)


def test_arguments_are_read_where_a_nodes_parameters_point(driver):
    values = [ctypes.c_uint64(0x7000_0000_0010), ctypes.c_int32(-2), ctypes.c_uint8(3)]
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    driver(sizes=[8, 4, 1])
    node = SimpleNamespace(func="f", kernelParams=ctypes.addressof(pointers))
    assert _argument_bytes(node) == [bytes(value) for value in values]


def test_kernels_are_launched_with_this_runs_addresses(driver):
    stand_in = driver(sizes=[[8, 4], [8], []])
    loaded = LoadedKernels(KERNELS)
    assert loaded.scratch_bytes == 1024
    assert stand_in.launched == []
    loaded.run([0x7100_0000_0000, 0x7200_0000_0000, 0x7300_0000_0000], stream=77)
    first = (f"module {KERNELS.code[0]!r}", b"first")
    second = (f"module {KERNELS.code[1]!r}", b"second")
    assert stand_in.launched == [
        (first, (1, 2, 3, 4, 5, 6), 0, 77, [pointer(0x7100_0000_0010), bytes.fromhex("0a000000")]),
        (second, (7, 1, 1, 128, 1, 1), 70000, 77, [pointer(0x7300_0000_0000)]),
        (first, (1, 1, 1, 32, 1, 1), 12, 77, []),
    ]


@pytest.mark.parametrize(("shared_bytes", "asked"), [(48 << 10, False), ((48 << 10) + 1, True)])
def test_much_shared_memory_is_asked_for(driver, shared_bytes, asked):
    stand_in = driver()
    LoadedKernels(Kernels((replace(KERNELS.launches[0], shared_bytes=shared_bytes),), (b"code",), 0))
    wanted = [(("module b'code'", b"first"), "shared", shared_bytes)]
    assert stand_in.attributes == (wanted if asked else [])


def test_equal_code_is_loaded_once_in_each_context(driver):
    stand_in = driver()
    for _ in range(2):
        LoadedKernels(KERNELS)
    assert stand_in.loaded == [(1, code) for code in KERNELS.code]
    stand_in.context = 2
    LoadedKernels(KERNELS)
    assert stand_in.loaded[2:] == [(2, code) for code in KERNELS.code]


@pytest.mark.parametrize("function", ["context", "load", "function", "attribute"])
def test_code_that_cannot_be_loaded_is_a_runtime_error(driver, function):
    driver(refused={function: "CUDA_ERROR_NO_BINARY_FOR_GPU"})
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        LoadedKernels(KERNELS)


def test_a_launch_that_fails_is_a_runtime_error(driver):
    driver(refused={"launch": "CUDA_ERROR_INVALID_VALUE"})
    loaded = LoadedKernels(KERNELS)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        loaded.run([1, 2, 3], stream=0)
