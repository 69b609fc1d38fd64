"""Sizes that depend on axes: evaluating the expressions in a lowered program's shapes.

An expression is integer arithmetic over axis names as sympy prints it (``2*batch + 1``,
``(length - 1)//2``, ``Max(1, length)``). It is parsed, never executed as Python.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > 64:
        raise ValueError(f"exponent {exponent} is too large for a size")
    return float(base**exponent) if exponent < 0 else base**exponent


def _round(value: Number) -> int:
    return round(value)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "ModularIndexing": lambda a, b, c: a // b % c,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": float,
    "FloatPow": _power,
    "PowByNatural": _power,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "TruncToInt": math.trunc,
    "TruncToFloat": lambda a: float(math.trunc(a)),
    "RoundToInt": _round,
    "floor": math.floor,
    "ceiling": math.ceil,
    "Abs": abs,
}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > 2000:
        raise ValueError("the expression is longer than 2000 characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not an expression over axis names: {error}") from None
    for part in ast.walk(tree):
        _check_part(part, text)
    return tree


def _check_part(part: ast.AST, text: str) -> None:
    if isinstance(part, ast.Call):
        ok = isinstance(part.func, ast.Name) and part.func.id in _FUNCTIONS and not part.keywords
    elif isinstance(part, ast.BinOp):
        ok = type(part.op) in _BINARY or isinstance(part.op, ast.Pow)
    elif isinstance(part, ast.UnaryOp):
        ok = isinstance(part.op, ast.USub | ast.UAdd)
    elif isinstance(part, ast.Constant):
        ok = type(part.value) in (int, float)
    else:
        ok = isinstance(part, ast.Name | ast.expr_context | ast.operator | ast.unaryop)
    if not ok:
        raise ValueError(f"{text!r} holds something other than arithmetic over axis names")


def _value(part: ast.expr, sizes: Mapping[str, int]) -> Number:
    if isinstance(part, ast.Constant):
        assert isinstance(part.value, int | float)
        return part.value
    if isinstance(part, ast.Name):
        return sizes[part.id]
    if isinstance(part, ast.UnaryOp):
        operand = _value(part.operand, sizes)
        return -operand if isinstance(part.op, ast.USub) else operand
    if isinstance(part, ast.BinOp):
        left, right = _value(part.left, sizes), _value(part.right, sizes)
        return _power(left, right) if isinstance(part.op, ast.Pow) else _BINARY[type(part.op)](left, right)
    assert isinstance(part, ast.Call)
    assert isinstance(part.func, ast.Name)
    return _FUNCTIONS[part.func.id](*(_value(argument, sizes) for argument in part.args))


def axis_names(dim: int | str) -> frozenset[str]:
    """The axes that ``dim`` depends on. ValueError if it is not an expression over axis names."""
    if isinstance(dim, int):
        return frozenset()
    tree = _parse(dim)
    functions = {id(part.func) for part in ast.walk(tree) if isinstance(part, ast.Call)}
    return frozenset(
        part.id for part in ast.walk(tree) if isinstance(part, ast.Name) and id(part) not in functions
    )


def evaluate(dim: int | str, sizes: Mapping[str, int]) -> int:
    """The size that ``dim`` has when the axes have ``sizes``.

    ValueError: not an expression over axis names, an axis without a size, or no whole number results.
    """
    if isinstance(dim, int):
        return dim
    missing = axis_names(dim) - sizes.keys()
    if missing:
        raise ValueError(f"size {dim!r} needs a size for axis {', '.join(sorted(missing))}")
    try:
        value = _value(_parse(dim), sizes)
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"size {dim!r} cannot be computed for {dict(sizes)}: {error}") from None
    if value != int(value):
        raise ValueError(f"size {dim!r} is not a whole number for {dict(sizes)}: {value}")
    return int(value)


def evaluate_shape(shape: Iterable[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """``shape`` with every dimension evaluated; raises as `evaluate` does."""
    return tuple(evaluate(dim, sizes) for dim in shape)
