"""Convolutional networks on a GPU: torch eager, torch.compile and tuned plans, timed in one run.

    python benchmarks/cnn.py --output benchmarks/results/h200-2026-12-02-cnn.json

Every column is the replay of one CUDA graph of the whole network, and all columns of a row are replayed in
turn, so that clocks and neighbours meet them alike; each network has a process of its own. The baselines get
what ours gets: batch norm folded, inference mode, the row's precision, channels-last, static shapes, a CUDA
graph; eager with cudnn.benchmark, torch.compile with inductor's freezing (constant folding of weights), its
code captured in a CUDA graph like ours (which is what mode "reduce-overhead" does, without that mode's copies
of inputs). Inputs lie in each column's own buffer, as that column wants them, before it is timed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.floor import floor_us
from benchmarks.machine import gpu_environment
from benchmarks.networks import NETWORKS, Network
from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.engines.torch_eager import configure
from cudnn_fusion.instance import LOWERED, Clock, Instance
from cudnn_fusion.pretuning import Pretuning
from cudnn_fusion.program import export_program
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Bucket

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 30
REPLAYS = 10
TYPES = {"fp16": "FP16", "bf16": "BF16", "fp32": "FP32", "tf32": "FP32"}


@dataclass
class Row:
    """One line of the result; None where not measured. Times are of one whole run, microseconds."""

    model: str
    batch: int
    precision: str
    eager_us: float | None = None
    compile_us: float | None = None
    compile_mode: str | None = None
    compile_s: float | None = None
    reduce_overhead_us: float | None = None
    max_autotune_us: float | None = None
    max_autotune_compile_s: float | None = None
    ours_us: float | None = None
    floor_us: float | None = None
    ours_error: float | None = None
    eager_error: float | None = None
    first_answer_s: float | None = None
    first_answer_parts_s: Mapping[str, float] | None = None
    sequence: int | None = None
    spread_us: Mapping[str, float] | None = None
    tuning_s: float | None = None
    candidates_timed: int | None = None
    load_s: float | None = None
    executor_mib: float | None = None
    segments_us: float | None = None
    cudnn_us: float | None = None
    segments: list[Mapping[str, Any]] | None = None


def main(
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    models: Annotated[str, typer.Option(help="Names, comma-separated.")] = ",".join(NETWORKS),
    precisions: Annotated[str, typer.Option(help="fp16, bf16, tf32, fp32; comma-separated.")] = "fp16",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32",
    compile: Annotated[bool, typer.Option(help="Measure torch.compile.")] = True,
    max_autotune: Annotated[
        str, typer.Option(help="model:batch pairs, comma-separated, for which mode max-autotune is measured.")
    ] = "",
) -> None:
    """Measures each network, precision and batch; writes the file anew after each row."""
    result: dict[str, Any] = {"command": shlex.join(sys.argv), "environment": gpu_environment(), "rows": []}
    autotuned = {tuple(pair.split(":")) for pair in max_autotune.split(",") if pair}
    sizes = [int(batch) for batch in batches.split(",")]
    for name in models.split(","):
        for precision in precisions.split(","):
            thorough = [batch for batch in sizes if (name, str(batch)) in autotuned]
            for row in rows_of_child(name, precision, sizes, compile, thorough):
                result["rows"].append(row)
                output.write_text(json.dumps(result, indent=1) + "\n")
                print({key: value for key, value in row.items() if key != "segments"}, flush=True)
    print_table(result["rows"])


def rows_of_child(
    name: str, precision: str, batches: list[int], with_compile: bool, thorough: list[int]
) -> Iterator[dict[str, Any]]:
    """The rows of one network, as a process of its own finishes them. A row lost with it is printed."""
    context = multiprocessing.get_context("spawn")
    rows: multiprocessing.Queue[dict[str, Any] | None] = context.Queue()
    child = context.Process(target=measure, args=(name, precision, batches, with_compile, thorough, rows))
    child.start()
    while True:
        try:
            row = rows.get(timeout=1)
        except queue.Empty:
            if child.is_alive():
                continue
            print(f"{name} {precision}: the process ended with code {child.exitcode}", flush=True)
            return
        if row is None:
            child.join()
            return
        yield row


def measure(
    name: str,
    precision: str,
    batches: list[int],
    with_compile: bool,
    thorough: list[int],
    rows: Any,
) -> None:
    """All batches of one network in one precision, into the queue ``rows``; None ends them."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    network = NETWORKS[name]
    configure(precision)
    torch.backends.cudnn.benchmark = True
    shape = ",".join(map(str, network.dims))
    declaration = InputDeclaration.parse(f"x:{TYPES[precision]}[batch=1..{max(batches)},{shape}]")
    program = export_program(network.make(), [declaration], precision)[1]
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / name / "1"
        (version / LOWERED).mkdir(parents=True)
        lowered.write(program, version / LOWERED)
        for batch in batches:
            tuning_s, timed = tune(version, batch, device, Path(folder) / "staging")
            row = Row(name, batch, precision, tuning_s=tuning_s, candidates_timed=timed)
            answer = first_answer(version, network, precision, batch)
            row.first_answer_s, row.first_answer_parts_s = answer or (None, None)
            instance = Instance.open(version, device, Settings(), Clock())
            row.load_s = sum(instance.clock.seconds.values())
            modes = ["reduce-overhead"] * with_compile + ["max-autotune"] * (batch in thorough)
            measure_row(row, network, instance, device, modes)
            instance.close()
            rows.put(asdict(row))
    rows.put(None)


def tune(version: Path, batch: int, device: torch.device, staging: Path) -> tuple[float, int]:
    """Seconds, and candidates timed, for one bucket."""
    started = time.perf_counter()
    pretuning = Pretuning.open(version.parent, device, staging=staging)
    result = pretuning.run([Bucket.of({"batch": batch})], None, lambda outcome: None)
    pretuning.close()
    return time.perf_counter() - started, result.timed_candidates


def first_answer(
    version: Path, network: Network, precision: str, batch: int
) -> tuple[float, Mapping[str, float]] | None:
    """Seconds from the start of a process to its first answer less the import of torch and cudnn; parts."""
    dims = json.dumps([batch, *network.dims])
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "first_answer.py"),
        str(version),
        dims,
        str(time.time()),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        print(ended.stderr[-2000:], flush=True)
        return None
    seconds, parts = ended.stdout.splitlines()[-2:]
    return float(seconds), json.loads(parts)


def measure_row(
    row: Row, network: Network, instance: Instance, device: torch.device, modes: list[str]
) -> None:
    """Fills one row: checks against float64 first, then times all columns against each other."""
    bucket = Bucket.of({"batch": row.batch})
    program = instance.model.program
    dtype = getattr(torch, program.inputs[0].dtype)
    x = torch.randn(row.batch, *network.dims, device=device, dtype=dtype)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    module = folded(network.make()).to(device=device, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = as_list(network.make().to(device=device, dtype=torch.float64)(x.double()))
    executor, live = instance.model.executor(bucket)
    assert live, f"bucket {bucket.name} is not tuned"
    executor.inputs[0].copy_(x)
    runs: dict[str, Callable[[], object]] = {}
    with torch.inference_mode():
        runs["eager"], eager_result = graphed(lambda: module(x), device)
        for mode in modes:
            runs[mode], _ = graphed(compiled(module, x, row, mode), device)
    runs["ours"] = executor.run
    runs["eager"]()
    row.eager_error = largest_error(as_list(eager_result), expected)
    row.ours_error = largest_error(executor.run(), expected)
    times = interleaved(runs)
    row.spread_us = {key: spread for key, (_, spread) in times.items()}
    row.eager_us, row.ours_us = times["eager"][0], times["ours"][0]
    row.reduce_overhead_us, row.max_autotune_us = (
        times[mode][0] if mode in times else None for mode in ("reduce-overhead", "max-autotune")
    )
    if modes:
        row.compile_mode = min(modes, key=lambda mode: times[mode][0])
        row.compile_us = times[row.compile_mode][0]
    row.floor_us = floor_us(program, bucket)
    row.executor_mib = executor.bytes / 2**20
    describe_segments(row, instance, bucket)


def describe_segments(row: Row, instance: Instance, bucket: Bucket) -> None:
    """What serves each segment, with its own time; their sum, and that of cuDNN's."""
    served = instance.model.plans(bucket, plan=False)
    row.segments = [
        {
            "site": site.name,
            "operations": site.segment.describe(),
            "origin": s.origin,
            "plan": s.candidate.label(),
            "us": s.stored and s.stored.time_us,
            "error": s.stored and s.stored.error and s.stored.error.rms,
            "torch_error": s.stored and s.stored.torch_error and s.stored.torch_error.rms,
            "torch_us": s.stored and s.stored.torch_time_us,
        }
        for site, s in zip(instance.model.resources.partition.sites, served, strict=True)
    ]
    timed = [(s.candidate.engine, s.stored.time_us) for s in served if s.stored and s.stored.time_us]
    row.segments_us = sum(us for _, us in timed)
    row.cudnn_us = sum(us for engine, us in timed if engine == "cudnn")


def as_list(result: Any) -> list[torch.Tensor]:
    """One tensor, or several."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def folded(module: torch.nn.Module) -> torch.nn.Module:
    """The module with batch norms folded into the convolutions before them."""
    from torch.fx.experimental.optimization import fuse

    return fuse(module.eval())


def compiled(module: torch.nn.Module, x: torch.Tensor, row: Row, mode: str) -> Callable[[], object]:
    """The module through inductor, compiled for these sizes; compile seconds go to the row."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    torch._dynamo.reset()
    options = {"max_autotune": True, "coordinate_descent_tuning": True} if mode == "max-autotune" else None
    function = torch.compile(module, dynamic=False, options=options)
    started = time.perf_counter()
    with torch.no_grad():
        function(x)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    if mode == "max-autotune":
        row.max_autotune_compile_s = seconds
    else:
        row.compile_s = seconds

    def run() -> object:
        with torch.no_grad():
            return function(x)

    return run


def graphed(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], object], Any]:
    """The run as a CUDA graph: its replay, and what a replay writes."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph.replay, result


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """||result - expected|| / ||expected||; infinite for a result that is not finite."""
    error = (torch.linalg.vector_norm(result.double() - expected) / torch.linalg.vector_norm(expected)).item()
    return error if math.isfinite(error) else math.inf


def largest_error(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of all outputs."""
    return max(relative_error(a, b) for a, b in zip(results, expected, strict=True))


def interleaved(runs: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Median and interquartile range, microseconds a run, of rounds of replays taken in turn."""
    samples: dict[str, list[float]] = {key: [] for key in runs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(ROUNDS + 3):
        for key, run in runs.items():
            start.record()
            for _ in range(REPLAYS):
                run()
            end.record()
            end.synchronize()
            if number >= 3:
                samples[key].append(start.elapsed_time(end) * 1e3 / REPLAYS)
    found = {}
    for key, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        found[key] = (middle, high - low)
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows with ratios."""
    times = ("eager us", "compile us", "ours us", "floor us")
    more = ("error (eager's)", "gap us", "tuning s", "answer s")
    columns = ("model", "precision", "batch", *times, "eager/ours", "compile/ours", *more)
    table = Table(*columns, box=box.SIMPLE)
    for row in rows:
        values = [row[key] for key in ("eager_us", "compile_us", "ours_us", "floor_us")]
        ratios = [row[key] / row["ours_us"] if row[key] else None for key in ("eager_us", "compile_us")]
        table.add_row(
            row["model"],
            row["precision"],
            str(row["batch"]),
            *(f"{value:.1f}" if value else "-" for value in values),
            *(f"{value:.2f}" if value else "-" for value in ratios),
            f"{row['ours_error']:.1e} ({row['eager_error']:.1e})",
            f"{row['ours_us'] - row['segments_us']:.0f}",
            f"{row['tuning_s']:.0f}",
            f"{row['first_answer_s']:.2f}" if row["first_answer_s"] else "-",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
