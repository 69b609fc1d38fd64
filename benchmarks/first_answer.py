"""Loads a tuned model in this fresh process, answers once, and prints the seconds.

    python benchmarks/first_answer.py model_repository/pitch/1 '[8, 1024]' $(date +%s.%N)

Counted from the time that is given, at which the process was started, less the time that importing torch and
cudnn took. The second line is a JSON object with the parts of it.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

started = time.time()
import torch

from cudnn_fusion.preflight import load_cudnn

load_cudnn()
import cudnn  # noqa: F401

imports_s = time.time() - started

from cudnn_fusion.instance import Clock, Instance
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Bucket


def main(version: Path, dims: list[int], process_started: float) -> None:
    """Prints the whole, then its parts."""
    torch.set_grad_enabled(False)
    clock = Clock()
    clock.seconds["start"] = time.time() - process_started - imports_s
    instance = Instance.open(version, torch.device("cuda", 0), Settings(), clock)
    # One row for all: drawing the noise of a whole batch takes longer than some models take to load.
    x = torch.randn(1, *dims[1:]).to(getattr(torch, instance.model.program.inputs[0].dtype)).expand(dims)
    executor, _ = instance.model.executor(Bucket.of({"batch": dims[0]}))
    executor.inputs[0].copy_(x)
    clock.lap("other")
    answer = [output.cpu() for output in executor.run()]
    clock.lap("answer")
    seconds = time.time() - process_started - imports_s
    assert all(torch.isfinite(output).all() for output in answer)
    print(seconds)
    print(json.dumps({part: round(value, 3) for part, value in clock.seconds.items()}))
    instance.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3]))
