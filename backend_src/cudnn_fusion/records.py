"""Records as JSON and back: strict, and the same text for the same record.

Every persisted record is a frozen dataclass of text, numbers, tuples, flat mappings and other such
dataclasses. What is read must have exactly its fields, with values of exactly their types.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

FORMAT_VERSION = 1
"""Version of all persisted records: a file with another one is not read."""

Record = TypeVar("Record")


class RecordError(ValueError):
    """JSON that is not the record it should be: says which field, what was found and what was expected."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal text. Raises ValueError for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def record_to_json(value: Any) -> Any:
    """A dataclass as a JSON-ready dictionary; tuples become lists, nested dataclasses dictionaries."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: record_to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: record_to_json(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [record_to_json(item) for item in value]
    return value


def record_from_json(record: type[Record], data: object) -> Record:
    """The dataclass ``record`` from parsed JSON that has exactly its fields, with values of their types.

    Raises RecordError. Numbers must be finite, integers below 2^63 in size.
    """
    return typing.cast(Record, _decode(record, data, record.__name__))


@cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _decode(hint: Any, value: object, where: str) -> object:
    """``value`` as the type ``hint`` says. Raises RecordError, naming ``where``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _decode(hint, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if is_dataclass(hint):
        return _decode_record(typing.cast(type, hint), value, where)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(value, where)
    return _decode_scalar(hint, value, where)


def _decode_record(record: type, value: object, where: str) -> object:
    hints = _hints(record)
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is {_shown(value)}, expected an object")
    wrong = {*hints} ^ {*value}
    if wrong:
        name = min(wrong, key=str)
        raise RecordError(
            f"{where} {'lacks the field' if name in hints else 'has the unknown field'} {_shown(name)}"
        )
    return record(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


def _decode_tuple(arguments: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise RecordError(f"{where} is {_shown(value)}, expected a list")
    if arguments == (float, Ellipsis) and all(type(item) is float and math.isfinite(item) for item in value):
        return tuple(value)  # thousands of sampled outputs: the same, faster
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple([_decode(arguments[0], item, where) for item in value])
    if len(value) != len(arguments):
        raise RecordError(f"{where} has {len(value)} items, expected {len(arguments)}")
    return tuple([_decode(hint, item, where) for hint, item in zip(arguments, value, strict=True)])


def _decode_mapping(value: object, where: str) -> dict[str, object]:
    """A flat object: what the record itself does not describe may hold text and numbers only."""
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is {_shown(value)}, expected an object")
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float | None):
            raise RecordError(f"{where} holds {_shown(item)}, expected text, numbers or null")
        if (isinstance(item, float) and not math.isfinite(item)) or (
            isinstance(item, int) and abs(item) >= 2**63
        ):
            raise RecordError(
                f"{where} holds {_shown(item)}, expected numbers that are finite and below 2**63"
            )
    return dict(value)


def _decode_scalar(hint: Any, value: object, where: str) -> object:
    integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    if hint is float and (integer or (isinstance(value, float) and math.isfinite(value))):
        return float(typing.cast(float, value))
    if hint is int and integer:
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise RecordError(f"{where} is {_shown(value)}, expected {hint.__name__}")


def _shown(value: object) -> str:
    """A value in an error message: short, and printable whatever it holds."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer of more than 63 bits"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
