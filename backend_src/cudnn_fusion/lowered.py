"""The lowered form of a program: what the server reads.

A lowered program is two files in one directory, neither of which can hold code:

- ``program.json``: inputs, outputs, dynamic axes and a list of nodes, one ATen call each;
- ``weights.safetensors``: every weight, laid out as stored by safetensors (row-major).

Operations are named (``aten.conv2d.default``) and resolved through an allow-list when they are
run (see `cudnn_fusion.interpreter`); nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

FORMAT_VERSION = 1

Dim = int | str
"""A size: a number, or an expression over axis names such as ``batch`` or ``2*length + 1``."""


@dataclass(frozen=True)
class Ref:
    """The value that an input, a weight or an earlier node named ``name`` holds."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A torch constant in an argument list.

    ``kind`` is ``dtype``, ``layout``, ``memory_format`` or ``device``; ``value`` is its name as torch
    spells it without the ``torch.`` prefix (``float16``, ``strided``, ``channels_last``, ``cpu``). A
    device is replaced by the one the program runs on.
    """

    kind: str
    value: str


Argument = Ref | Constant | None | bool | int | float | str | tuple["Argument", ...]


@dataclass(frozen=True)
class Node:
    """One call. ``shape`` and ``dtype`` describe its result when that is one tensor, else None."""

    name: str
    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    shape: tuple[Dim, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor at the program's border.

    ``dtype`` is torch's name without prefix. ``value`` names the graph value that holds it (equal to
    ``name`` for inputs).
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    value: str


@dataclass(frozen=True)
class Axis:
    """A dynamic axis: its name and the inclusive range of sizes the program was exported for."""

    name: str
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Program:
    """A whole inference program: functional, in inference mode, at one precision mode.

    ``batch_axis`` names the axis that is dimension 0 of every input and output and along which rows do
    not influence each other (checked numerically at export), or is None. ``precision`` is one of
    ``fp32``, ``tf32``, ``fp16``, ``bf16``.
    """

    name: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: tuple[Axis, ...]
    batch_axis: str | None
    nodes: tuple[Node, ...]
    weights: Mapping[str, torch.Tensor] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    """What the passes did, a sentence each (``folded batch_norm_1 into conv2d_1``)."""
    sha256: str = ""
    """Content hash over program.json and weights.safetensors; empty until written or read."""
