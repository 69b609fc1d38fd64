"""From Triton's requests to rows of tensors, and back.

Knows Triton's request objects only by the few methods that it calls (``inputs``, ``requested_output_names``),
so that it can be read without Triton.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from cudnn_fusion.declarations import TRITON_NAMES
from cudnn_fusion.lowered import Program, TensorSpec, dtype_name
from cudnn_fusion.shapes import Bucket, Part


class BadRequestError(Exception):
    """A request does not fit the model; the message says what came, what was expected and what to do."""


@dataclass
class Incoming:
    """A valid request: its tensors in the program's input order, and its sizes along every axis.

    ``outputs`` collects one tensor for each output of the program once it has run.
    """

    index: int
    tensors: Sequence[torch.Tensor]
    bucket: Bucket
    requested: Collection[str]
    on_gpu: bool
    outputs: list[torch.Tensor] = field(default_factory=list)

    def rows(self, batch_axis: str | None) -> int:
        """Rows along the batch axis; 1 for a program without one."""
        return 1 if batch_axis is None else self.bucket.size(batch_axis)


Fitting = MutableMapping[tuple[object, ...], Bucket]
"""Sizes along the axes, by type and dims of every input that was found to fit a program."""

REMEMBERED_FITTING = 1024


def parse(index: int, request: Any, program: Program, fitting: Fitting | None = None) -> Incoming:
    """Checks a request against the program. Raises BadRequestError.

    ``fitting`` remembers what fits: most requests have types and dims that were checked before.
    """
    by_name = {tensor.name(): tensor for tensor in request.inputs()}
    tensors: list[torch.Tensor] = []
    on_gpu = False
    for spec in program.inputs:
        tensor = by_name.get(spec.name)
        if tensor is None:
            raise BadRequestError(f"input {spec.name!r} is missing; expected {_expected(program)}")
        try:
            if tensor.is_cpu():
                # A capsule is several times as fast as the object; on the CPU there is nothing to wait for.
                tensors.append(from_dlpack(tensor.__dlpack__()))
            else:
                # The tensor's own stream is waited for only if torch gets the object, not a capsule of it.
                on_gpu = True
                tensors.append(from_dlpack(tensor))
        except (RuntimeError, TypeError, ValueError, BufferError) as error:
            raise BadRequestError(
                f"input {spec.name!r} cannot be read ({error}); expected a contiguous "
                f"{TRITON_NAMES[spec.dtype]} tensor of {spec.describe()}, with at least one element"
            ) from error
        if spec.dtype == "bool" and tensors[-1].dtype == torch.uint8:
            tensors[-1] = tensors[-1].bool()
    key = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    bucket = None if fitting is None else fitting.get(key)
    if bucket is None:
        bucket = _fitting_sizes(tensors, program)
        if fitting is not None:
            if len(fitting) >= REMEMBERED_FITTING:
                fitting.clear()
            fitting[key] = bucket
    return Incoming(index, tensors, bucket, request.requested_output_names(), on_gpu)


def _fitting_sizes(tensors: Sequence[torch.Tensor], program: Program) -> Bucket:
    """Sizes along the program's axes. Raises BadRequestError for a type or dims that do not fit."""
    sizes: dict[str, int] = {}
    for tensor, spec in zip(tensors, program.inputs, strict=True):
        found = dtype_name(tensor.dtype)
        if found != spec.dtype:
            raise BadRequestError(
                f"input {spec.name!r} has type {TRITON_NAMES.get(found, found)}; "
                f"expected {_expected(program)}"
            )
        _take_sizes(tensor, spec, program, sizes)
    _check_ranges(sizes, program)
    return Bucket.of(sizes)


def _take_sizes(tensor: torch.Tensor, spec: TensorSpec, program: Program, sizes: dict[str, int]) -> None:
    dims = tensor.shape
    fits = len(dims) == len(spec.shape)
    for got, want in zip(dims, spec.shape, strict=False):
        if isinstance(want, int):
            fits = fits and got == want
        elif sizes.setdefault(want, got) != got and fits:
            raise BadRequestError(
                f"axis {want} is {sizes[want]} in one input and {got} in {spec.name!r}; it must be the same "
                f"in all inputs: {_expected(program)}"
            )
    if not fits:
        raise BadRequestError(f"input {spec.name!r} has dims {list(dims)}; expected {_expected(program)}")


def _check_ranges(sizes: Mapping[str, int], program: Program) -> None:
    for axis in program.axes:
        size = sizes[axis.name]
        # More rows than the program was exported for are run in parts.
        too_large = size > axis.maximum and axis.name != program.batch_axis
        if size < axis.minimum or too_large:
            raise BadRequestError(
                f"axis {axis.name} is {size}; this model takes {axis.minimum} to {axis.maximum}"
            )


def _expected(program: Program) -> str:
    inputs = ", ".join(f"{s.name} {TRITON_NAMES[s.dtype]} {s.describe()}" for s in program.inputs)
    axes = ", ".join(f"{a.name} {a.minimum}..{a.maximum}" for a in program.axes)
    return f"{inputs}" + (f" with {axes}" if axes else "")


def group(requests: Sequence[Incoming], batch_axis: str | None) -> list[list[Incoming]]:
    """Requests that can run together: equal in every size but the batch's. Keeps their order.

    Without a batch axis each request is alone.
    """
    if batch_axis is None:
        return [[request] for request in requests]
    groups: dict[Bucket, list[Incoming]] = {}
    for request in requests:
        groups.setdefault(request.bucket.with_size(batch_axis, 0), []).append(request)
    return list(groups.values())


def copy_in(
    requests: Sequence[Incoming], part: Part, batch_axis: str | None, inputs: Sequence[torch.Tensor]
) -> None:
    """Copies the rows of a part, counted over all requests, into an executor's inputs and zeroes the rest.

    Without a batch axis the first request is the part. The executor's buffers are aligned; a request's
    tensors may be aligned to 2 bytes only.
    """
    if batch_axis is None:
        for target, source in zip(inputs, requests[0].tensors, strict=True):
            target.copy_(source)
        return
    for request, first, last, offset in _overlaps(requests, part, batch_axis):
        alone = last - first == part.bucket.size(batch_axis) == request.rows(batch_axis)
        for target, source in zip(inputs, request.tensors, strict=True):
            if alone:
                target.copy_(source)
            else:
                target[offset : offset + last - first].copy_(source[first:last])
    if part.rows < part.bucket.size(batch_axis):
        for target in inputs:
            target[part.rows :].zero_()


def cut_out(
    requests: Sequence[Incoming],
    part: Part,
    batch_axis: str | None,
    outputs: Sequence[torch.Tensor],
    shared: bool,
) -> None:
    """Gives every request its rows of a part's outputs, row-major, on the CPU unless it came on a GPU.

    ``shared`` says that the outputs are the executor's own buffers, from which the rows must be copied.
    """
    if batch_axis is None:
        requests[0].outputs = [_handed_out(output, requests[0], shared) for output in outputs]
        return
    for request, first, last, offset in _overlaps(requests, part, batch_axis):
        if last - first == part.bucket.size(batch_axis):
            rows = [_handed_out(output, request, shared) for output in outputs]
        else:
            rows = [
                _handed_out(output[offset : offset + last - first], request, shared) for output in outputs
            ]
        if not request.outputs:
            request.outputs = rows
        else:
            pairs = zip(request.outputs, rows, strict=True)
            request.outputs = [torch.cat((earlier, later)) for earlier, later in pairs]


def _handed_out(rows: torch.Tensor, request: Incoming, shared: bool) -> torch.Tensor:
    packed = rows.contiguous()
    if packed.is_cuda and not request.on_gpu:
        return packed.cpu()
    return packed.clone() if shared and packed.data_ptr() == rows.data_ptr() else packed


def _overlaps(
    requests: Sequence[Incoming], part: Part, batch_axis: str
) -> list[tuple[Incoming, int, int, int]]:
    """(request, its first row, row behind its last, place in the part) for requests with rows in a part."""
    found: list[tuple[Incoming, int, int, int]] = []
    start = 0
    for request in requests:
        rows = request.rows(batch_axis)
        first = max(part.start, start)
        last = min(part.start + part.rows, start + rows)
        if first < last:
            found.append((request, first - start, last - start, first - part.start))
        start += rows
    return found
