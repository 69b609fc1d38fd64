"""The time no implementation of a program can go below, by its bytes and its operations."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudnn_fusion.executor import site_sizes
from cudnn_fusion.interpreter import infer_shapes
from cudnn_fusion.lowered import Program, node_references
from cudnn_fusion.partition import partition
from cudnn_fusion.shapes import Bucket

BYTES_PER_S = 4.3e12
"""Device-to-device copy on an H200, bytes read and written, measured."""

FLOP_PER_S: Mapping[str, float] = {"fp16": 780e12, "bf16": 780e12, "tf32": 390e12, "fp32": 67e12}
"""fp16 and bf16: dense matrix product on an H200, measured; tf32: half of it; fp32: NVIDIA's data sheet."""

# These move no data: their result is their input seen otherwise.
VIEWS = ("view", "_unsafe_view", "permute", "unsqueeze", "squeeze", "transpose", "select", "expand", "slice")


def floor_us(program: Program, bucket: Bucket) -> float:
    """Sum over segments and operations of the larger of bytes / bandwidth and operations / rate.

    A segment reads its inputs and weights once and writes its output once; what a padding, a bias or an
    activation would move in between does not count.
    """
    shapes = infer_shapes(program, dict(bucket.sizes))
    found = partition(program)
    covered = {name for site in found.sites for name in site.covers}
    width = 4 if program.precision in ("fp32", "tf32") else 2
    seconds = 0.0
    for site in found.sites:
        sizes = site_sizes(site, shapes, program)
        elements = sum(math.prod(dims) for dims in sizes.values())
        products = math.prod(sizes["w"][1:])
        flop = 2 * math.prod(sizes["y"]) * products
        seconds += max(elements * width / BYTES_PER_S, flop / FLOP_PER_S[program.precision])
    for node in program.nodes:
        if node.name in covered or node.name not in shapes or node.op.split(".")[1] in VIEWS:
            continue
        read = {name for name in node_references(node) if name in shapes or name in program.weights}
        elements = math.prod(shapes[node.name]) + sum(
            math.prod(shapes[name]) if name in shapes else program.weights[name].numel() for name in read
        )
        seconds += elements * width / BYTES_PER_S
    return seconds * 1e6
