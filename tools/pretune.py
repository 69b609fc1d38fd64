"""Tune a model's plans on this machine's device and put them into its directory, before rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cudnn_fusion.cpu_threads import let_threads_sleep
from cudnn_fusion.interrupts import end_at_once, raise_once

let_threads_sleep()
if __name__ == "__main__":
    end_at_once()  # An import that is interrupted can swallow a KeyboardInterrupt.

# ruff: noqa: E402
import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cudnn_fusion.plan_store import PlanStoreError
from cudnn_fusion.pretuning import (
    PretuneError,
    Pretuning,
    Result,
    load_samples,
    parse_buckets,
    parse_shard,
)
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.tuner import Outcome

console = Console(soft_wrap=True)
TABLE_WIDTH = 150
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model_directory: Annotated[Path, typer.Argument(help="Directory of an exported model.")],
    device: Annotated[
        int | None, typer.Option(help="GPU to tune on; default: 0, and without a GPU the CPU.")
    ] = None,
    buckets: Annotated[
        str, typer.Option(help="Batch sizes (1,8,64) or sizes of all axes ('batch=8,height=224;...').")
    ] = "",
    samples: Annotated[
        Path | None,
        typer.Option(
            help=".npz with real inputs by name: plans are checked on what layers see; those tuned before "
            "only with --force."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Plan for a described GPU (h200, or a .json) that is not here, untimed."),
    ] = None,
    staging: Annotated[
        Path | None, typer.Option(help="Where finished plans wait until all are; default: the user's cache.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Tune again what is tuned.")] = False,
    shard: Annotated[
        str,
        typer.Option(
            help="NUMBER/COUNT: tune only this part, as one of several machines. Then bring their plans "
            "together with plans.py merge, and run once without it: nothing is tuned twice."
        ),
    ] = "",
) -> None:
    """Enumerates, builds, checks and times candidates for every segment and bucket, and publishes winners."""
    pretuning: Pretuning | None = None
    try:
        place = _device(device)
        part = parse_shard(shard) if shard else None
        pretuning = Pretuning.open(model_directory, place, target, staging, force, part)
        wanted = parse_buckets(buckets, pretuning.program)
        arrays = None if samples is None else load_samples(samples)
        result = _run(pretuning, wanted, arrays, named=bool(buckets))
    except (PretuneError, PlanStoreError, ValueError) as error:
        console.print(f"[red]not tuned:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        kept = "" if pretuning is None else f"; finished plans are kept in {pretuning.staging.directory}"
        console.print(f"interrupted{escape(kept)}: run the same command again to go on", highlight=False)
        raise typer.Exit(130) from None
    finally:
        if pretuning is not None:
            pretuning.close()
    _print(result)
    if part is not None:
        console.print(
            f"part {part.number} of {part.count}: buckets are served once all parts are together and this "
            "has run without --shard"
        )
    if not result.complete:
        _print_failures(result)
        raise typer.Exit(1)


def _device(index: int | None) -> torch.device:
    """Raises PretuneError for a GPU that was asked for and is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is not None and index >= count:
        raise PretuneError(f"--device {index}: torch sees {count} GPUs; leave it out to tune the CPU")
    return torch.device("cuda", index or 0) if count else torch.device("cpu")


def _run(
    pretuning: Pretuning, buckets: list[Bucket], arrays: dict[str, torch.Tensor] | None, *, named: bool
) -> Result:
    tuner = pretuning.tuner
    total = sum(len(tuner.work(bucket)) for bucket in buckets)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console.print(
        f"{pretuning.version_directory}: {pretuning.program.precision}, {tuner.compatibility.label()}, "
        f"buckets {' '.join(b.name for b in buckets)}",
        highlight=False,
        markup=False,
    )
    others = [axis for axis in pretuning.program.axes if axis.name != pretuning.program.batch_axis]
    if not named and others:
        console.print(
            f"of {', '.join(axis.name for axis in others)} only the largest size is tuned: name others with "
            "--buckets"
        )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("segments x buckets", total=total)

        def finished(outcome: Outcome) -> None:
            progress.update(
                task, advance=1, description=f"{outcome.bucket.name} {outcome.work.sites[0].name}"
            )

        return pretuning.run(buckets, arrays, finished)


def _print(result: Result) -> None:
    columns = (
        "bucket",
        "segment",
        "winner",
        "us",
        "+- us",
        "torch us",
        "speed-up",
        "error",
        "timed",
        "rejected",
    )
    table = Table(*columns, box=box.SIMPLE)
    for outcome in result.outcomes:
        plan = outcome.plan
        if plan is None:
            continue
        ratio = plan.torch_time_us / plan.time_us if plan.torch_time_us and plan.time_us else None
        table.add_row(
            outcome.bucket.name,
            f"{outcome.work.sites[0].name} x{len(outcome.work.sites)}",
            plan.candidate.label(),
            *(
                f"{v:.1f}" if v is not None else "-"
                for v in (plan.time_us, plan.spread_us, plan.torch_time_us)
            ),
            f"{ratio:.2f}" if ratio else "-",
            f"{plan.error.rms:.1e}" if plan.error else "-",
            "before" if outcome.reused else str(plan.candidates_timed),
            str(len(plan.rejected)),
        )
    # Wide enough for every column, also where the output goes to a file.
    Console(width=max(console.width, TABLE_WIDTH)).print(table)
    console.print(
        f"{result.tuned} of {len(result.outcomes)} segments x buckets have a plan; candidates built "
        f"{result.built_candidates}, timed {result.timed_candidates}; plans published {result.published}",
        highlight=False,
    )


def _print_failures(result: Result) -> None:
    for problem in result.problems:
        console.print(f"[red]not recorded:[/red] {escape(problem)}", highlight=False)
    for outcome in result.outcomes:
        if outcome.plan is None:
            console.print(
                f"[red]no plan[/red] for {outcome.work.sites[0].name} at {outcome.bucket.name}:",
                highlight=False,
            )
            for label, reason in outcome.reasons[:10]:
                console.print(escape(f"  {label}: {reason}"), highlight=False)


if __name__ == "__main__":
    raise_once()
    app()
