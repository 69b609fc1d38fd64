"""Pre-tuning a model directory: which buckets, where unfinished work is kept, how it is published."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cudnn_fusion import devices, lowered
from cudnn_fusion.builders import Builders
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
from cudnn_fusion.engines.torch_eager import configure
from cudnn_fusion.environment import current_provenance, target_compatibility
from cudnn_fusion.executor import Resources
from cudnn_fusion.instance import LOWERED, PLANS, place
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import Partition, for_device
from cudnn_fusion.plan import BucketRecord, Plan
from cudnn_fusion.plan_store import Found, Miss, PlanStore
from cudnn_fusion.preflight import cudnn_version
from cudnn_fusion.settings import MAX_DIGITS
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.staging import Staging, StagingError
from cudnn_fusion.tuner import Outcome, Samples, Shard, Tuner, require_samples_fit

DEFAULT_BATCHES = 8
"""How many powers of two, from 1 on, are tuned when no batch sizes are named; the maximum is added."""

SHOWN_REASONS = 8


class PretuneError(Exception):
    """Nothing can be tuned; the message says why and what to do."""


@dataclass(frozen=True)
class Result:
    """What a pre-tuning run did. ``published`` counts plans copied into the model directory; ``problems`` say
    which buckets are not recorded although their segments have plans, and why."""

    outcomes: tuple[Outcome, ...]
    published: int
    built_candidates: int
    timed_candidates: int
    problems: tuple[str, ...] = ()

    @property
    def tuned(self) -> int:
        """Segments x buckets that have a plan now."""
        return sum(outcome.plan is not None for outcome in self.outcomes)

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is tuned and recorded."""
        return self.tuned == len(self.outcomes) and not self.problems


@dataclass
class Pretuning:
    """A model directory opened for tuning on a device, or for planning for a target (a name or a file)."""

    version_directory: Path
    published: PlanStore
    program: Program
    tuner: Tuner
    staging: Staging
    target: str | None
    engine: CudnnEngine | None

    @classmethod
    def open(
        cls,
        model_directory: Path,
        device: torch.device,
        target: str | None = None,
        staging: Path | None = None,
        force: bool = False,
        shard: Shard | None = None,
    ) -> Pretuning:
        """The newest version; see `open_version`. Raises PretuneError."""
        version = latest_version(model_directory)
        return cls.open_version(version, device, target, staging, force, shard)

    @classmethod
    def open_version(
        cls,
        version_directory: Path,
        device: torch.device,
        target: str | None = None,
        staging: Path | None = None,
        force: bool = False,
        shard: Shard | None = None,
        overlay: Path | None = None,
    ) -> Pretuning:
        """Publishes into the version's plans, or into an ``overlay`` of them.

        Raises PretuneError when there is no exported model, or nothing in it that a plan could serve.
        """
        published = PlanStore(overlay or version_directory / PLANS)
        place_of_plans = overlay or version_directory
        if not os.access(place_of_plans, os.W_OK):
            raise PretuneError(f"cannot write to {place_of_plans}, where plans go; make it writable")
        try:
            program = lowered.read(version_directory / LOWERED)
        except lowered.ProgramError as error:
            raise PretuneError(f"{error}; export the model with tools/export.py") from error
        configure(program.precision)
        torch.backends.cudnn.benchmark = True
        place_of_weights = torch.device("cpu") if target else device
        kind = device.type if target is None else "cuda"
        resources = Resources(*for_device(program, kind), place_of_weights, exported=program)
        if not resources.partition.sites:
            raise PretuneError(_why_nothing(resources.partition))
        known = [published, *(PlanStore(v / PLANS) for v in versions(version_directory.parent))]
        if overlay is None:
            del known[0]
        if force:
            known = []
        if target is None:
            here = place(device)
            if here.errors:
                raise PretuneError("; ".join(f"{e.what} {e.do}" for e in here.errors))
            engines, compatibility = list(here.engines.values()), here.compatibility
            engine = None
        else:
            try:
                description = devices.load(target)
            except devices.DeviceDescriptionError as error:
                raise PretuneError(str(error)) from error
            engine = CudnnEngine(torch.device("cuda"), description["properties"])
            engines, compatibility = [], target_compatibility(description, cudnn_version())
        provenance = current_provenance(compatibility.kind)
        try:
            unfinished = Staging(program, version_directory, staging, forced=force)
        except StagingError as error:
            raise PretuneError(str(error)) from error
        builders = Builders(device) if any(isinstance(e, CudnnEngine) for e in engines) else None
        tuner = Tuner(
            resources,
            engines,
            compatibility,
            provenance,
            unfinished.store,
            known,
            unfinished.left,
            builders,
            shard,
        )
        return cls(version_directory, published, program, tuner, unfinished, target, engine)

    def close(self) -> None:
        """Ends the processes that build, and leaves staging to other runs."""
        if self.tuner.builders is not None:
            self.tuner.builders.close()
        self.staging.close()

    def run(
        self, buckets: Sequence[Bucket], samples: Samples | None, on_outcome: Callable[[Outcome], None]
    ) -> Result:
        """Tunes buckets one by one and publishes them at the end.

        Interrupted, what is finished stays in staging for the next run. Raises PretuneError when it could not
        be published.
        """
        if samples is not None:
            require_samples_fit(self.program, buckets, samples)
        self.tuner.on_outcome = on_outcome
        outcomes: list[Outcome] = []
        for bucket in buckets:
            if self.engine is not None:
                outcomes += self.tuner.plan_untimed(bucket, self.engine)
            else:
                outcomes += self.tuner.tune(bucket, samples)
        tuner, plans = self.tuner, self.published
        environment = tuner.compatibility.hash()
        digests = {outcome.work.key.digest() for outcome in outcomes}
        published = plans.merge_from(tuner.store, {environment: digests})
        self._require_published(plans, outcomes, tuner.records)
        result = Result(
            tuple(outcomes), published, tuner.built_candidates, tuner.timed_candidates, tuple(tuner.problems)
        )
        self.staging.clear({(environment, digest) for digest in digests})
        return result

    def _require_published(
        self, plans: PlanStore, outcomes: Sequence[Outcome], records: Sequence[BucketRecord]
    ) -> None:
        """Raises PretuneError where a plan or record is not in the model's directory: staging was disturbed.

        In place of each may be a better one that another run has published.
        """
        here = self.tuner.compatibility
        missing = dict.fromkeys(
            outcome.work.sites[0].name
            for outcome in outcomes
            if outcome.plan is not None and not _is_there(plans.find(here, outcome.work.key), outcome.plan)
        )
        recorded = {record.bucket for record in plans.buckets(here, self.program.sha256)}
        missing |= dict.fromkeys(r.bucket.name for r in records if r.bucket not in recorded)
        if missing:
            raise PretuneError(
                f"tuned, but not published, because {self.staging.directory} was changed meanwhile: "
                f"{', '.join(missing)}; run the same command again"
            )


def _is_there(found: Found | Miss, plan: Plan) -> bool:
    return isinstance(found, Found) and not plan.is_better_than(found.plan)


def _why_nothing(parts: Partition) -> str:
    found = Counter(f"{item.op}: {item.reason}" for item in parts.left)
    reasons = "".join(f"\n  {count} x {text}" for text, count in found.most_common(SHOWN_REASONS))
    more = f"\n  and {len(found) - SHOWN_REASONS} more" if len(found) > SHOWN_REASONS else ""
    return (
        "no part of this model can be fused, so there is nothing to tune; it is served by torch as it is. "
        f"Operations, and why each stays with torch:{reasons}{more}"
    )


def versions(model_directory: Path) -> list[Path]:
    """Version directories (their names are numbers), newest first."""
    found = [path for path in model_directory.iterdir() if path.is_dir() and path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def latest_version(model_directory: Path) -> Path:
    """Raises PretuneError when the directory is not that of an exported model."""
    if not model_directory.is_dir():
        raise PretuneError(f"{model_directory} is not a directory; export a model with tools/export.py")
    for version in versions(model_directory):
        if (version / LOWERED).is_dir():
            return version
    raise PretuneError(f"{model_directory} holds no exported version; export one with tools/export.py")


def parse_shard(text: str) -> Shard:
    """``2/4``, the second of four. Raises PretuneError."""
    number, _, count = text.partition("/")
    if not (_is_small(number) and _is_small(count) and 1 <= int(number) <= int(count)):
        raise PretuneError(f"--shard {text!r}: write NUMBER/COUNT, from 1/COUNT to COUNT/COUNT, as in 2/4")
    return Shard(int(number), int(count))


def _is_small(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def parse_buckets(text: str, program: Program) -> list[Bucket]:
    """Buckets from ``1,8,64`` (batch sizes) or ``batch=8,height=224;batch=1,height=448``.

    Empty text gives the default: powers of two along the batch axis and its maximum; of every other axis the
    maximum alone. Raises PretuneError.
    """
    if not program.axes:
        if text.strip():
            raise PretuneError(f"--buckets {text!r}: this model has no dynamic axes; leave --buckets out")
        return [Bucket(())]
    if not text.strip():
        return _default_buckets(program)
    if "=" not in text:
        axis = program.batch_axis or (program.axes[0].name if len(program.axes) == 1 else None)
        if axis is None or len(program.axes) > 1:
            smallest = ",".join(f"{a.name}={a.minimum}" for a in program.axes)
            largest = ",".join(f"{a.name}={a.maximum}" for a in program.axes)
            raise PretuneError(
                f"--buckets {text!r}: give a size for each axis, as in --buckets '{smallest};{largest}'"
            )
        return _checked([{axis: part.strip()} for part in text.split(",")], text, program)
    groups = [group for group in text.split(";") if group.strip()]
    return _checked([_sizes(group, text) for group in groups], text, program)


def _sizes(group: str, text: str) -> dict[str, str]:
    sizes: dict[str, str] = {}
    for pair in group.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name in sizes:
            raise PretuneError(
                f"--buckets {text!r}: {name} is given twice in one bucket; put ';' between buckets"
            )
        sizes[name] = value
    return sizes


def _checked(sizes: Iterable[dict[str, str]], text: str, program: Program) -> list[Bucket]:
    axes = {axis.name: axis for axis in program.axes}
    buckets: list[Bucket] = []
    for given in sizes:
        if set(given) != set(axes) or not all(value.isdecimal() for value in given.values()):
            raise PretuneError(
                f"--buckets {text!r}: each bucket needs a whole number for each of {', '.join(axes)}"
            )
        for name, value in given.items():
            axis = axes[name]
            if not axis.minimum <= int(value) <= axis.maximum:
                raise PretuneError(
                    f"--buckets {text!r}: {name}={value}; the model takes {axis.minimum} to {axis.maximum}"
                )
        buckets.append(Bucket.of({name: int(value) for name, value in given.items()}))
    return list(dict.fromkeys(buckets))


def _default_buckets(program: Program) -> list[Bucket]:
    fixed = {axis.name: axis.maximum for axis in program.axes}
    batch = program.batch
    if batch is None:
        return [Bucket.of(fixed)]
    powers = [1 << n for n in range(DEFAULT_BATCHES) if batch.minimum <= 1 << n < batch.maximum]
    return [Bucket.of({**fixed, batch.name: size}) for size in (*powers, batch.maximum)]


def load_samples(path: Path) -> dict[str, torch.Tensor]:
    """Arrays of a ``.npz`` by input name. Object arrays, which would be unpickled, are refused.

    Raises PretuneError.
    """
    try:
        arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise PretuneError(
                f"{path} holds an array without a name; save it with numpy.savez(path, name=x)"
            )
        with arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except PretuneError:
        raise
    except Exception as error:  # numpy, zipfile and the parser of headers each have their own for damage
        raise PretuneError(
            f"cannot read samples from {path}: {error}; save arrays of numbers with numpy.savez"
        ) from error
