"""A segment's operations in a cuDNN graph."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from cudnn_fusion.segment import CONVOLUTIONS, TRANSPOSED, Dims, Operation, image_operation, packed_strides

_METHODS = {"silu": "swish", "gelu_tanh": "gelu_approx_tanh"}
"""The graph's methods for activations that it calls otherwise."""


def append(graph: Any, operation: Operation, value: Any, tensors: Mapping[str, Any], out: Dims) -> Any:
    """Adds one operation to the graph and gives its virtual result, whose dims are ``out``.

    ValueError: the frontend cannot express it.
    """
    kind = operation.kind
    if kind in CONVOLUTIONS:
        return _append_convolution(graph, operation, value, tensors["w"], out)
    if kind in ("bias", "shift", "add"):
        return graph.add(value, tensors[str(operation.operand)])
    if kind == "scale":
        return graph.mul(value, tensors[str(operation.operand)])
    if kind == "relu6":
        return graph.relu(value, lower_clip=0.0, upper_clip=6.0)
    if kind == "leaky_relu":
        return graph.leaky_relu(value, negative_slope=float(operation.attribute("negative_slope")))
    if kind == "elu" and operation.attribute("alpha") != 1:
        raise ValueError(f"elu in cuDNN has alpha 1, this one {operation.attribute('alpha')}")
    if kind == "hardsigmoid":
        return _hardsigmoid(graph, value)
    if kind == "hardswish":
        return graph.mul(value, _hardsigmoid(graph, value))
    return getattr(graph, _METHODS.get(kind, kind))(value)


def _append_convolution(graph: Any, operation: Operation, x: Any, w: Any, out: Dims) -> Any:
    """A convolution along one axis as one of images of height 1, a transposed one as a data gradient."""
    conv = image_operation(operation)
    attributes = {
        "pre_padding": list(conv.attribute("padding_before")),
        "post_padding": list(conv.attribute("padding_after")),
        "stride": list(conv.attribute("stride")),
        "dilation": list(conv.attribute("dilation")),
    }
    if conv.kind not in TRANSPOSED:
        return graph.conv_fprop(x, w, **attributes)
    value = graph.conv_dgrad(x, w, **attributes)
    # With a stride, inputs of several sizes have a gradient like this: which one is meant must be said.
    value.set_dim(list(out))
    value.set_stride(list(packed_strides(out, "channels_last")))
    return value


def _hardsigmoid(graph: Any, value: Any) -> Any:
    """clip(value + 3, 0, 6) / 6."""
    clipped = graph.relu(graph.add(value, _number(graph, 3.0)), lower_clip=0.0, upper_clip=6.0)
    return graph.mul(clipped, _number(graph, 1 / 6))


def _number(graph: Any, value: float) -> Any:
    import cudnn

    # Compile-time constants need cuDNN 9.22. What float32 cannot hold would become a double, with which
    # kernels of depthwise convolutions do not compile.
    single = struct.unpack("f", struct.pack("f", value))[0]
    return graph.tensor_scalar(single, cudnn.scalar_type.RUNTIME_PARAM)
