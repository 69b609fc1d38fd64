"""Descriptions of GPUs, for planning on a machine that has none.

A description is a JSON file ``{"source", "memory_bus_bits", "properties"}``. ``properties`` is what
`cudnn.create_device_properties` takes, as text; ``memory_bus_bits`` is the one thing about a device that
decides about a plan and that cuDNN's own description leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any


class DeviceDescriptionError(ValueError):
    """A device description is unknown, unreadable or incomplete."""


def names() -> list[str]:
    """Names of the descriptions that come with the package, such as ``h200``."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load(target: str) -> Mapping[str, Any]:
    """The description called ``target``, or the one in the JSON file at that path (it ends in ``.json``).

    Raises DeviceDescriptionError when there is none, or it is not such a description.
    """
    try:
        if target.endswith(".json"):
            text = Path(target).read_text(encoding="utf-8")
        elif target in names():
            text = resources.files(__name__).joinpath(f"{target}.json").read_text(encoding="utf-8")
        else:
            raise DeviceDescriptionError(
                f"no device description is called {target!r}; known: {', '.join(names())}. "
                "Give one of these, or the path of a description (a .json file)."
            )
        description = json.loads(text)
    except DeviceDescriptionError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise DeviceDescriptionError(f"cannot read the device description {target}: {problem}") from problem
    if not isinstance(description, dict) or not isinstance(description.get("properties"), dict):
        raise DeviceDescriptionError(
            f"{target} is not a device description: expected an object with 'properties' (an object, as "
            "cuDNN describes a device) and 'memory_bus_bits' (a number)."
        )
    return description
