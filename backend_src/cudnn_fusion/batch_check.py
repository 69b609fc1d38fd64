"""Finds out along which axis a program may be batched and padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cudnn_fusion.batch_dependence import row_mixing
from cudnn_fusion.dims import axis_names, evaluate_shape
from cudnn_fusion.export_errors import first_line
from cudnn_fusion.interpreter import Interpreter, dtype_named
from cudnn_fusion.lowered import Program, TensorSpec, cast, in_type

# Relative to the largest value: above what another order of summation changes, below what a neighbour does.
_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 1e-2, "bf16": 4e-2}


def random_inputs(specs: Sequence[TensorSpec], sizes: dict[str, int], seed: int) -> list[torch.Tensor]:
    """Inputs at ``sizes``: standard normal, or 0 and 1 for integers (valid as indices of anything)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for spec in specs:
        shape, dtype = evaluate_shape(spec.shape, sizes), dtype_named(spec.dtype)
        if dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
        else:
            inputs.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return inputs


def find_batch_axis(program: Program, sizes: dict[str, int]) -> tuple[str | None, str]:
    """The batch axis, or None, and a sentence that says why.

    The batch axis is dimension 0 of every input and output, and rows along it do not influence each other.
    The program's operations must keep rows apart, and a trial must show it: other rows replaced by random
    values or zeros, and another number of rows, leave a row's answer equal within rounding. ``sizes`` are the
    sizes of the other axes to try it at.
    """
    borders = (*program.inputs, *program.outputs)
    first_dims = [spec.shape[0] if spec.shape else None for spec in borders]
    axis = next((axis for axis in program.axes if all(dim == axis.name for dim in first_dims)), None)
    if axis is None:
        return None, "no batch axis: no dynamic axis is the first dimension of every input and output"
    elsewhere = next((s.name for s in borders if any(axis.name in axis_names(d) for d in s.shape[1:])), None)
    if elsewhere:
        return None, f"axis {axis.name} is no batch axis: {elsewhere} has it in another dimension too"
    mixing = row_mixing(program, axis.name)
    if mixing:
        return None, f"axis {axis.name} is no batch axis: {mixing}"
    few = min(axis.maximum, max(axis.minimum, 2))
    many = min(axis.maximum, max(few + 1, axis.minimum + 3))
    try:
        problem = _influence(program, axis.name, sizes, few, many)
    except (RuntimeError, ValueError, IndexError) as error:
        return None, f"no batch axis: the check of axis {axis.name} could not run here ({first_line(error)})"
    if problem:
        return None, f"axis {axis.name} is no batch axis: {problem}"
    return axis.name, f"batch axis {axis.name}: rows were found independent"


def _influence(program: Program, axis: str, sizes: dict[str, int], few: int, many: int) -> str | None:
    # In single precision: many CPUs compute half precision a hundred times slower.
    program = in_type(program, "float32")
    interpreter = Interpreter(program, cast(program.weights, torch.float32), torch.device("cpu"))
    tolerance = _TOLERANCE[program.precision]
    kept = max(1, few - 1) if few == many else few
    base = random_inputs(program.inputs, {**sizes, axis: many}, seed=1)
    other = random_inputs(program.inputs, {**sizes, axis: many}, seed=2)
    expected = interpreter.run(base)
    variants = {
        "the answer for a row changes with the other rows (a statistic over the batch?)": [
            torch.cat([x[:kept], (10 * y[kept:]).to(x.dtype) if x.is_floating_point() else y[kept:]])
            for x, y in zip(base, other, strict=True)
        ],
        "the answer for a row changes when zero rows follow it": [
            torch.cat([x[:kept], torch.zeros_like(x[kept:])]) for x in base
        ],
        "the answer for a row changes with the number of rows": [x[:few] for x in base],
    }
    for problem, inputs in variants.items():
        answers = interpreter.run(inputs)
        pairs = zip(answers, expected, strict=True)
        if not all(_equal(answer[:kept], wanted[:kept], tolerance) for answer, wanted in pairs):
            return problem
    return None


def _equal(answer: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if answer.shape != expected.shape:
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        # Rounding can turn single decisions (an argmax between equals).
        return answer.numel() == 0 or float((answer != expected).float().mean()) <= 0.01
    finite = expected[torch.isfinite(expected)].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    close = torch.isclose(answer, expected, rtol=0.0, atol=tolerance * scale, equal_nan=True)
    return bool(close.all())
