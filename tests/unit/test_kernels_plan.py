"""Plans of recorded kernels: what they are given, and what they refuse."""

import pytest
import torch
from programs import CPU, conv_segment, sizes_of

from cudnn_fusion.engines.base import ALIGNMENT_BYTES, CandidateRejectedError, aligned
from cudnn_fusion.engines.gpu_kernels import Argument, Kernels, Launch
from cudnn_fusion.engines.kernels_plan import KernelsPlan, load_kernels
from cudnn_fusion.segment import CHANNELS_LAST, PADDED, empty, is_packed, packed_strides, to_layout


class Addresses:
    """In the place of `LoadedKernels`: keeps the addresses that it gets."""

    def run(self, addresses, stream):
        self.seen = addresses


def shifted(dims, layout, dtype=torch.float16):
    """A packed tensor that starts one element behind a multiple of the alignment."""
    strides = packed_strides(dims, layout)
    room = 1 + dims[0] * strides[0]
    tensor = torch.arange(room, dtype=dtype)[1:].as_strided(dims, strides)
    assert tensor.data_ptr() % ALIGNMENT_BYTES
    return tensor


@pytest.mark.parametrize(
    ("dims", "layout"), [((2, 6, 5), CHANNELS_LAST), ((2, 3, 4, 5), PADDED), ((7,), "row_major")]
)
def test_a_copy_lies_as_the_tensor_does(dims, layout):
    tensor = shifted(dims, layout)
    copy = aligned(tensor)
    assert copy.data_ptr() % ALIGNMENT_BYTES == 0
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    # What a padded layout adds is zero, also behind the last element.
    whole = copy.untyped_storage().nbytes() // copy.element_size()
    assert whole >= dims[0] * tensor.stride(0)
    assert copy.as_strided((whole,), (1,)).double().sum() == tensor.double().sum()


def test_what_is_aligned_is_not_copied():
    tensor = empty((2, 6, 5), CHANNELS_LAST, torch.float16, CPU)
    assert aligned(tensor) is tensor


def test_kernels_get_aligned_inputs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 0, raising=False)
    base = torch.randn(1, 1281).half()
    x = to_layout(base[:, 1:].unflatten(1, (20, 64)).transpose(1, 2), CHANNELS_LAST)
    assert is_packed(x, CHANNELS_LAST)
    assert x.data_ptr() % ALIGNMENT_BYTES
    kernels = Addresses()
    plan = KernelsPlan(kernels, ("x",), (1, 64, 20), CHANNELS_LAST, torch.float16, 0)
    plan.run({"x": x}, None)
    assert kernels.seen[0] % ALIGNMENT_BYTES == 0


def test_a_record_that_reads_beyond_the_buffers_is_refused():
    segment = conv_segment()
    sizes = sizes_of(segment, (1, 4, 5, 5), (4, 4, 3, 3))
    launch = Launch(0, "k", (1, 1, 1), (1, 1, 1), 0, (Argument(None, 4),))  # x, w, y and scratch are 0 to 3
    with pytest.raises(CandidateRejectedError, match="beyond the 4"):
        load_kernels(segment, sizes, Kernels((launch,), (b"",), 0).to_bytes())


@pytest.mark.parametrize(
    "sizes",
    [
        {"grid": (2**31, 1, 1)},
        {"grid": (1, 2**40, 1)},
        {"block": (1, 1, 2**32)},
        {"shared_bytes": 2**40},
    ],
)
def test_a_launch_that_the_driver_cannot_be_asked_for_is_refused(sizes):
    given = {"grid": (2**31 - 1, 1, 1), "block": (1, 1, 1), "shared_bytes": 0}
    assert Kernels.from_bytes(Kernels((Launch(0, "k", arguments=(), **given),), (b"",), 0).to_bytes())
    launch = Launch(0, "k", arguments=(), **{**given, **sizes})
    with pytest.raises(ValueError, match="beyond what a launch can state"):
        Kernels.from_bytes(Kernels((launch,), (b"",), 0).to_bytes())
