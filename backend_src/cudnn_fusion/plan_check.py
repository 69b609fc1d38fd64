"""A model directory's plans, loaded and compared on this machine as a server does when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_fusion import lowered
from cudnn_fusion.engines.torch_eager import configure
from cudnn_fusion.environment import current_provenance
from cudnn_fusion.executor import site_sizes
from cudnn_fusion.instance import LOWERED, PLANS, place
from cudnn_fusion.interpreter import infer_shapes
from cudnn_fusion.partition import for_device
from cudnn_fusion.plan_cache import PlanCache
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket


@dataclass(frozen=True)
class CheckedPlan:
    """What would serve a layer of a tuned bucket here; ``reason`` says why it is not the stored plan."""

    bucket: Bucket
    site: str
    plan: str
    origin: str
    reason: str


def check_plans(version_directory: Path, device: torch.device) -> Iterator[CheckedPlan]:
    """Loads the plan of every layer in every bucket that is tuned for this machine's environment.

    Each is compared with its stored outputs. Raises lowered.ProgramError.
    """
    exported = lowered.read(version_directory / LOWERED)
    configure(exported.precision)
    here = place(device)
    program, partition = for_device(exported, device.type)
    store = PlanStore(version_directory / PLANS)
    provenance = current_provenance(here.compatibility.kind)
    cache = PlanCache((store,), here.compatibility, provenance, here.engines, device)
    for record in store.buckets(here.compatibility, exported.sha256):
        shapes = infer_shapes(program, dict(record.sizes))
        for site in partition.sites:
            served = cache.find(site.segment, dict(site_sizes(site, shapes, program)))
            yield CheckedPlan(
                record.bucket, site.name, served.candidate.label(), served.origin, served.reason
            )
