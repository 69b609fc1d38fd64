"""What the GPU benchmarks say of the machine that they ran on."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import typer

from cudnn_fusion.environment import cuda_compatibility, current_provenance


def gpu_environment() -> dict[str, Any]:
    """Date, GPU and versions. Ends the program with a sentence on a machine without a GPU."""
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs an NVIDIA GPU and a CUDA build of torch; torch sees none", err=True)
        raise typer.Exit(2)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{k: v for k, v in cuda_compatibility(0).to_json().items() if v is not None},
        **current_provenance("cuda").to_json(),
    }
