"""The lowered form of a program: what the server reads.

A lowered program is two files in one directory, neither of which can hold code:

- ``program.json``: inputs, outputs, dynamic axes, a list of nodes, one ATen call each, and the checksum of
  both files (``sha256``);
- ``weights.safetensors``: every weight, laid out as stored by safetensors (row-major).

Operations are named (``aten.conv2d.default``) and resolved through an allow-list when they are
run (see `cudnn_fusion.interpreter`); nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from cudnn_fusion.dims import axis_names
from cudnn_fusion.sealed_files import require_regular

FORMAT_VERSION = 1
PROGRAM_FILE = "program.json"
WEIGHTS_FILE = "weights.safetensors"
_CHECKSUM = "sha256"
PRECISIONS = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precision modes, and the type of values in each."""


class ProgramError(ValueError):
    """A program that cannot be lowered, read or run; the message says what to do about it."""


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

    def describe(self) -> str:
        """Its dims: ``[batch, 1024]``."""
        return "[" + ", ".join(map(str, self.shape)) + "]"


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
    not influence each other (see `cudnn_fusion.batch_check`), or is None. ``precision`` is one of
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
    """Content hash over both files, which program.json holds; empty until written or read."""

    @property
    def batch(self) -> Axis | None:
        """The batch axis with its range, or None."""
        return next((axis for axis in self.axes if axis.name == self.batch_axis), None)


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the lowered form uses: torch's without prefix, as ``float16``."""
    return str(dtype).removeprefix("torch.")


def write(program: Program, directory: Path) -> Program:
    """Writes ``program`` into ``directory`` (made if missing) and gives it with its ``sha256``.

    Each file replaces an older one at once. ProgramError: the program is not valid (as `read` would say).
    """
    weights = {
        name: weight.detach().cpu().contiguous().clone() for name, weight in sorted(program.weights.items())
    }
    document = _encode_program(replace(program, weights=weights))
    _validate(replace(program, weights=weights))
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as temporary:
        weights_file, program_file = Path(temporary, WEIGHTS_FILE), Path(temporary, PROGRAM_FILE)
        save_file(weights, weights_file)
        # safetensors keeps the file to its writer; a server often runs as another user.
        umask = os.umask(0)
        os.umask(umask)
        weights_file.chmod(0o666 & ~umask)
        digest = _content_hash(document, weights_file.read_bytes())
        document[_CHECKSUM] = digest
        program_file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        for file in (weights_file, program_file):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            file.replace(directory / file.name)
    return replace(program, sha256=digest)


def read(directory: Path) -> Program:
    """The program in ``directory``, its weights on the CPU in row-major order.

    Nothing in the files is executed or unpickled. ProgramError: a file is missing, damaged, of another format
    version, or says something that no exported program says.
    """
    document = _read_document(directory / PROGRAM_FILE)
    recorded = document.pop(_CHECKSUM, None)
    path = directory / WEIGHTS_FILE
    try:
        require_regular(path)
        # Read, not mapped: what was verified stays, whatever happens to the file.
        data = path.read_bytes()
        weights = load(data)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ProgramError(f"{path} is not a readable safetensors file ({error}); export again") from None
    try:
        program = _decode_program(document, weights)
        _validate(program)
    except ProgramError as error:
        raise ProgramError(f"{directory / PROGRAM_FILE}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProgramError(
            f"{directory / PROGRAM_FILE} does not describe a program ({error!r}); export again"
        ) from None
    digest = _content_hash(document, data)
    if digest != recorded:
        raise ProgramError(
            f"{directory / PROGRAM_FILE} and {WEIGHTS_FILE} have the checksum {digest[:12]}, recorded is "
            f"{str(recorded)[:12]}: one of them was changed or damaged after the export; export again"
        )
    return replace(program, sha256=digest)


def _content_hash(document: Mapping[str, Any], weights: bytes) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(canonical.encode())
    digest.update(hashlib.sha256(weights).digest())
    return digest.hexdigest()


def _read_document(path: Path) -> dict[str, Any]:
    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a number in JSON")
        return value

    try:
        require_regular(path)
        text = path.read_bytes().decode("utf-8")
        document = json.loads(text, parse_float=finite, parse_constant=finite)
    except (OSError, ValueError, RecursionError) as error:
        raise ProgramError(f"{path} cannot be read as JSON ({error}); export again") from None
    if not isinstance(document, dict):
        raise ProgramError(f"{path} holds {type(document).__name__}, expected an object; export again")
    if document.get("format_version") != FORMAT_VERSION:
        raise ProgramError(
            f"{path} has format version {document.get('format_version')!r}, this version reads "
            f"{FORMAT_VERSION}; export again with it"
        )
    return document


def _encode_program(program: Program) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "name": program.name,
        "precision": program.precision,
        "inputs": [_encode_spec(spec) for spec in program.inputs],
        "outputs": [_encode_spec(spec) for spec in program.outputs],
        "axes": [{"name": a.name, "minimum": a.minimum, "maximum": a.maximum} for a in program.axes],
        "batch_axis": program.batch_axis,
        "nodes": [encode_node(node) for node in program.nodes],
        "weights": {name: _weight_record(weight) for name, weight in program.weights.items()},
        "notes": list(program.notes),
    }


def _weight_record(weight: torch.Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}


def _encode_spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "value": spec.value}


def encode_node(node: Node) -> dict[str, Any]:
    """A node as it is written."""
    return {
        "name": node.name,
        "op": node.op,
        "args": [_encode_argument(argument) for argument in node.args],
        "kwargs": {key: _encode_argument(argument) for key, argument in node.kwargs},
        "shape": None if node.shape is None else list(node.shape),
        "dtype": node.dtype,
    }


def _encode_argument(argument: Argument) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Constant):
        return {"constant": argument.kind, "value": argument.value}
    if isinstance(argument, tuple):
        return [_encode_argument(part) for part in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ProgramError(f"an argument of type {type(argument).__name__} cannot be written: {argument!r}")


def _decode_program(document: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Program:
    fields = _fields(
        document,
        "the program",
        "format_version name precision inputs outputs axes batch_axis nodes weights notes",
    )
    recorded = _typed(fields["weights"], dict, "weights")
    found = {name: _weight_record(weight) for name, weight in weights.items()}
    if recorded != found:
        different = sorted(name for name in recorded | found if recorded.get(name) != found.get(name))
        raise ProgramError(
            f"{WEIGHTS_FILE} does not belong to it: {', '.join(different[:5])} differ; export again"
        )
    batch_axis = fields["batch_axis"]
    return Program(
        name=_typed(fields["name"], str, "name"),
        precision=_typed(fields["precision"], str, "precision"),
        inputs=tuple(_decode_spec(spec, "input") for spec in _typed(fields["inputs"], list, "inputs")),
        outputs=tuple(_decode_spec(spec, "output") for spec in _typed(fields["outputs"], list, "outputs")),
        axes=tuple(_decode_axis(axis) for axis in _typed(fields["axes"], list, "axes")),
        batch_axis=None if batch_axis is None else _typed(batch_axis, str, "batch_axis"),
        nodes=tuple(_decode_node(node) for node in _typed(fields["nodes"], list, "nodes")),
        weights=weights,
        notes=tuple(_typed(note, str, "note") for note in _typed(fields["notes"], list, "notes")),
    )


def _fields(data: Any, what: str, names: str) -> dict[str, Any]:
    expected = set(names.split())
    fields: dict[str, Any] = _typed(data, dict, what)
    if fields.keys() != expected:
        problem = ", ".join(sorted(fields.keys() ^ expected))
        raise ProgramError(f"{what} has unknown or missing fields: {problem}")
    return fields


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProgramError(f"{what} is {type(value).__name__}, expected {kind.__name__}: {value!r:.80}")
    return value


def _decode_axis(data: Any) -> Axis:
    axis = _fields(data, "an axis", "name minimum maximum")
    return Axis(
        _typed(axis["name"], str, "an axis' name"),
        _typed(axis["minimum"], int, "an axis' minimum"),
        _typed(axis["maximum"], int, "an axis' maximum"),
    )


def _decode_spec(data: Any, what: str) -> TensorSpec:
    spec = _fields(data, f"an {what}", "name dtype shape value")
    return TensorSpec(
        _typed(spec["name"], str, f"an {what}'s name"),
        _typed(spec["dtype"], str, f"an {what}'s dtype"),
        _decode_shape(spec["shape"]),
        _typed(spec["value"], str, f"an {what}'s value"),
    )


def _decode_shape(data: Any) -> tuple[Dim, ...]:
    return tuple(
        dim if isinstance(dim, str) else _typed(dim, int, "a size") for dim in _typed(data, list, "a shape")
    )


def _decode_node(data: Any) -> Node:
    node = _fields(data, "a node", "name op args kwargs shape dtype")
    kwargs = _typed(node["kwargs"], dict, "kwargs")
    return Node(
        name=_typed(node["name"], str, "a node's name"),
        op=_typed(node["op"], str, "a node's op"),
        args=tuple(_decode_argument(argument) for argument in _typed(node["args"], list, "args")),
        kwargs=tuple((str(key), _decode_argument(argument)) for key, argument in kwargs.items()),
        shape=None if node["shape"] is None else _decode_shape(node["shape"]),
        dtype=None if node["dtype"] is None else _typed(node["dtype"], str, "a node's dtype"),
    )


def _decode_argument(data: Any) -> Argument:
    if isinstance(data, list):
        return tuple(_decode_argument(part) for part in data)
    if not isinstance(data, dict):
        return data  # type: ignore[no-any-return]  # what JSON has left: None, bool, int, float, str
    if data.keys() == {"ref"}:
        return Ref(_typed(data["ref"], str, "a reference"))
    if data.keys() == {"constant", "value"}:
        return Constant(
            _typed(data["constant"], str, "a constant's kind"), _typed(data["value"], str, "a constant")
        )
    if data.keys() == {"float"} and data["float"] in ("inf", "-inf", "nan"):
        return float(data["float"])
    raise ProgramError(f"an argument is {data!r:.80}, expected a value, a reference or a constant")


def references(argument: Argument) -> tuple[str, ...]:
    """The names of the values that ``argument`` reads, in order."""
    if isinstance(argument, Ref):
        return (argument.name,)
    if isinstance(argument, tuple):
        return tuple(name for part in argument for name in references(part))
    return ()


def node_references(node: Node) -> tuple[str, ...]:
    """The names of the values that ``node`` reads, in order."""
    return references(node.args) + references(tuple(value for _, value in node.kwargs))


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node reading other values: those that ``names`` has a new name for."""
    if not any(name in names for name in node_references(node)):
        return node
    return _changed(
        node, lambda part: Ref(names.get(part.name, part.name)) if isinstance(part, Ref) else part
    )


def free_name(wanted: str, taken: set[str]) -> str:
    """``wanted``, with a number behind it where something is called so; it is taken then."""
    name, number = wanted, 1
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name)
    return name


def all_names(program: Program) -> set[str]:
    """Names of its inputs, nodes and weights."""
    return {spec.name for spec in program.inputs} | {node.name for node in program.nodes} | {*program.weights}


def rebuilt(
    program: Program, nodes: Sequence[Node], same: Mapping[str, str], notes: Sequence[str]
) -> Program:
    """The program of other nodes; outputs that ``same`` has a new name for are read from there."""
    outputs = tuple(replace(spec, value=same.get(spec.value, spec.value)) for spec in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs, notes=(*program.notes, *notes))


def in_type(program: Program, dtype: str) -> Program:
    """The program computing in another floating type: every one that its nodes, inputs and outputs name is
    ``dtype``. Its weights are left as they are: `cast` them.
    """

    def change(part: Argument) -> Argument:
        named = isinstance(part, Constant) and part.kind == "dtype" and part.value in _FLOATING
        return Constant("dtype", dtype) if named else part

    def spec_in_type(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=dtype) if spec.dtype in _FLOATING else spec

    return replace(
        program,
        nodes=tuple(_changed(node, change) for node in program.nodes),
        inputs=tuple(spec_in_type(spec) for spec in program.inputs),
        outputs=tuple(spec_in_type(spec) for spec in program.outputs),
    )


def cast(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights with the floating ones in ``dtype``."""
    return {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}


_FLOATING = frozenset(PRECISIONS.values())


def _changed(node: Node, change: Callable[[Argument], Argument]) -> Node:
    """The node with ``change`` done to every argument that is no tuple."""

    def deep(argument: Argument) -> Argument:
        return tuple(map(deep, argument)) if isinstance(argument, tuple) else change(argument)

    kwargs = tuple((key, deep(value)) for key, value in node.kwargs)
    return replace(node, args=tuple(map(deep, node.args)), kwargs=kwargs)


def _validate(program: Program) -> None:
    if program.precision not in PRECISIONS:
        raise ProgramError(f"precision is {program.precision!r}, expected one of {', '.join(PRECISIONS)}")
    axes = _checked_axes(program)
    if not program.outputs:
        raise ProgramError("it has no outputs")
    if len({spec.name for spec in program.outputs}) != len(program.outputs):
        raise ProgramError("two of its outputs have the same name")
    known = _names(program)
    for node in program.nodes:
        _check_shape(node.name, node.shape or (), node.dtype, axes)
        for name in node_references(node):
            if name not in known:
                raise ProgramError(f"node {node.name!r} reads {name!r}, which nothing before it computes")
        if node.name in known:
            raise ProgramError(f"the name {node.name!r} is used twice")
        known.add(node.name)
    for spec in (*program.inputs, *program.outputs):
        _check_shape(spec.name, spec.shape, spec.dtype, axes)
        if spec.value not in known:
            raise ProgramError(f"{spec.name!r} is the value of {spec.value!r}, which nothing computes")


def _checked_axes(program: Program) -> set[str]:
    for axis in program.axes:
        if not 1 <= axis.minimum <= axis.maximum:
            raise ProgramError(f"axis {axis.name!r} has the range {axis.minimum}..{axis.maximum}")
    axes = {axis.name for axis in program.axes}
    if len(axes) != len(program.axes):
        raise ProgramError("two of its axes have the same name")
    if program.batch_axis is not None and program.batch_axis not in axes:
        raise ProgramError(f"the batch axis {program.batch_axis!r} is not one of its axes")
    for spec in (*program.inputs, *program.outputs):
        if program.batch_axis is not None and spec.shape[:1] != (program.batch_axis,):
            raise ProgramError(f"the batch axis {program.batch_axis!r} is not the first of {spec.name!r}")
    return axes


def _names(program: Program) -> set[str]:
    names = [spec.name for spec in program.inputs] + list(program.weights)
    if len(set(names)) != len(names):
        raise ProgramError("two of its inputs and weights have the same name")
    if any(spec.name != spec.value for spec in program.inputs):
        raise ProgramError("an input's value must be its name")
    return set(names)


def _check_shape(name: str, shape: Iterable[Dim], dtype: str | None, axes: set[str]) -> None:
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ProgramError(f"{name!r} has the dtype {dtype!r}, which torch does not have")
    for dim in shape:
        try:
            unknown = axis_names(dim) - axes
        except ValueError as error:
            raise ProgramError(f"{name!r}: {error}") from None
        if unknown or (isinstance(dim, int) and dim < 0):
            known = ", ".join(sorted(axes)) or "none"
            raise ProgramError(f"{name!r} has the size {dim!r}, the program's axes are: {known}")
