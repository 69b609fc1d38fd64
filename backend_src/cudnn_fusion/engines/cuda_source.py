"""CUDA C++ of this package: sources whose sizes are macros, compiled by NVRTC for one plan.

NVRTC compiles in tenths of a second without a compiler on the machine, and a plan holds the machine code:
serving needs neither.

Source of facts: NVRTC documentation (options, supported architectures, predefined macros).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from cudnn_fusion.engines.base import CandidateRejectedError, one_line
from cudnn_fusion.segment import OUTPUT, Operation, Segment

TYPES = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat"}
ACTIVATIONS = {
    # Written so that a NaN stays one.
    "relu": "v < 0.f ? 0.f : v",
    "relu6": "v < 0.f ? 0.f : v > 6.f ? 6.f : v",
    "leaky_relu": "v < 0.f ? v * {negative_slope} : v",
    "elu": "v < 0.f ? {alpha} * expm1f(v) : v",
    "silu": "v / (1.f + expf(-v))",
    "sigmoid": "1.f / (1.f + expf(-v))",
    "tanh": "tanhf(v)",
    "gelu": "0.5f * v * (1.f + erff(v * 0.70710678f))",
    "gelu_tanh": "0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)))",
    "hardswish": "v * (v < -3.f ? 0.f : v > 3.f ? 6.f : v + 3.f) / 6.f",
    "hardsigmoid": "(v < -3.f ? 0.f : v > 3.f ? 6.f : v + 3.f) / 6.f",
}
_IN_HALF_PRECISION = {
    "silu": "__fdividef(v, 1.f + __expf(-v))",
    "sigmoid": "__fdividef(1.f, 1.f + __expf(-v))",
    "gelu_tanh": "__fdividef(v, 1.f + __expf(-1.5957691f * (v + 0.044715f * v * v * v)))",
}
"""Shorter ones, off by a few units in the last place of a float."""


def with_macros(name: str, definitions: Mapping[str, object]) -> str:
    """The text of the source called ``name`` behind macros and the types of elements."""
    macros = (f"#define {macro} {value}\n" for macro, value in definitions.items())
    files = (resources.files(__package__).joinpath(file) for file in ("elements.cuh", name))
    return "".join([*macros, *(file.read_text(encoding="utf-8") for file in files)])


def parameters(segment: Segment, types: Mapping[str, str]) -> str:
    """A kernel's parameters: pointers to the operands, in their order, of their types or those given."""
    return ", ".join(
        f"{'' if o.name == OUTPUT else 'const '}{types.get(o.name, TYPES[o.dtype])}* __restrict__ {o.name}"
        for o in segment.operands
    )


def epilogue(segment: Segment, operations: Sequence[Operation]) -> str:
    """Operations behind a convolution, as statements on ``v`` at ``channel`` and ``index`` of the output."""
    return " ".join(_step(operation, segment) for operation in operations)


def _step(operation: Operation, segment: Segment) -> str:
    if operation.operand is None:
        numbers = {name: f"{float(value)!r}f" for name, value in operation.attributes}  # type: ignore[arg-type]
        half = segment.operand(OUTPUT).dtype != "float32"
        known = ACTIVATIONS | _IN_HALF_PRECISION if half else ACTIVATIONS
        return f"v = {known[operation.kind].format(**numbers)};"
    at = "channel" if segment.is_per_channel(operation.operand) else "index"
    return f"v = v {'*' if operation.kind == 'scale' else '+'} widen({operation.operand}[{at}]);"


def compiled(name: str, text: str, capability: tuple[int, int], *more: str) -> bytes:
    """Machine code of a source called ``name`` for a compute capability, with ``more`` options.

    Raises CandidateRejectedError.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CandidateRejectedError("cuda-python is not installed: pip install cuda-python") from error

    architecture = f"sm_{capability[0]}{capability[1]}"
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))[0]
        try:
            options = [f"--gpu-architecture={architecture}", "--std=c++17", *more]
            if (
                nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
                != 0
            ):
                log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))[0]
                _checked(nvrtc.nvrtcGetProgramLog(program, log))
                raise CandidateRejectedError(f"not compiled for {architecture}: {one_line(log.decode())}")
            code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))[0]
            _checked(nvrtc.nvrtcGetCUBIN(program, code))
            return bytes(code)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
    except RuntimeError as error:  # the library is missing, or refuses
        raise CandidateRejectedError(f"not compiled for {architecture}: {one_line(error)}") from error


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    code, *values = answer
    if code != 0:
        raise RuntimeError(f"NVRTC answers {code!r}")
    return tuple(values)
