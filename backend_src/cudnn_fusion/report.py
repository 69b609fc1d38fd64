"""What is tuned in a model directory, what would serve a shape, and why: the facts, without printing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudnn_fusion import accuracy, lowered
from cudnn_fusion.environment import Compatibility, Provenance, compare
from cudnn_fusion.executor import site_sizes
from cudnn_fusion.interpreter import infer_shapes
from cudnn_fusion.lowered import Program
from cudnn_fusion.partition import LeftToTorch, Partition, for_device
from cudnn_fusion.plan import BucketRecord, Plan
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.segment import Dims, SegmentSite
from cudnn_fusion.shapes import Bucket, BucketChoice, choose

FALLBACK_ENGINES = (0, 1)
"""cuDNN's generic convolution engines: they serve every shape, some of them many times slower."""


class ReportError(Exception):
    """There is nothing to report on; the message says why and what to do."""


@dataclass(frozen=True)
class TunedPlan:
    """A stored plan with the buckets and layers that use it.

    ``segment`` is `Segment.describe`. ``hint`` warns of a plan that is worth a look; empty otherwise.
    Segment, sites and buckets are those of the program that is in the directory now: empty for a plan of an
    earlier one.
    """

    plan: Plan
    buckets: tuple[Bucket, ...]
    sites: tuple[str, ...]
    segment: str
    hint: str = ""

    @property
    def speed_up(self) -> float | None:
        """Torch's time divided by the plan's; None where either was not measured."""
        if self.plan.time_us is None or self.plan.torch_time_us is None:
            return None
        return self.plan.torch_time_us / self.plan.time_us


@dataclass(frozen=True)
class EnvironmentReport:
    """All that is stored for one environment, plans in the order of their buckets.

    ``problem`` says why none of it is usable, if so.
    """

    hash: str
    compatibility: Compatibility | None
    plans: tuple[TunedPlan, ...]
    buckets: tuple[BucketRecord, ...]
    problem: str = ""


@dataclass(frozen=True)
class SegmentAnswer:
    """What would serve one segment of a bucket here.

    ``why_not_better`` is empty for ``exact``. ``stale`` lists the differences of provenance, ``hint`` is as
    in `TunedPlan`.
    """

    site: str
    segment: str
    bucket: Bucket
    origin: str
    plan: Plan | None
    why_not_better: str
    stale: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class ShapeAnswer:
    """How a request of these sizes would be served in an environment."""

    choice: BucketChoice
    tuned: tuple[Bucket, ...]
    segments: tuple[SegmentAnswer, ...]


class ModelReport:
    """A version directory opened for reporting. Reads files; needs no device."""

    def __init__(self, version_directory: Path) -> None:
        """Raises ReportError when there is no readable program."""
        try:
            self.program: Program = lowered.read(version_directory / "lowered")
        except lowered.ProgramError as error:
            raise ReportError(f"{error}; export the model with tools/export.py") from error
        self._on: dict[str, tuple[Program, Partition]] = {}
        self.store = PlanStore(version_directory / "plans")

    def on(self, kind: str) -> tuple[Program, Partition]:
        """The program as it runs on a kind of device, its segments, and what is left to torch."""
        if kind not in self._on:
            self._on[kind] = for_device(self.program, kind)
        return self._on[kind]

    def fused(self, kind: str = "cpu") -> tuple[SegmentSite, ...]:
        """The segments."""
        return self.on(kind)[1].sites

    def left(self, kind: str = "cpu") -> tuple[LeftToTorch, ...]:
        """The operations that torch runs, each with its reason."""
        return self.on(kind)[1].left

    def environments(self) -> list[EnvironmentReport]:
        """Everything that is stored, an environment each; empty without plans."""
        found: list[EnvironmentReport] = []
        for stored in self.store.environments():
            if stored.compatibility is None:
                found.append(EnvironmentReport(stored.hash, None, (), (), stored.reason))
                continue
            records = self._of_this_program(self.store.buckets(stored.compatibility))
            uses = self._uses(records, stored.compatibility.kind)
            plans = [_tuned(plan, uses.get(plan.key.digest(), [])) for plan in self.store.plans(stored.hash)]
            plans.sort(key=lambda tuned: (not tuned.buckets, tuned.buckets))
            found.append(EnvironmentReport(stored.hash, stored.compatibility, tuple(plans), records))
        return found

    def answer(self, sizes: Bucket, here: Compatibility, provenance: Provenance | None = None) -> ShapeAnswer:
        """What would serve a request, by the same look-up as the server's.

        Plans are called stale by ``provenance``; None when it is not known, as for a described GPU. Raises
        ReportError for sizes that the model does not take.
        """
        self._check(sizes)
        tuned = {r.bucket for r in self._of_this_program(self.store.buckets(here))}
        tuned = tuned or {r.bucket for r in self._of_this_program(self.store.buckets_elsewhere(here))}
        axis = self.program.batch
        limits = (None, None, 1) if axis is None else (axis.name, axis.maximum, axis.minimum)
        choice = choose(sizes, tuned, *limits)
        segments: list[SegmentAnswer] = []
        for bucket in dict.fromkeys(part.bucket for part in choice.parts):
            segments += [
                self._segment(site, dims, bucket, here, provenance)
                for site, dims in self._sized(bucket, here.kind)
            ]
        return ShapeAnswer(choice, tuple(sorted(tuned)), tuple(segments))

    def _segment(
        self,
        site: SegmentSite,
        dims: dict[str, Dims],
        bucket: Bucket,
        here: Compatibility,
        provenance: Provenance | None,
    ) -> SegmentAnswer:
        key = site.segment.key(dims, accuracy.VALIDATION)
        name, text = site.name, site.segment.describe()
        found = self.store.find(here, key)
        if isinstance(found, Found):
            stale, hint = _stale(found.plan, provenance), _hint(found.plan, text)
            return SegmentAnswer(name, text, bucket, "exact", found.plan, "", stale, hint)
        elsewhere = self.store.find_elsewhere(here, key)
        if elsewhere:
            other, plan = elsewhere[0]
            changed = "; ".join(str(difference) for difference in compare(other, here))
            reason = found.reason if changed in found.reason else f"{found.reason} ({changed})"
            stale, hint = _stale(plan, provenance), _hint(plan, text)
            return SegmentAnswer(name, text, bucket, "recipe", plan, reason, stale, hint)
        origin = "heuristic" if here.kind == "cuda" else "reference"
        return SegmentAnswer(name, text, bucket, origin, None, found.reason)

    def _uses(
        self, records: Iterable[BucketRecord], kind: str
    ) -> dict[str, list[tuple[Bucket, SegmentSite]]]:
        """Key digest to the buckets and sites that use it."""
        uses: dict[str, list[tuple[Bucket, SegmentSite]]] = {}
        for record in records:
            for site, dims in self._sized(record.bucket, kind):
                digest = site.segment.key(dims, accuracy.VALIDATION).digest()
                uses.setdefault(digest, []).append((record.bucket, site))
        return uses

    def _sized(self, bucket: Bucket, kind: str) -> list[tuple[SegmentSite, dict[str, Dims]]]:
        """The segments on a kind of device with their operands' dims at a bucket."""
        program, found = self.on(kind)
        shapes = infer_shapes(program, dict(bucket.sizes))
        return [(site, dict(site_sizes(site, shapes, program))) for site in found.sites]

    def _of_this_program(self, records: Iterable[BucketRecord]) -> tuple[BucketRecord, ...]:
        """Records of the program in the directory, with sizes that it takes."""
        axes = {axis.name: axis for axis in self.program.axes}
        return tuple(
            record
            for record in records
            if record.program_sha256 == self.program.sha256
            and {name for name, _ in record.sizes} == axes.keys()
            and all(axes[name].minimum <= size <= axes[name].maximum for name, size in record.sizes)
        )

    def _check(self, sizes: Bucket) -> None:
        axes = {axis.name: axis for axis in self.program.axes}
        given = dict(sizes.sizes)
        if set(given) != set(axes):
            wanted = ", ".join(f"{a.name}={a.minimum}..{a.maximum}" for a in self.program.axes) or "none"
            if not axes:
                raise ReportError(f"sizes {sizes.name}: this model has no dynamic axes; leave the sizes out")
            raise ReportError(f"sizes {sizes.name}: this model's axes are {wanted}; give each a size")
        for name, size in given.items():
            axis = axes[name]
            if not axis.minimum <= size <= axis.maximum:
                raise ReportError(f"{name}={size}: the model takes {axis.minimum} to {axis.maximum}")


def _tuned(plan: Plan, uses: Sequence[tuple[Bucket, SegmentSite]]) -> TunedPlan:
    buckets = tuple(dict.fromkeys(bucket for bucket, _ in uses))
    sites = tuple(dict.fromkeys(site.name for _, site in uses))
    segment = uses[0][1].segment.describe() if uses else ""
    return TunedPlan(plan, buckets, sites, segment, _hint(plan, segment))


def _stale(plan: Plan, provenance: Provenance | None) -> tuple[str, ...]:
    if provenance is None:
        return ()
    try:
        stored = Provenance.from_json(plan.provenance)
    except (KeyError, TypeError, ValueError):
        return ("where it was made cannot be read",)
    return tuple(str(difference) for difference in compare(stored, provenance))


def _hint(plan: Plan, segment: str) -> str:
    """``segment`` is empty when it is not known."""
    candidate = plan.candidate
    hints: list[str] = []
    if not plan.timed:
        hints.append("untimed: planned without the device; tune it there")
    if candidate.engine == "cudnn" and candidate.engine_id in FALLBACK_ENGINES:
        hints.append("a generic cuDNN engine, often slower than a specialised one")
    if candidate.engine == "cudnn" and segment and candidate.form != segment:
        hints.append(f"cuDNN runs {candidate.form} only, torch the rest of {segment}")
    if plan.time_us is not None and plan.torch_time_us is not None and plan.time_us > plan.torch_time_us:
        hints.append("slower than torch")
    return "; ".join(hints)
