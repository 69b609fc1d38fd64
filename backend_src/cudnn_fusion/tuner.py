"""Tuning: enumerate, build, check, time, choose, record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from cudnn_fusion import accuracy, whole_model
from cudnn_fusion.builders import Builders, Built, build_all, build_each
from cudnn_fusion.engines.base import (
    FAILURES,
    BuiltPlan,
    Engine,
    Preparing,
    ReadyPlan,
    Searching,
    Sizes,
    reason_of,
)
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.environment import Compatibility, Provenance
from cudnn_fusion.executor import Executor, Resources, input_dims, site_weights
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.judge import Judge, Tensors
from cudnn_fusion.lowered import Program
from cudnn_fusion.plan import BucketRecord, Candidate, Errors, Plan, PlanKey, now_text, sha256_hex
from cudnn_fusion.plan_cache import PlanCache, Served
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.segment import Segment, SegmentSite, to_layout
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.timing import FINALISTS, Timing, time_interleaved

Samples = Mapping[str, torch.Tensor]

OPTIONS = 3
"""Fastest plans of a key between which the whole program decides."""


@dataclass(frozen=True)
class Shard:
    """A part of all keys, by their digests: the ``number``-th of ``count``, from 1.

    Which keys are in it depends on nothing else, so that machines that share nothing each tune a part.
    """

    number: int
    count: int

    def has(self, key: PlanKey) -> bool:
        """Whether the key is in this part."""
        return int(key.digest()[:16], 16) % self.count == self.number - 1


@dataclass(frozen=True)
class Work:
    """One key to tune: the sites that share it."""

    key: PlanKey
    segment: Segment
    sizes: Sizes
    sites: tuple[SegmentSite, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of one key in one bucket: a plan, or the reasons why there is none."""

    bucket: Bucket
    work: Work
    plan: Plan | None
    reused: bool
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass
class _Loaded:
    """A candidate as it would be served, and its errors once it has passed its check."""

    built: BuiltPlan
    ready: ReadyPlan
    error: Errors | None = None


@dataclass(frozen=True)
class _Final:
    """A checked and timed candidate with the record that it would get."""

    plan: Plan
    loaded: _Loaded

    @property
    def option(self) -> whole_model.Option:
        served = Served("exact", self.loaded.ready, self.plan.candidate, stored=self.plan)
        return whole_model.Option(served, self.plan.time_us or math.inf)


@dataclass
class Tuner:
    """Tunes a program's segments on one device and publishes each winner to ``store`` at once.

    ``builders`` build candidates beside this process; without them it builds its own. ``known`` are
    stores to take finished plans from: the model's own and its sibling versions'. So are ``unfinished``, with
    what other runs have tuned for this program. With a ``shard`` only its keys are tuned and no bucket is
    recorded. ``on_outcome`` is called after each key.
    """

    resources: Resources
    engines: Sequence[Engine]
    compatibility: Compatibility
    provenance: Provenance
    store: PlanStore
    known: Sequence[PlanStore] = ()
    unfinished: Sequence[PlanStore] = ()
    builders: Builders | None = None
    shard: Shard | None = None
    on_outcome: Callable[[Outcome], None] = field(default=lambda outcome: None)
    built_candidates: int = 0
    timed_candidates: int = 0
    records: list[BucketRecord] = field(default_factory=list)
    """Of the buckets of which each key has a plan and the whole is right."""
    problems: list[str] = field(default_factory=list)
    """Why a bucket is not recorded although each of its keys has a plan."""
    _finals: dict[PlanKey, list[_Final]] = field(default_factory=dict)
    _nan_fills_rows: bool = False

    def work(self, bucket: Bucket) -> list[Work]:
        """The distinct keys of a bucket, in the program's order; of the shard if there is one."""
        sites: dict[PlanKey, list[SegmentSite]] = {}
        sizes_of: dict[PlanKey, Sizes] = {}
        all_sizes = self.resources.segment_sizes(bucket)
        for site, sizes in zip(self.resources.partition.sites, all_sizes, strict=True):
            key = site.segment.key(sizes, accuracy.VALIDATION)
            if self.shard is None or self.shard.has(key):
                sites.setdefault(key, []).append(site)
                sizes_of[key] = sizes
        return [Work(key, s[0].segment, sizes_of[key], tuple(s)) for key, s in sites.items()]

    def tune(self, bucket: Bucket, samples: Samples | None, seed: int = 0) -> list[Outcome]:
        """Tunes every key of a bucket that is not known, then records the bucket if each has a plan.

        ``samples`` maps input names to arrays of any number of rows; without them inputs are generated from
        ``seed``. Results are published one by one: an interruption loses nothing that is finished.
        """
        work = self.work(bucket)
        checked_on = _checked_on(samples)
        known = {w.key: p for w in work if (p := self._take_finished(w, True, checked_on)) is not None}
        missing = [item for item in work if item.key not in known]
        fresh = self._tune_each(bucket, missing, samples, seed)
        outcomes: list[Outcome] = []
        for item in work:
            plan = known.get(item.key)
            outcomes.append(next(fresh) if plan is None else Outcome(bucket, item, plan, reused=True))
            self.on_outcome(outcomes[-1])
        outcomes = self._record(bucket, outcomes, lambda: self._decide(bucket, outcomes, samples, seed))
        self._finals.clear()
        return outcomes

    def _tune_each(
        self, bucket: Bucket, work: Sequence[Work], samples: Samples | None, seed: int, again: bool = False
    ) -> Iterator[Outcome]:
        """Tunes these keys, one by one; ``again`` also those that a known store has plans for."""
        if not work:
            return
        if self.builders is not None:
            self.builders.start([(item.segment, item.sizes) for item in work])
        inputs = model_inputs(self.resources.program, bucket, samples, seed, self.resources.device)
        values = self._activations(inputs, work)
        self._nan_fills_rows = self._fills_rows(inputs)
        for item in work:
            yield self._tune_one(bucket, item, values, _checked_on(samples), again)

    def _decide(
        self, bucket: Bucket, outcomes: list[Outcome], samples: Samples | None, seed: int
    ) -> tuple[list[Outcome], BucketRecord] | None:
        """As `_whole`. Plans that were taken over have no runners-up: where the whole needs those, they are
        tuned again first."""
        before = list(self.problems)
        decided = self._whole(bucket, outcomes, samples, seed)
        record = None if decided is None else decided[1]
        on_gpu = self.resources.device.type == "cuda"
        slow = on_gpu and record is not None and _is_slower(record.model_time_us, record.torch_time_us)
        reused = [outcome.work for outcome in outcomes if outcome.reused]
        if not reused or (decided is not None and not slow):
            return decided
        fresh = self._tune_each(bucket, reused, samples, seed, again=True)
        tuned = [next(fresh) if outcome.reused else outcome for outcome in outcomes]
        if any(outcome.plan is None for outcome in tuned):
            return decided
        self.problems = before
        return self._whole(bucket, tuned, samples, seed)

    def plan_untimed(self, bucket: Bucket, engine: Engine) -> list[Outcome]:
        """Builds the engine's first choice for every key, without running anything: for an absent device.

        Regions are compiled on the device alone: until they are tuned there, torch runs them.
        """
        plain = TorchEngine(torch.device("cuda"))
        outcomes: list[Outcome] = []
        for item in self.work(bucket):
            known = self._take_finished(item, False, _checked_on(None))
            outcome = (
                Outcome(bucket, item, known, reused=True)
                if known is not None
                else self._first_buildable(bucket, item, engine if item.segment.operations else plain)
            )
            outcomes.append(outcome)
            self.on_outcome(outcome)
        return self._record(bucket, outcomes, None)

    def _take_finished(self, item: Work, timed: bool, checked_on: str) -> Plan | None:
        """A plan tuned for this very program: in the staging store, or named by a bucket of a known one.

        A ``timed`` one loads here: what the server would refuse to load is not finished. Nor is one that
        is not published and was checked on generated inputs where now there are samples. Of several the
        newest counts. Afterwards it is in the staging store, from which everything is published.
        """
        best: Found | None = None
        for store in (self.store, *self.unfinished, *self.known):
            found = store.find(self.compatibility, item.key)
            if not isinstance(found, Found) or (timed and not found.plan.timed):
                continue
            if store in self.known:
                if item.key.digest() not in self._digests(store):
                    continue
            elif checked_on == "samples" != found.plan.checked_on:
                continue
            if best is not None and not found.plan.is_better_than(best.plan):
                continue
            if not (timed and isinstance(self._ready(item, _built_of(found)), str)):
                best = found
        if best is None:
            return None
        self.store.publish(self.compatibility, best.plan, best.blob)
        return best.plan

    def _ready(self, item: Work, built: BuiltPlan) -> ReadyPlan | str:
        """The plan loaded on this device, or why it cannot be."""
        engine = self._engine(built.candidate.engine)
        if engine is None:
            return f"engine {built.candidate.engine} is not available"
        try:
            return engine.load(item.segment, item.sizes, built.candidate, built.blob, built.workspace_bytes)
        except FAILURES as failure:
            return reason_of(failure, "does not load")

    def _engine(self, name: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.name == name), None)

    def _digests(self, store: PlanStore) -> set[str]:
        records = store.buckets(self.compatibility, self.resources.program.sha256)
        return {digest for record in records for digest in record.entries}

    def _recheck(self, bucket: Bucket, item: Work, judge: Judge, checked_on: str) -> Outcome | None:
        """A plan tuned for another program (a sibling version, other weights): checked again, not timed."""
        for store in self.known:
            found = store.find(self.compatibility, item.key)
            if not isinstance(found, Found) or not found.plan.timed:
                continue
            ready = self._ready(item, _built_of(found))
            error = ready if isinstance(ready, str) else _check(ready, judge)
            if isinstance(error, Errors):
                plan = replace(found.plan, error=error, torch_error=judge.torch_error, checked_on=checked_on)
                self.store.publish(self.compatibility, plan, found.blob)
                return Outcome(bucket, item, plan, reused=True)
        return None

    def _record(
        self,
        bucket: Bucket,
        outcomes: list[Outcome],
        whole: Callable[[], tuple[list[Outcome], BucketRecord] | None] | None,
    ) -> list[Outcome]:
        """Records the bucket if every key has a plan; as it was before when nothing is new about it.

        ``whole`` decides about the whole program; None for plans that nobody has timed. Gives the outcomes
        as they then are.
        """
        if self.shard is not None or not outcomes or any(outcome.plan is None for outcome in outcomes):
            return outcomes
        record = None
        if all(o.reused for o in outcomes):
            record = self._recorded(bucket, _digests_of(outcomes), timed=whole is not None)
        if record is None and whole is None:
            program = self.resources.program.sha256
            record = BucketRecord(bucket.sizes, program, _digests_of(outcomes), made_at=now_text())
        elif record is None and whole is not None:
            decided = whole()
            if decided is None:
                return outcomes
            outcomes, record = decided
        assert record is not None
        self.store.publish_bucket(self.compatibility, record)
        self.records.append(record)
        return outcomes

    def _recorded(self, bucket: Bucket, digests: tuple[str, ...], timed: bool) -> BucketRecord | None:
        for store in (self.store, *self.unfinished, *self.known):
            for record in store.buckets(self.compatibility, self.resources.program.sha256):
                same = record.bucket == bucket and record.entries == digests
                if same and (record.model_time_us is not None or not timed):
                    return record
        return None

    def _whole(
        self, bucket: Bucket, outcomes: list[Outcome], samples: Samples | None, seed: int
    ) -> tuple[list[Outcome], BucketRecord] | None:
        """Lets the whole program choose between near-equal plans, checks and times it.

        Where it is slower than torch alone, torch's own form serves every segment.
        None when its result is wrong, which is added to ``problems``.
        """
        resources, device = self.resources, self.resources.device
        engines = {engine.name: engine for engine in self.engines}
        cache = PlanCache((self.store, *self.known), self.compatibility, self.provenance, engines, device)
        sized = list(zip(resources.partition.sites, resources.segment_sizes(bucket), strict=True))
        keys = [site.segment.key(sizes, accuracy.VALIDATION) for site, sizes in sized]
        tuned = [cache.find(site.segment, sizes) for site, sizes in sized]
        plain = [cache.reference(site.segment, sizes, "") for site, sizes in sized]
        options = {key: [final.option for final in finals] for key, finals in self._finals.items()}
        chosen = whole_model.choose(resources, bucket, keys, tuned, options)
        inputs = model_inputs(resources.program, bucket, samples, seed, device)
        others = model_inputs(resources.program, bucket, None, seed + 1, device)
        served, ours, errors = whole_model.make_exact(
            resources,
            bucket,
            keys,
            chosen,
            options,
            lambda executor: whole_model.check(resources, executor, inputs, others),
        )
        alone = Executor(resources, bucket, plain, capture=True)
        if errors is not None and errors.refusal:
            self.problems.append(f"{bucket.name}: the whole program from these plans is {errors.refusal}")
            return None
        ours_us, torch_us = whole_model.times_us([ours, alone], device)
        unfused = [self._reference_option(key) for key in keys]
        if _is_slower(ours_us, torch_us) and all(unfused):
            served, ours_us = [s for s in unfused if s is not None], torch_us
            errors = None if errors is None else replace(errors, ours=errors.torch)
        final, winners = dict(zip(keys, served, strict=True)), dict(zip(keys, tuned, strict=True))
        published = {
            key: self._publish_other(key, plan)
            for key, plan in final.items()
            if plan.candidate != winners[key].candidate
        }
        outcomes = [replace(o, plan=published.get(o.work.key, o.plan)) for o in outcomes]
        record = BucketRecord(
            bucket.sizes,
            resources.program.sha256,
            _digests_of(outcomes),
            ours_us,
            torch_us,
            None if errors is None else errors.ours,
            None if errors is None else errors.torch,
            len(published),
            now_text(),
        )
        return outcomes, record

    def _reference_option(self, key: PlanKey) -> Served | None:
        finals = self._finals.get(key, ())
        return next((f.option.served for f in finals if _is_reference(f.plan.candidate)), None)

    def _publish_other(self, key: PlanKey, served: Served) -> Plan:
        """Publishes the plan that the whole program chose, as newer than the one that won alone."""
        final = next(f for f in self._finals[key] if f.plan.candidate == served.candidate)
        plan = replace(final.plan, made_at=now_text())
        self.store.publish(self.compatibility, plan, final.loaded.built.blob)
        return plan

    def _first_buildable(self, bucket: Bucket, item: Work, engine: Engine) -> Outcome:
        reasons: list[tuple[str, str]] = []
        for label, built in build_all(engine, item.segment, item.sizes):
            self.built_candidates += 1
            if isinstance(built, str):
                reasons.append((label, built))
                continue
            plan = untimed_plan(item.key, built, self.provenance, rejected=reasons)
            self.store.publish(self.compatibility, plan, built.blob)
            return Outcome(bucket, item, plan, reused=False)
        return Outcome(bucket, item, None, reused=False, reasons=tuple(reasons) or _no_candidates(engine))

    def _fills_rows(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a NaN anywhere in a row of the inputs, by three places of it, makes its outputs all NaN."""
        interpreter = Interpreter(self.resources.program, self.resources.weights, self.resources.device)
        for share in (0.0, 0.5, 1.0):
            spoiled = [with_nan(x, share) for x in inputs]
            try:
                outputs = interpreter.run(spoiled)
            except (RuntimeError, ValueError, TypeError, IndexError):  # a program that takes no NaN
                return False
            if not accuracy.fills_rows(outputs):
                return False
        return True

    def _activations(self, inputs: Sequence[torch.Tensor], work: Iterable[Work]) -> dict[str, torch.Tensor]:
        """The values that the sites of ``work`` read, from one run of the program in torch."""
        resources = self.resources
        wanted = {
            site.value(operand.name)
            for item in work
            for site in item.sites
            for operand in site.segment.inputs
            if operand.role == "input"
        }
        seen = dict(resources.weights)
        seen.update(zip((spec.value for spec in resources.program.inputs), inputs, strict=True))

        def observe(name: str, value: object) -> None:
            if name in wanted and isinstance(value, torch.Tensor):
                seen[name] = value

        Interpreter(resources.program, resources.weights, resources.device).run(inputs, observe)
        return {name: seen[name] for name in wanted}

    def _tune_one(self, bucket: Bucket, item: Work, values: Tensors, checked_on: str, again: bool) -> Outcome:
        rejected: list[tuple[str, str]] = []
        operand_sets = [self._operands(site, values) for site in item.sites]
        seed = int(item.key.digest()[:6], 16)
        judge = Judge(item.segment, item.sizes, operand_sets, seed, self._nan_fills_rows)
        rechecked = None if again else self._recheck(bucket, item, judge, checked_on)
        if rechecked is not None:
            return rechecked
        loaded = self._loaded(item, rejected)
        timings = self._time(item, loaded, operand_sets[0], judge, rejected)
        if not timings:
            reasons = rejected or [pair for engine in self.engines for pair in _no_candidates(engine)]
            return Outcome(bucket, item, None, reused=False, reasons=tuple(reasons))
        finals = sorted((p for p in timings if p[1].final), key=lambda pair: pair[1].median_us)
        torch_us = [timing.median_us for c, timing in finals if _is_reference(c.built.candidate)]
        self._finals[item.key] = [
            _Final(
                replace(
                    untimed_plan(item.key, loaded.built, self.provenance, checked_on, rejected),
                    timed=True,
                    time_us=timing.median_us,
                    spread_us=timing.spread_us,
                    torch_time_us=torch_us[0] if torch_us else None,
                    error=loaded.error,
                    torch_error=judge.torch_error,
                    sampled=judge.sampled,
                    candidates_timed=len(timings),
                ),
                loaded,
            )
            for loaded, timing in _options(finals)
        ]
        winner = self._finals[item.key][0]
        self.store.publish(self.compatibility, winner.plan, winner.loaded.built.blob)
        return Outcome(bucket, item, winner.plan, reused=False)

    def _loaded(self, item: Work, rejected: list[tuple[str, str]]) -> list[_Loaded]:
        """Every candidate of every engine that can be built and loaded; the others go to ``rejected``."""
        loaded: list[_Loaded] = []
        for engine in self.engines:
            loaded += self._load_each(item, self._built(engine, item), rejected)
        return loaded

    def _load_each(
        self, item: Work, candidates: Iterable[Built], rejected: list[tuple[str, str]]
    ) -> Iterator[_Loaded]:
        for label, built in candidates:
            self.built_candidates += 1
            ready = built if isinstance(built, str) else self._ready(item, built)
            if isinstance(built, str) or isinstance(ready, str):
                rejected.append((label, str(ready)))
            else:
                yield _Loaded(built, ready)

    def _neighbours(
        self, item: Work, near: _Loaded, known: Sequence[_Loaded], rejected: list[tuple[str, str]]
    ) -> list[_Loaded]:
        """What else its engine has near a candidate; not what is known or rejected."""
        candidate = near.built.candidate
        engine = self._engine(candidate.engine)
        if not isinstance(engine, Searching):
            return []
        tried = {other.built.candidate.label() for other in known} | {label for label, _ in rejected}
        found = engine.neighbours(item.segment, item.sizes, candidate)
        new = [neighbour for neighbour in found if neighbour.label() not in tried]
        return list(self._load_each(item, build_each(engine, item.segment, item.sizes, new), rejected))

    def _built(self, engine: Engine, item: Work) -> Iterable[Built]:
        """Labels of candidates with what was built of them, or why nothing was."""
        if self.builders is not None and self.builders.builds_for(engine):
            return self.builders.built(engine.name, item.segment, item.sizes)
        return build_all(engine, item.segment, item.sizes)

    def _operands(self, site: SegmentSite, values: Tensors) -> dict[str, torch.Tensor]:
        operands = site_weights(site, self.resources.weights)
        for operand in site.segment.inputs:
            if operand.role == "input":
                operands[operand.name] = to_layout(values[site.value(operand.name)], operand.layout)
        return operands

    def _time(
        self,
        item: Work,
        loaded: list[_Loaded],
        operands: Tensors,
        judge: Judge,
        rejected: list[tuple[str, str]],
    ) -> list[tuple[_Loaded, Timing]]:
        """Candidates with their times, without those that fail a check or meanwhile: they go to ``rejected``.

        Where there are few, all are checked before they are timed; of many only the fastest are checked.
        """

        def accept(candidate: _Loaded) -> bool:
            if candidate.error is None:
                verdict = _check(candidate.ready, judge)
                if isinstance(verdict, str):
                    rejected.append((candidate.built.candidate.label(), verdict))
                    return False
                candidate.error = verdict
            return True

        if len(loaded) <= FINALISTS:
            loaded = [candidate for candidate in loaded if accept(candidate)]
        if not loaded:
            return []
        device = self.resources.device
        keep = [index for index, c in enumerate(loaded) if _is_reference(c.built.candidate)]

        def runs_of(candidates: Sequence[_Loaded]) -> list[Callable[[], object]]:
            self.timed_candidates += len(candidates)
            workspace_bytes = max((candidate.ready.workspace_bytes for candidate in candidates), default=0)
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
            return [_timed_run(candidate.ready, operands, workspace) for candidate in candidates]

        def reject(index: int, failure: Exception) -> None:
            reason = reason_of(failure, "fails when run again and again")
            rejected.append((loaded[index].built.candidate.label(), reason))

        def near(index: int) -> list[Callable[[], object]]:
            found = self._neighbours(item, loaded[index], loaded, rejected)
            loaded.extend(found)
            return runs_of(found)

        timings = time_interleaved(
            runs_of(loaded), device, keep, reject, lambda index: accept(loaded[index]), near
        )
        return [(loaded[index], timing) for index, timing in timings.items()]


def _options(finals: Sequence[tuple[_Loaded, Timing]]) -> Sequence[tuple[_Loaded, Timing]]:
    """Of finals, fastest first, those between which the whole program decides: the fastest, the most exact of
    the others, and torch's own form."""
    fastest, others = finals[:OPTIONS], finals[OPTIONS:]
    most_exact = min(others, key=lambda pair: pair[0].error.rms if pair[0].error else math.inf, default=None)
    return [*fastest, *(p for p in others if p is most_exact or _is_reference(p[0].built.candidate))]


def _is_slower(ours_us: float | None, torch_us: float | None) -> bool:
    """Whether a whole program is slower than torch alone, beyond what repeated timing gives."""
    return ours_us is not None and torch_us is not None and ours_us * whole_model.GAIN > torch_us


def _checked_on(samples: Samples | None) -> str:
    return "samples" if samples else "generated"


def _digests_of(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return tuple(outcome.work.key.digest() for outcome in outcomes)


def _built_of(found: Found) -> BuiltPlan:
    return BuiltPlan(found.plan.candidate, found.blob, found.plan.workspace_bytes)


def _check(ready: ReadyPlan, judge: Judge) -> Errors | str:
    try:
        return judge.check(ready)
    except FAILURES as failure:
        return reason_of(failure, "does not run")


def untimed_plan(
    key: PlanKey,
    built: BuiltPlan,
    provenance: Provenance,
    checked_on: str = "none",
    rejected: Sequence[tuple[str, str]] = (),
) -> Plan:
    """The record of a plan that was built; nothing has been measured of it yet."""
    return Plan(
        key=key,
        candidate=built.candidate,
        workspace_bytes=built.workspace_bytes,
        timed=False,
        time_us=None,
        spread_us=None,
        torch_time_us=None,
        error=None,
        torch_error=None,
        checked_on=checked_on,
        sampled=None,
        candidates_timed=0,
        rejected=tuple(rejected),
        behavior_notes=built.behavior_notes,
        selected_engine=built.selected_engine,
        blob_sha256=None if built.blob is None else sha256_hex(built.blob),
        made_at=now_text(),
        provenance=provenance.to_json(),
    )


def model_inputs(
    program: Program, bucket: Bucket, samples: Samples | None, seed: int, device: torch.device
) -> list[torch.Tensor]:
    """Inputs at a bucket's sizes: rows of the samples, repeated as needed, or generated ones.

    Generated floating inputs are normal, integers and booleans 0 or 1. Raises ValueError when a sample is
    missing or does not fit.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: list[torch.Tensor] = []
    for spec in program.inputs:
        dims, dtype = input_dims(spec.shape, bucket), getattr(torch, spec.dtype)
        if samples is not None:
            inputs.append(_sample_rows(spec.name, samples, dims).to(device=device, dtype=dtype))
        elif dtype.is_floating_point:
            inputs.append(torch.randn(dims, generator=generator).to(device=device, dtype=dtype))
        else:
            inputs.append(torch.randint(0, 2, dims, generator=generator).to(device=device, dtype=dtype))
    return inputs


def require_samples_fit(program: Program, buckets: Sequence[Bucket], samples: Samples) -> None:
    """Raises ValueError when samples are missing or do not fit one of the buckets."""
    for bucket in buckets:
        for spec in program.inputs:
            _sample_rows(spec.name, samples, input_dims(spec.shape, bucket))


def with_nan(x: torch.Tensor, share: float) -> torch.Tensor:
    """A copy with a NaN at this share of its first row; integers as they are."""
    if not x.is_floating_point() or not x.dim() or not x.numel():
        return x
    spoiled = x.clone(memory_format=torch.contiguous_format)
    row = spoiled[0].view(-1)
    row[round(share * (row.numel() - 1))] = math.nan
    return spoiled


def _sample_rows(name: str, samples: Samples, dims: tuple[int, ...]) -> torch.Tensor:
    if name not in samples:
        raise ValueError(f"the samples hold no array for input {name!r}; they hold {sorted(samples)}")
    array = samples[name]
    if not dims and not array.dim():
        return array
    if array.dim() != len(dims) or tuple(array.shape[1:]) != dims[1:] or array.shape[0] == 0:
        raise ValueError(
            f"samples for input {name!r} have dims {list(array.shape)}; expected one row or more of "
            f"{list(dims[1:])}, as in {list(dims)}"
        )
    repeats = math.ceil(dims[0] / array.shape[0])
    return torch.cat([array] * repeats)[: dims[0]]


def _timed_run(ready: ReadyPlan, operands: Tensors, workspace: torch.Tensor) -> Callable[[], object]:
    if isinstance(ready, Preparing):
        operands = ready.prepare(operands)
    return lambda: ready.run(operands, workspace)


def _is_reference(candidate: Candidate) -> bool:
    return candidate.engine == "torch" and candidate.form == REFERENCE_FORM


def _no_candidates(engine: Engine) -> tuple[tuple[str, str], ...]:
    return ((engine.name, "supports no form of this segment"),)
