"""Tuning again on the machine that serves, after its driver, library or device has changed.

In a process of its own, which is killed when its time is over: whatever becomes of it, the server goes on.
What it has finished is in the overlay, and what a bucket lacks waits there for the next time. One process
tunes for all instances that share an overlay.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from cudnn_fusion.children import interpreter, live_and_die_with_parent
from cudnn_fusion.environment import Compatibility
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket


def untuned_here(stores: Sequence[PlanStore], here: Compatibility, program_sha256: str) -> list[Bucket]:
    """Buckets that are tuned for this program in another environment of this kind and not in this one, the
    largest first."""
    tuned = {record.bucket for store in stores for record in store.buckets(here, program_sha256)}
    other = {record.bucket for store in stores for record in store.buckets_elsewhere(here, program_sha256)}
    return sorted(other - tuned, key=lambda bucket: bucket.sizes, reverse=True)


def retune_in_child(
    version_directory: Path, overlay: Path, device: torch.device, buckets: Sequence[Bucket], budget_s: float
) -> str:
    """Tunes buckets into the overlay within so many seconds; what came of it, one line. Never raises."""
    names = ", ".join(bucket.name for bucket in buckets)
    task = {
        "version": str(version_directory),
        "overlay": str(overlay),
        "device": str(device),
        "threads": torch.get_num_threads(),  # on a CPU they are part of the environment
        "budget_s": budget_s,
        "buckets": [dict(bucket.sizes) for bucket in buckets],
    }
    try:
        done = subprocess.run(
            [interpreter(), "-m", "cudnn_fusion.retune_child"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=budget_s,
            check=False,
            preexec_fn=live_and_die_with_parent,
        )
    except subprocess.TimeoutExpired:
        return f"{names}: not finished within RETUNE_BUDGET_S={budget_s:g}; the next start goes on"
    except OSError as error:
        return f"{names}: the tuning process cannot be started: {error}"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return lines[-1][:500] if lines else f"{names}: the tuning process ended with code {done.returncode}"
