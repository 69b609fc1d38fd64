"""What benchmarks say of the machine that they ran on."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import typer

from cudnn_fusion.environment import Compatibility, cuda_compatibility, current_provenance


def environment(device: Compatibility) -> dict[str, Any]:
    """Date, device and versions."""
    described = {**device.to_json(), **current_provenance(device.kind).to_json()}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: value for name, value in described.items() if value is not None},
    }


def gpu_environment() -> dict[str, Any]:
    """`environment` of the first GPU. Ends the program with a sentence on a machine without a GPU."""
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs an NVIDIA GPU and a CUDA build of torch; torch sees none", err=True)
        raise typer.Exit(2)
    return environment(cuda_compatibility(0))
