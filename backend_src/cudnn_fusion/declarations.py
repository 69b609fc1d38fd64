"""How a user declares an input: ``NAME:DTYPE[batch=1..64,3,height=224..512,224]``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cudnn_fusion.lowered import Axis, ProgramError, dtype_name

TRITON_DTYPES: dict[str, torch.dtype] = {
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
"""Triton's names of data types (without the ``TYPE_`` that config.pbtxt adds) and torch's."""

TRITON_NAMES = {dtype_name(dtype): name for name, dtype in TRITON_DTYPES.items()}
"""The other way round: ``FP16`` for ``float16``."""

_EXAMPLE = "image:FP32[batch=1..64,3,height=224..512,224]"


@dataclass(frozen=True)
class InputDeclaration:
    """An input as it is served: its name, data type and shape.

    ``dtype`` is Triton's name (``FP16``). A dimension is a number or a dynamic `Axis`; the same axis in
    several inputs (or twice in one) has the same size in every request.
    """

    name: str
    dtype: str
    dims: tuple[int | Axis, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's counterpart of ``dtype``."""
        return TRITON_DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The dimensions with axes by name."""
        return tuple(dim.name if isinstance(dim, Axis) else dim for dim in self.dims)

    @classmethod
    def parse(cls, text: str) -> InputDeclaration:
        """The declaration that ``text`` writes out. ProgramError points at what cannot be read."""
        head, bracket, rest = text.partition("[")
        name, colon, dtype = head.partition(":")
        if not bracket or not colon:
            missing = "':DTYPE'" if not colon else "'[' and the dimensions"
            raise _unreadable(text, len(head), f"{missing} is missing")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.\-]*", name):
            raise _unreadable(text, 0, f"{name!r} is not a name (letters, digits, '_', '.', '-')")
        if dtype not in TRITON_DTYPES:
            hint = f"{dtype!r} is not a data type served here; expected one of {', '.join(TRITON_DTYPES)}"
            raise _unreadable(text, len(name) + 1, hint)
        if not rest.endswith("]"):
            raise _unreadable(text, len(text), "']' is missing at the end")
        return cls(name, dtype, _parse_dims(text, len(head) + 1))


def _unreadable(text: str, position: int, problem: str) -> ProgramError:
    pointer = " " * position + "^"
    return ProgramError(
        f"cannot read the input declaration: {problem}\n  {text}\n  {pointer}\ne.g. {_EXAMPLE}"
    )


def _parse_dims(text: str, start: int) -> tuple[int | Axis, ...]:
    body = text[start:-1]
    if not body.strip():
        return ()
    dims = []
    position = start
    for part in body.split(","):
        dims.append(_parse_dim(text, position, part))
        position += len(part) + 1
    return tuple(dims)


def _parse_dim(text: str, position: int, part: str) -> int | Axis:
    stripped = part.strip()
    if re.fullmatch(r"[0-9]+", stripped):
        if int(stripped) == 0:
            raise _unreadable(text, position, "a size must be at least 1")
        return int(stripped)
    name, equals, sizes = (piece.strip() for piece in stripped.partition("="))
    if not equals:
        problem = f"{stripped!r} is neither a size such as 224 nor an axis such as height=224..512"
        raise _unreadable(text, position, problem)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise _unreadable(text, position, f"{name!r} is not a name for an axis (letters, digits, '_')")
    if re.fullmatch(r"[0-9]+", sizes):
        raise _unreadable(text, position, f"axis {name!r} has a single size: write just {sizes}")
    range_match = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", sizes)
    if not range_match:
        problem = f"{sizes!r} is not a range of sizes such as 1..64"
        raise _unreadable(text, position + part.index("=") + 1, problem)
    return _axis(text, position, name, int(range_match[1]), int(range_match[2]))


def _axis(text: str, position: int, name: str, minimum: int, maximum: int) -> Axis:
    if minimum < 1:
        raise _unreadable(text, position, f"axis {name!r} must start at 1 or more")
    if minimum > maximum:
        raise _unreadable(text, position, f"axis {name!r} ends at {maximum}, below its start {minimum}")
    if minimum == maximum:
        raise _unreadable(text, position, f"axis {name!r} has a single size: write just {minimum}")
    return Axis(name, minimum, maximum)


def dynamic_axes(declarations: Iterable[InputDeclaration]) -> tuple[Axis, ...]:
    """Every dynamic axis once, in the order of appearance.

    ProgramError: two ranges for one axis, or two inputs of one name.
    """
    axes: dict[str, Axis] = {}
    names: set[str] = set()
    for declaration in declarations:
        if declaration.name in names:
            raise ProgramError(f"two inputs are declared with the name {declaration.name!r}")
        names.add(declaration.name)
        for dim in declaration.dims:
            if isinstance(dim, Axis) and axes.setdefault(dim.name, dim) != dim:
                other = axes[dim.name]
                raise ProgramError(
                    f"axis {dim.name!r} is declared as {other.minimum}..{other.maximum} and, in input "
                    f"{declaration.name!r}, as {dim.minimum}..{dim.maximum}: give it one range, or two names"
                )
    return tuple(axes.values())


def example_sizes(declarations: Sequence[InputDeclaration]) -> dict[str, int]:
    """A size for every dynamic axis to export at.

    At least 2 (torch specialises on 1), and where the range allows it different from every other size, so
    that equal sizes are not taken for one size.
    """
    taken = {dim for declaration in declarations for dim in declaration.dims if isinstance(dim, int)}
    sizes: dict[str, int] = {}
    for axis in dynamic_axes(declarations):
        smallest = max(2, axis.minimum)
        free = (size for size in range(smallest, axis.maximum + 1) if size not in taken)
        sizes[axis.name] = next(free, smallest)
        taken.add(sizes[axis.name])
    return sizes
