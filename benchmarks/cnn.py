"""Convolutional networks on a GPU: torch eager, torch.compile and tuned plans, timed in one run.

    python benchmarks/cnn.py --output benchmarks/results/h200-2026-12-02-cnn.json

Every column is the replay of one CUDA graph of the whole network, and all columns of a row are replayed in
turn, so that clocks and neighbours meet them alike. The baselines get what ours gets: the network in
inference mode, the row's precision, channels-last, static shapes, a CUDA graph; eager with cudnn.benchmark,
torch.compile with inductor's freezing (constant folding of weights), its code captured in a CUDA graph like
ours (which is what mode "reduce-overhead" does, without that mode's copies of inputs).
"""

from __future__ import annotations

import datetime
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
from cudnn_fusion import lowered
from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.engines.torch_eager import configure
from cudnn_fusion.environment import cuda_compatibility, current_provenance
from cudnn_fusion.instance import LOWERED, Clock, Instance
from cudnn_fusion.pretuning import Pretuning
from cudnn_fusion.program import export_program
from cudnn_fusion.settings import Settings
from cudnn_fusion.shapes import Bucket
from tools.demo.conv_block import conv_block
from tools.demo.crepe import crepe_tiny

ROUNDS = 30
REPLAYS = 20


@dataclass(frozen=True)
class Network:
    """A network to measure: how to make it, and its input without the batch."""

    make: Callable[[], torch.nn.Module]
    dims: tuple[int, ...]


NETWORKS: Mapping[str, Network] = {
    "crepe": Network(crepe_tiny, (1024,)),
    "conv_block": Network(conv_block, (64, 56, 56)),
}
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
    ours_us: float | None = None
    floor_us: float | None = None
    ours_error: float | None = None
    eager_error: float | None = None
    first_answer_s: float | None = None
    sequence: int | None = None
    spread_us: Mapping[str, float] | None = None
    tuning_s: float | None = None
    load_s: float | None = None
    engines: str | None = None


def main(
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    models: Annotated[str, typer.Option(help="Names, comma-separated.")] = ",".join(NETWORKS),
    precisions: Annotated[str, typer.Option(help="fp16, bf16, tf32, fp32; comma-separated.")] = "fp16,fp32",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,64",
    compile: Annotated[bool, typer.Option(help="Measure torch.compile.")] = True,
) -> None:
    """Measures each network, precision and batch; writes the file anew after each row."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    result: dict[str, Any] = {"command": shlex.join(sys.argv), "environment": environment(), "rows": []}
    sizes = [int(batch) for batch in batches.split(",")]
    for name in models.split(","):
        for precision in precisions.split(","):
            for row in measure(name, precision, sizes, device, compile):
                result["rows"].append(asdict(row))
                output.write_text(json.dumps(result, indent=1) + "\n")
                print(row, flush=True)
    print_table(result["rows"])


def environment() -> dict[str, Any]:
    """Date, GPU and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{k: v for k, v in cuda_compatibility(0).to_json().items() if v is not None},
        **current_provenance("cuda").to_json(),
    }


def measure(
    name: str, precision: str, batches: list[int], device: torch.device, with_compile: bool
) -> list[Row]:
    """All batches of one network in one precision."""
    network = NETWORKS[name]
    configure(precision)
    torch.backends.cudnn.benchmark = True
    shape = ",".join(map(str, network.dims))
    declaration = InputDeclaration.parse(f"x:{TYPES[precision]}[batch=1..{max(batches)},{shape}]")
    program = export_program(network.make(), [declaration], precision)[1]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / name / "1"
        (version / LOWERED).mkdir(parents=True)
        program = lowered.write(program, version / LOWERED)
        started = time.perf_counter()
        pretuning = Pretuning.open(version.parent, device, staging=Path(folder) / "staging")
        pretuning.run([Bucket.of({"batch": batch}) for batch in batches], None, lambda outcome: None)
        tuning_s = time.perf_counter() - started
        instance = Instance.open(version, device, Settings(), Clock())
        for batch in batches:
            row = Row(name, batch, precision, tuning_s=tuning_s / len(batches))
            row.load_s = sum(instance.clock.seconds.values())
            measure_row(row, network, instance, device, with_compile)
            rows.append(row)
        instance.close()
    return rows


def measure_row(
    row: Row, network: Network, instance: Instance, device: torch.device, with_compile: bool
) -> None:
    """Fills one row: checks against float64 first, then times all columns against each other."""
    bucket = Bucket.of({"batch": row.batch})
    program = instance.model.program
    dtype = getattr(torch, program.inputs[0].dtype)
    x = torch.randn(row.batch, *network.dims, device=device, dtype=dtype)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    module = network.make().to(device=device, dtype=dtype).to(memory_format=torch.channels_last)
    expected = network.make().to(device=device, dtype=torch.float64)(x.double())
    executor, live = instance.model.executor(bucket)
    assert live, f"bucket {bucket.name} is not tuned"
    assert executor.origin == "exact", executor.origins
    executor.inputs[0].copy_(x)
    runs: dict[str, Callable[[], object]] = {}
    with torch.inference_mode():
        runs["eager"], eager_result = graphed(lambda: module(x), device)
        if with_compile:
            runs["compile"], _ = graphed(compiled(module, x, row), device)
    runs["ours"] = executor.run
    runs["eager"]()
    row.eager_error = relative_error(eager_result[0], expected)
    for output in executor.run():
        row.ours_error = relative_error(output, expected)
    times = interleaved(runs)
    row.spread_us = {key: spread for key, (_, spread) in times.items()}
    row.eager_us = times["eager"][0]
    row.compile_us = times["compile"][0] if "compile" in times else None
    row.ours_us = times["ours"][0]
    row.floor_us = floor_us(program, bucket)
    served = instance.model.plans(bucket, plan=False)
    row.engines = " ".join(f"{s.candidate.engine}:{s.candidate.engine_id}" for s in served)


def compiled(module: torch.nn.Module, x: torch.Tensor, row: Row) -> Callable[[], object]:
    """The module through inductor, compiled for these sizes; compile seconds go to the row."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    torch._dynamo.reset()
    function = torch.compile(module, dynamic=False)
    started = time.perf_counter()
    with torch.no_grad():
        function(x)
    torch.cuda.synchronize()
    row.compile_s = time.perf_counter() - started
    row.compile_mode = "reduce-overhead"

    def run() -> object:
        with torch.no_grad():
            return function(x)

    return run


def graphed(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], object], list[torch.Tensor]]:
    """The run as a CUDA graph: its replay, and the tensors that a replay writes."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph.replay, [result]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """||result - expected|| / ||expected||; infinite for a result that is not finite."""
    error = (torch.linalg.vector_norm(result.double() - expected) / torch.linalg.vector_norm(expected)).item()
    return error if math.isfinite(error) else math.inf


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
    columns = ("model", "precision", "batch", *times, "eager/ours", "compile/ours", "error (eager's)")
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
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
