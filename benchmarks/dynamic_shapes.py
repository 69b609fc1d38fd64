"""cuDNN's dynamic-shape graphs with a kernel cache, against a graph for each size and for buckets.

    python benchmarks/dynamic_shapes.py --output benchmarks/results/h200-2026-12-02-dynamic-shapes.json

Two operation graphs in fp16: the convolution of conv_block (3x3, 64 to 64 channels, 56x56, bias, relu) over
batches, and a matrix product (768 to 3072, bias, relu) over rows. At each size three graphs are built and
timed, each with the first plan that cuDNN's heuristics name: one with dynamic shapes and the kernel cache
that all sizes share, one of exactly that size, and one of the bucket that the size would be padded to, which
also stands with the fastest of its plans. Times are CUDA-graph replays taken in turn.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import gpu_environment
from cudnn_fusion.preflight import load_cudnn
from cudnn_fusion.timing import time_interleaved

load_cudnn()
import cudnn  # noqa: E402

TUNED_PLANS = 12
SIZES = {"conv": (1, 3, 5, 8, 13, 24, 33, 64), "matmul": (16, 100, 128, 333, 512, 1000, 2048, 3000)}
BUCKETS = {"conv": (1, 2, 4, 8, 16, 32, 64), "matmul": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}

ALL_MODES = (cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK)


class NoPlanError(Exception):
    """cuDNN has no plan for the graph."""


@dataclass(frozen=True)
class Row:
    """One size of one graph. Milliseconds to build a graph with its plan; microseconds of a run.

    ``bucket_tuned_us`` is the fastest plan of the bucket's graph, the others are the heuristics' first.
    """

    graph: str
    size: int
    bucket: int
    dynamic_build_ms: float | None
    exact_build_ms: float
    dynamic_us: float | None
    exact_us: float
    bucket_us: float
    bucket_tuned_us: float
    dynamic_plan: str
    exact_plan: str
    bucket_tuned_plan: str
    dynamic_error: float | None


@dataclass(frozen=True)
class Built:
    """A graph with one built plan. ``plan`` is its name, ``ms`` what all of building took."""

    graph: Any
    index: int
    plan: str
    ms: float


def main(output: Annotated[Path, typer.Option(help="Where the JSON goes.")]) -> None:
    """Measures every size; writes the file anew after each."""
    device = torch.device("cuda", 0)
    result: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "environment": gpu_environment(),
        "rows": [],
    }
    handle = cudnn.create_handle()
    for kind, sizes in SIZES.items():
        cache = cudnn.create_kernel_cache()
        for size in sizes:
            result["rows"].append(asdict(measured(kind, size, handle, cache, device)))
            output.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result["rows"])


def measured(kind: str, size: int, handle: Any, cache: Any, device: torch.device) -> Row:
    """Builds, checks and times the graphs of one size."""
    bucket = next(b for b in BUCKETS[kind] if b >= size)
    dynamic: Built | None = None
    try:
        dynamic = build(kind, size, handle, cache)
        dynamic_plan = dynamic.plan
    except (NoPlanError, cudnn.cudnnGraphNotSupportedError) as refusal:
        dynamic_plan = f"refused: {str(refusal).splitlines()[0][:120]}"
    exact = build(kind, size, handle, None)
    padded = [build(kind, bucket, handle, None)]
    for index in range(1, TUNED_PLANS):
        try:
            padded.append(build(kind, bucket, handle, None, index))
        except NoPlanError:
            continue
    runs = [run_of(built, kind, bucket, handle, device)[0] for built in padded]
    exact_run, expected = run_of(exact, kind, size, handle, device)
    runs.append(exact_run)
    error = None
    if dynamic is not None:
        dynamic_run, answer = run_of(dynamic, kind, size, handle, device)
        runs.append(dynamic_run)
        dynamic_run()
        exact_run()
        error = float((answer.double() - expected.double()).norm() / expected.double().norm())
    times = time_interleaved(runs, device, keep=range(len(runs)), on_failure=lambda index, failure: None)
    fastest = min((i for i in range(len(padded)) if i in times), key=lambda i: times[i].median_us)
    return Row(
        kind,
        size,
        bucket,
        dynamic.ms if dynamic else None,
        exact.ms,
        times[len(padded) + 1].median_us if dynamic else None,
        times[len(padded)].median_us,
        times[0].median_us,
        times[fastest].median_us,
        dynamic_plan,
        exact.plan,
        padded[fastest].plan,
        error,
    )


def build(kind: str, size: int, handle: Any, cache: Any, index: int | None = None) -> Built:
    """The graph of ``kind`` at a size with one plan built: the ``index``-th, or the first that builds."""
    started = time.perf_counter()
    options = {} if cache is None else {"is_dynamic_shape_enabled": True, "kernel_cache": cache}
    floating, half = cudnn.data_type.FLOAT, cudnn.data_type.HALF
    graph = cudnn.pygraph(
        handle=handle, intermediate_data_type=floating, compute_data_type=floating, **options
    )
    dims, strides = layouts(kind, size)
    x, w, bias = (
        graph.tensor(name=name, uid=uid, dim=list(dims[name]), stride=list(strides[name]), data_type=half)
        for uid, name in enumerate(("x", "w", "b"), start=1)
    )
    if kind == "conv":
        product = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    else:
        product = graph.matmul(x, w)
    y = graph.relu(graph.bias(product, bias))
    y.set_output(True).set_data_type(half).set_uid(4)
    y.set_dim(list(dims["y"])).set_stride(list(strides["y"]))
    graph.validate()
    graph.build_operation_graph()
    modes = [cudnn.heur_mode.A] if index is None else list(ALL_MODES)
    graph.create_execution_plans(modes)
    graph.check_support()
    count = int(graph.get_execution_plan_count())
    for candidate in range(count) if index is None else [index] if index < count else []:
        try:
            graph.build_plan_at_index(candidate)
        except cudnn.cudnnGraphNotSupportedError:
            continue
        name = str(graph.get_plan_name_at_index(candidate))
        return Built(graph, candidate, name, (time.perf_counter() - started) * 1e3)
    raise NoPlanError(f"none of {count} plans can be built")


def layouts(kind: str, size: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Dims and strides of x, w, b and y; channels last for the convolution."""
    if kind == "conv":
        dims = {"x": (size, 64, 56, 56), "w": (64, 64, 3, 3), "b": (1, 64, 1, 1), "y": (size, 64, 56, 56)}
        strides = {
            name: (c * height * width, 1, width * c, c) for name, (_, c, height, width) in dims.items()
        }
        return dims, strides
    dims = {"x": (1, size, 768), "w": (1, 768, 3072), "b": (1, 1, 3072), "y": (1, size, 3072)}
    return dims, {name: (rows * columns, columns, 1) for name, (_, rows, columns) in dims.items()}


def run_of(
    built: Built, kind: str, size: int, handle: Any, device: torch.device
) -> tuple[Callable[[], object], torch.Tensor]:
    """A run on operands that depend on the size alone, and the tensor that it writes, poisoned."""
    generator = torch.Generator().manual_seed(size)
    dims, strides = layouts(kind, size)
    tensors = {}
    for name in ("x", "w", "b", "y"):
        tensors[name] = torch.empty_strided(dims[name], strides[name], dtype=torch.half, device=device)
        values = torch.randn(dims[name], generator=generator) / (24 if name == "w" else 1)
        tensors[name].copy_(values if name != "y" else torch.full(dims[name], torch.nan))
    size_bytes = max(1, built.graph.get_workspace_size_plan_at_index(built.index))
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    pack = {uid: tensor.data_ptr() for uid, tensor in enumerate(tensors.values(), start=1)}

    def run() -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        built.graph.execute_plan_at_index(pack, workspace.data_ptr(), built.index, handle=handle)

    return run, tensors["y"]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Times, and what dynamic shapes cost against the tuned bucket."""
    columns = ("build dynamic ms", "exact ms", "run dynamic us", "exact us", "bucket us", "tuned bucket us")
    table = Table("graph", "size", "bucket", *columns, "dynamic plan", box=box.SIMPLE)
    for row in rows:
        numbers = [value for name, value in row.items() if name.endswith(("_ms", "_us"))]
        values = (f"{value:.1f}" if value is not None else "-" for value in numbers)
        table.add_row(row["graph"], str(row["size"]), str(row["bucket"]), *values, row["dynamic_plan"][:24])
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
