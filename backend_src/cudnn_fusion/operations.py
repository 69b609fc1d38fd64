"""Which operations a lowered program may call.

The policy: functional ATen overloads (their schema writes to nothing) that compute tensors, or sizes of
tensors, on the device without asking it for a value; and arithmetic on sizes. A program comes from a file,
so a name is looked up, checked against the policy and refused before anything of the program runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from cudnn_fusion.lowered import ProgramError

ON_SIZES: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.truediv": operator.truediv,
    "operator.mod": operator.mod,
    "operator.neg": operator.neg,
    "operator.pow": operator.pow,
    "math.trunc": math.trunc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "sym.max": torch.sym_max,
    "sym.min": torch.sym_min,
    "sym.float": torch.sym_float,
    "sym.int": torch.sym_int,
}
"""Arithmetic on sizes, by the name it has in a lowered program."""

NAME_OF_FUNCTION = {id(function): name for name, function in ON_SIZES.items()}
"""The same names by the identity of the function, as found in an exported graph."""

_SIZE_QUERIES = {"aten.sym_size.int", "aten.sym_numel.default", "aten.sym_stride.int"}
_REFUSED_PACKETS = {"from_file", "pin_memory", "_pin_memory", "is_pinned"}
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Depends on values only for boolean masks, and those leave an unknown size that the export refuses.
_VALUE_DEPENDENT_EXCEPT = {"aten.index.Tensor"}


@lru_cache(maxsize=4096)
def resolve(name: str) -> Callable[..., Any]:
    """The callable that ``name`` stands for.

    ``name`` is an entry of `ON_SIZES` or ``aten.<operation>.<overload>``. ProgramError says why a name is
    refused.
    """
    if name in ON_SIZES:
        return ON_SIZES[name]
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not all(part.isidentifier() for part in parts[1:]):
        raise ProgramError(
            f"operation {name!r} is not allowed: expected aten.<operation>.<overload> or one of "
            f"{', '.join(sorted(ON_SIZES))}. Write the model with torch operations"
        )
    packet = getattr(torch.ops.aten, parts[1], None)
    overload = getattr(packet, parts[2], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise ProgramError(f"operation {name!r} is unknown to torch {torch.__version__}")
    reason = _refusal(name, overload)
    if reason:
        raise ProgramError(f"operation {name!r} is not allowed: {reason}")
    return overload


def _refusal(name: str, overload: torch._ops.OpOverload[Any, Any]) -> str | None:
    schema = overload._schema
    packet = name.split(".")[1]
    schema_name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    if packet in _REFUSED_PACKETS or not torch._C._dispatch_has_kernel(schema_name):
        return "only operations that compute tensors on the device are"
    if schema.is_mutable:
        return "it writes to its arguments; export the model again, which makes it functional"
    if name not in _VALUE_DEPENDENT_EXCEPT and _VALUE_DEPENDENT & set(overload.tags):
        return (
            "its result's size depends on the values in a tensor; use torch.where, a mask or a fixed size, "
            "or move this step out of the model"
        )
    if name not in _SIZE_QUERIES and not any("Tensor" in str(result.type) for result in schema.returns):
        return "it does not compute a tensor"
    return None


def is_random(name: str) -> bool:
    """Whether the operation draws random numbers whatever its arguments are."""
    function = resolve(name)
    if not isinstance(function, torch._ops.OpOverload):
        return False
    only_for_dropout = any(
        "dropout" in argument.name or "train" in argument.name for argument in function._schema.arguments
    )
    return torch.Tag.nondeterministic_seeded in function.tags and not only_for_dropout
