"""The process that `cudnn_fusion.retune` starts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cudnn_fusion.plan_store import PlanStoreError
from cudnn_fusion.pretuning import PretuneError, Pretuning
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.trust import distrust

STAGING = ".staging"


def retune(
    version_directory: Path, overlay: Path, device: torch.device, buckets: Sequence[Bucket], budget_s: float
) -> str:
    """As `retune.retune_in_child`, in this process; begins no bucket after the budget.

    Raises PretuneError and PlanStoreError.
    """
    end = time.monotonic() + budget_s
    tuned: list[str] = []
    staging = overlay / STAGING
    with closing(
        Pretuning.open_version(version_directory, device, staging=staging, overlay=overlay)
    ) as opened:
        lock = FileLock(overlay / f".retune-{opened.tuner.compatibility.hash()}.lock", mode=0o600)
        try:
            with lock.acquire(timeout=max(0.0, end - time.monotonic())):
                for bucket in buckets:
                    if time.monotonic() >= end:
                        break
                    if opened.run([bucket], None, lambda outcome: None).complete:
                        tuned.append(bucket.name)
        except Timeout:
            return "another process tunes for this overlay at the moment"
        timed = opened.tuner.timed_candidates
    left = [bucket.name for bucket in buckets if bucket.name not in tuned]
    text = f"tuned again: {', '.join(tuned) or 'nothing'} ({timed} candidates timed)"
    return f"{text}; not yet: {', '.join(left)}" if left else text


def main() -> None:
    """Reads a task from standard input, prints one line."""
    task = json.load(sys.stdin)
    device = torch.device(task["device"])
    torch.set_num_threads(task["threads"])
    buckets = [Bucket.of(sizes) for sizes in task["buckets"]]
    os.umask(0o077)  # A server refuses an overlay that others can write.
    try:
        os.makedirs(task["overlay"], mode=0o700, exist_ok=True)
        if reason := distrust(Path(task["overlay"])):
            raise PretuneError(f"the overlay is not trusted: {reason}")
        print(retune(Path(task["version"]), Path(task["overlay"]), device, buckets, task["budget_s"]))
    except (PretuneError, PlanStoreError, OSError) as error:
        print(f"not tuned again: {error}")


if __name__ == "__main__":
    main()
