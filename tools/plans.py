"""Shows what is tuned in a model directory, and why a shape is served as it is.

python tools/plans.py list model_repository/conv_block
python tools/plans.py why model_repository/conv_block --sizes batch=3 --target h200
python tools/plans.py report model_repository/conv_block
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cudnn_fusion import devices
from cudnn_fusion.environment import (
    Compatibility,
    cpu_compatibility,
    cuda_compatibility,
    current_provenance,
    target_compatibility,
)
from cudnn_fusion.plan import moment
from cudnn_fusion.preflight import CudnnLoadError, GpuUnavailableError, cudnn_version
from cudnn_fusion.pretuning import PretuneError, latest_version
from cudnn_fusion.report import EnvironmentReport, ModelReport, ReportError, ShapeAnswer, TunedPlan
from cudnn_fusion.settings import MAX_DIGITS
from cudnn_fusion.shapes import Bucket

NOISE = 1.05
"""A whole program is called slower than torch from so many times its time on."""

EXPECTED_ERRORS = (
    ReportError,
    PretuneError,
    devices.DeviceDescriptionError,
    CudnnLoadError,
    GpuUnavailableError,
    PermissionError,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
WIDE = Console(highlight=False, width=max(console.width, 150))

ModelDirectory = Annotated[Path, typer.Argument(help="Directory of an exported model.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.command("list")
def list_plans(model_directory: ModelDirectory, as_json: AsJson = False) -> None:
    """What is tuned, for which environment, how much faster than torch, with what error."""
    with errors_in_words():
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
    with errors_in_words():
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
    with errors_in_words():
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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells are text as it is, never rich's markup."""
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    WIDE.print(table)


def say(text: str) -> None:
    """A line that is not wrapped, so that commands and paths in it can be copied."""
    console.print(text, markup=False, soft_wrap=True)


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


def number(value: float | None, form: str) -> str:
    """The number, or a dash where it was not measured."""
    return "-" if value is None else format(value, form)


def age(made_at: str, now: datetime) -> str:
    """How long ago, in the largest whole unit: ``3 d``, ``5 h``, ``0 min``; a dash where it is not known."""
    if not made_at:
        return "-"
    minutes = max(0, int((now - moment(made_at)).total_seconds() // 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // (24 * 60)} d"


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Expected errors as a sentence and exit code 1."""
    try:
        yield
    except EXPECTED_ERRORS as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
