"""Shows what is tuned in a model directory, and why a shape is served as it is; keeps plans in order.

python tools/plans.py list model_repository/conv_block
python tools/plans.py why model_repository/conv_block --sizes batch=3 --target h200
python tools/plans.py report model_repository/conv_block
python tools/plans.py verify model_repository/conv_block
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cudnn_fusion import devices
from cudnn_fusion.environment import (
    Compatibility,
    cpu_compatibility,
    cuda_compatibility,
    current_provenance,
    target_compatibility,
)
from cudnn_fusion.lowered import ProgramError
from cudnn_fusion.plan import Plan
from cudnn_fusion.plan_check import check_plans
from cudnn_fusion.preflight import CudnnLoadError, GpuUnavailableError, cudnn_version
from cudnn_fusion.pretuning import PretuneError, latest_version
from cudnn_fusion.report import EnvironmentReport, ModelReport, ReportError, ShapeAnswer, TunedPlan
from cudnn_fusion.settings import MAX_DIGITS
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.store_upkeep import PlanStoreError, StoreKeeper, UpkeepError, differences
from cudnn_fusion.terminal import age, in_words, number, print_table, say
from cudnn_fusion.trust import Signer, TrustError, Verifier, make_key

MIB = 2**20
NOISE = 1.05
"""A whole program is called slower than torch from so many times its time on."""

EXPECTED_ERRORS = (
    ReportError,
    UpkeepError,
    TrustError,
    PlanStoreError,
    ProgramError,
    PretuneError,
    devices.DeviceDescriptionError,
    CudnnLoadError,
    GpuUnavailableError,
    PermissionError,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

ModelDirectory = Annotated[Path, typer.Argument(help="Directory of an exported model.")]
Store = Annotated[
    Path, typer.Argument(help="Directory of an exported model (its newest version), or one of plans.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command("list")
def list_plans(model_directory: ModelDirectory, as_json: AsJson = False) -> None:
    """What is tuned, for which environment, how much faster than torch, with what error."""
    with in_words(*EXPECTED_ERRORS):
        report = ModelReport(latest_version(model_directory))
        environments = report.environments()
        if as_json:
            print(json.dumps([environment_json(e) for e in environments], indent=1))
            return
        if not environments:
            say(f"0 plans: {report.store.root} holds none; run tools/pretune.py {model_directory}")
        for environment in environments:
            print_environment(environment)


@app.command()
def why(
    model_directory: ModelDirectory,
    sizes: Annotated[str, typer.Option(help="Sizes of a request: batch=3,height=224.")] = "",
    target: Annotated[
        str | None, typer.Option(help="Answer for this described GPU, not this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """For a shape: which bucket and which plans would serve it here, and why not better ones."""
    with in_words(*EXPECTED_ERRORS):
        report = ModelReport(latest_version(model_directory))
        here = environment_here(target)
        bucket = parse_sizes(sizes) if sizes else smallest(report)
        answer = report.answer(bucket, here, None if target else current_provenance(here.kind))
        if as_json:
            print(json.dumps(asdict(answer), indent=1, default=str))
            return
        say(f"{'target' if target else 'here'}: {here.label()} ({here.hash()})")
        if not sizes and bucket.sizes:
            example = ",".join(f"{name}=..." for name, _ in bucket.sizes)
            say(f"for the smallest request; for another: --sizes {example}")
        print_answer(bucket, answer)
        print_left(report, here.kind)
        if any(item.origin != "exact" for item in answer.segments):
            say(f"to tune this shape: python tools/pretune.py {model_directory}{buckets_option(answer)}")


@app.command("report")
def report_fusion(model_directory: ModelDirectory, as_json: AsJson = False) -> None:
    """What is fused, what is left to torch, and why."""
    with in_words(*EXPECTED_ERRORS):
        report = ModelReport(latest_version(model_directory))
        if as_json:
            fused = [
                {"name": s.name, "segment": s.segment.describe(), "covers": sorted(s.covers)}
                for s in report.fused()
            ]
            print(json.dumps({"fused": fused, "left": [asdict(item) for item in report.left()]}, indent=1))
            return
        rows = [[s.name, s.segment.describe(), str(len(s.covers))] for s in report.fused()]
        print_table(["layer", "fused as", "operations"], rows)
        print_left(report)
        for note in report.program.notes:
            say(f"- {note}")


@app.command()
def verify(
    store: Store,
    files_only: Annotated[bool, typer.Option(help="Load and run nothing, of any environment.")] = False,
    public_key: Annotated[str, typer.Option(help="Plans must be signed by the owner of this key.")] = "",
) -> None:
    """Every file's checksum and key; for a model, each plan for this machine loaded and its outputs compared.

    Ends with 1 if something is not as it was published.
    """
    with in_words(*EXPECTED_ERRORS):
        keeper = keeper_of(store)
        keeper.verifier = Verifier(public_key) if public_key else None
        problems = list(keeper.problems())
        plans = sum(len(keeper.plans(e.hash)) for e in keeper.environments())
        say(f"{keeper.root}: {plans} plans, {len(problems)} problems in its files")
        for problem in problems:
            say(f"{problem.path}: {problem.reason}")
        refused = 0
        if not files_only and is_model(store):
            device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
            checked = list(check_plans(latest_version(store), device))
            rows = [[c.bucket.name, c.site, c.origin, c.reason] for c in checked if c.origin != "exact"]
            refused = len(rows)
            say(f"on this machine: {len(checked)} layers x buckets, {refused} not served by the stored plan")
            if not checked:
                say(f"nothing is tuned for this machine; run tools/pretune.py {store}")
            if rows:
                print_table(["bucket", "layer", "origin", "why"], rows)
        if problems or refused:
            raise typer.Exit(1)


@app.command()
def diff(first: Store, second: Store) -> None:
    """Plans that one of two stores has alone, or for which they chose differently."""
    with in_words(*EXPECTED_ERRORS):
        found = differences(keeper_of(first), keeper_of(second))
        for environment in dict.fromkeys(d.environment for d in found):
            here = [d for d in found if d.environment == environment]
            say(f"{environment}: {here[0].label}")
            rows = [[d.key[:12], *described(d.first), *described(d.second)] for d in here]
            print_table(["key", str(first), "us", str(second), "us"], rows)
        say(f"{len(found)} differences")


@app.command()
def merge(into: Store, source: Store) -> None:
    """Takes into the first store what the second has that is missing there, or newer.

    A timed plan is never replaced by an untimed one.
    """
    with in_words(*EXPECTED_ERRORS):
        keeper, other = keeper_of(into), keeper_of(source)
        say(f"{keeper.merge_from(other)} plans taken into {keeper.root}")


@app.command()
def promote(
    overlay: Annotated[Path, typer.Argument(help="The directory that PLAN_OVERLAY names.")],
    model_directory: Annotated[Path, typer.Argument(help="Directory of the exported model.")],
) -> None:
    """Brings what servers have tuned into an overlay into the model's directory, for the next rollout."""
    with in_words(*EXPECTED_ERRORS):
        if not is_model(model_directory):
            raise UpkeepError(
                f"{model_directory} holds no exported model; give the directory that is rolled out"
            )
        keeper, other = keeper_of(model_directory), keeper_of(overlay)
        say(f"{keeper.merge_from(other)} plans promoted to {keeper.root}")


@app.command()
def gc(
    store: Store,
    unseen_days: Annotated[
        int,
        typer.Option(min=1, max=36500, help="Environments in which nothing was tuned for so many days go."),
    ] = 180,
    remove: Annotated[bool, typer.Option(help="Remove it; else it is only listed.")] = False,
) -> None:
    """Environments that have not been tuned for long, and files that no plan names."""
    with in_words(*EXPECTED_ERRORS):
        keeper = keeper_of(store)
        here = cuda_compatibility(0) if torch.cuda.is_available() else cpu_compatibility()
        found = keeper.leftovers(timedelta(days=unseen_days), datetime.now(UTC), keep=here)
        print_table(["left over", "MiB", "because"], [[str(f.path), mib(f.bytes), f.reason] for f in found])
        if remove:
            for leftover in found:
                keeper.remove(leftover)
        total = mib(sum(f.bytes for f in found))
        say(f"{len(found)} left over, {total} MiB{': removed' if remove else '; --remove removes them'}")


@app.command()
def keygen(
    private_key: Annotated[Path, typer.Argument(help="The file to write; keep it to yourself.")],
) -> None:
    """Makes a key to sign plans with, and prints the public one, for PLAN_PUBLIC_KEY in config.pbtxt."""
    with in_words(*EXPECTED_ERRORS):
        say(make_key(private_key))


@app.command()
def sign(
    store: Store, key: Annotated[Path, typer.Option(help="The private key, as keygen has written it.")]
) -> None:
    """Signs every plan of a store. What is tuned afterwards is unsigned until this has run again."""
    with in_words(*EXPECTED_ERRORS):
        keeper, signer = keeper_of(store), Signer(key)
        say(f"{keeper.sign(signer)} plans of {keeper.root} signed; public key {signer.public_key}")


@app.command("export")
def export_plans(
    store: Store, archive: Annotated[Path, typer.Argument(help="The file to write, as plans.tar.gz.")]
) -> None:
    """All plans of a store in one file, to carry them to another machine."""
    with in_words(*EXPECTED_ERRORS):
        say(f"{keeper_of(store).export(archive)} plans written to {archive}")


@app.command("import")
def import_plans(
    store: Store, archive: Annotated[Path, typer.Argument(help="A file that export has written.")]
) -> None:
    """Takes the plans of such a file into a store, as merge does. Trust it as you trust the model."""
    with in_words(*EXPECTED_ERRORS):
        keeper = keeper_of(store)
        say(f"{keeper.import_from(archive)} plans taken into {keeper.root}")


def print_environment(environment: EnvironmentReport) -> None:
    """One environment's plans and buckets as tables."""
    if environment.compatibility is None:
        say(f"{environment.hash}: not usable: {environment.problem}")
        return
    timed = sum(tuned.plan.timed for tuned in environment.plans)
    count = f"{len(environment.plans)} plans ({timed} timed)"
    say(f"{environment.hash}: {environment.compatibility.label()}: {count}")
    columns = "buckets, layers, segment, winner, us, torch us, speed-up, error, checked on, age, note"
    now = datetime.now(UTC)
    print_table(columns.split(", "), [plan_row(tuned, now) for tuned in environment.plans])
    for record in environment.buckets:
        times = (
            f"model {number(record.model_time_us, '.1f')} us, torch {number(record.torch_time_us, '.1f')} us"
        )
        errors = ""
        if record.error is not None and record.torch_error is not None:
            errors = f", error {record.error.rms:.1e}, torch's {record.torch_error.rms:.1e}"
        ours_us, torch_us = record.model_time_us, record.torch_time_us
        slower = ours_us is not None and torch_us is not None and ours_us > NOISE * torch_us
        note = ": as a whole slower than torch, tune again with --force" if slower else ""
        say(f"  bucket {record.bucket.name}: {len(record.entries)} segments, {times}{errors}{note}")


def plan_row(tuned: TunedPlan, now: datetime) -> list[str]:
    """A plan in the columns of `print_environment`."""
    plan = tuned.plan
    return [
        " ".join(bucket.name for bucket in tuned.buckets) or "(another program)",
        " ".join(tuned.sites),
        tuned.segment,
        plan.candidate.label(),
        number(plan.time_us, ".1f"),
        number(plan.torch_time_us, ".1f"),
        number(tuned.speed_up, ".2f"),
        number(plan.error.rms if plan.error else None, ".1e"),
        plan.checked_on,
        age(plan.made_at, now),
        tuned.hint,
    ]


def print_answer(request: Bucket, answer: ShapeAnswer) -> None:
    """The bucket that would serve, and a row for each of its segments."""
    parts = ", ".join(f"{part.rows} rows in {part.bucket.name}" for part in answer.choice.parts)
    tuned = " ".join(bucket.name for bucket in answer.tuned) or "none"
    how = parts if answer.choice.kind != "none" else "no tuned bucket fits, runs at its own sizes"
    say(f"{request.name}: {answer.choice.kind}: {how}; tuned buckets: {tuned}")
    rows = []
    for item in answer.segments:
        plan = item.plan.candidate.label() if item.plan else "-"
        stale = f"stale: {'; '.join(item.stale)}" if item.stale else ""
        note = "; ".join(part for part in (item.hint, stale) if part)
        rows.append([item.bucket.name, item.site, item.segment, item.origin, plan, item.why_not_better, note])
    print_table(["bucket", "layer", "segment", "origin", "plan", "why not better", "note"], rows)


def buckets_option(answer: ShapeAnswer) -> str:
    """What to tell tools/pretune.py so that it tunes the buckets that the request runs in."""
    buckets = dict.fromkeys(part.bucket for part in answer.choice.parts if part.bucket.sizes)
    return f" --buckets '{';'.join(bucket.name for bucket in buckets)}'" if buckets else ""


def print_left(report: ModelReport, kind: str = "cpu") -> None:
    """The operations that no plan covers."""
    rows = [[item.node, item.op, item.reason] for item in report.left(kind)]
    if rows:
        print_table(["left to torch", "operation", "because"], rows)
    else:
        say("nothing is left to torch: every operation is part of a segment")


def environment_json(environment: EnvironmentReport) -> dict[str, Any]:
    """One environment, JSON-ready; without sampled outputs, which are long."""
    plans = []
    for tuned in environment.plans:
        plan = tuned.plan.to_json()
        plan.pop("sampled", None)
        names = [bucket.name for bucket in tuned.buckets]
        uses = {"buckets": names, "layers": tuned.sites, "segment": tuned.segment}
        plans.append({**plan, **uses, "speed_up": tuned.speed_up, "hint": tuned.hint})
    return {
        "environment": environment.hash,
        "compatibility": environment.compatibility and environment.compatibility.to_json(),
        "problem": environment.problem,
        "plans": plans,
        "buckets": [record.to_json() for record in environment.buckets],
    }


def environment_here(target: str | None) -> Compatibility:
    """This machine's environment, or the target's with this machine's cuDNN."""
    if target is not None:
        return target_compatibility(devices.load(target), cudnn_version())
    return cuda_compatibility(0) if torch.cuda.is_available() else cpu_compatibility()


def parse_sizes(text: str) -> Bucket:
    """``batch=3,height=224``. Raises ReportError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not name.strip() or not value.strip().isdecimal() or len(value) > MAX_DIGITS:
            raise ReportError(f"--sizes {text!r}: write AXIS=NUMBER,..., as in batch=3,height=224")
        if name.strip() in sizes:
            raise ReportError(f"--sizes {text!r}: {name.strip()} is given twice; give each axis one size")
        sizes[name.strip()] = int(value)
    return Bucket.of(sizes)


def smallest(report: ModelReport) -> Bucket:
    """Every axis at its minimum."""
    return Bucket.of({axis.name: axis.minimum for axis in report.program.axes})


def is_model(directory: Path) -> bool:
    """Whether it holds an exported model."""
    try:
        latest_version(directory)
    except PretuneError:
        return False
    return True


def keeper_of(directory: Path) -> StoreKeeper:
    """The store of a model's newest version, or the directory itself. Raises UpkeepError."""
    if is_model(directory):
        return StoreKeeper(latest_version(directory) / "plans")
    if not directory.is_dir():
        raise UpkeepError(f"{directory} is not a directory; give that of a model or one of plans")
    if any(not re.fullmatch(r"[0-9a-f]{16}|\..*", path.name) for path in directory.iterdir()):
        raise UpkeepError(f"{directory} holds neither a model nor only plans; give one that does")
    return StoreKeeper(directory)


def described(plan: Plan | None) -> tuple[str, str]:
    """A plan's label and time."""
    return ("-", "-") if plan is None else (plan.candidate.label(), number(plan.time_us, ".1f"))


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / MIB:.1f}"


if __name__ == "__main__":
    app()
