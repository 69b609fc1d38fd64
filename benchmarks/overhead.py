"""What the product adds to a request around the model itself, measured inside the real server on a CPU.

    python benchmarks/overhead.py --output benchmarks/results/cpu-2026-12-03-overhead.json

CREPE "tiny" with random weights is exported, tuned and served; requests of one row go one after another over
gRPC. Each request's overhead is the time from entry of the Triton model's `execute` to its return, less
the time in `Executor.run` (the plans and torch's operations). In turn with it a copy of the model, with a
stopwatch around each part, takes the same requests. Served again with one bucket and with eight, the weights
must take the same memory. The exit code is 1 when a limit is broken.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tritonclient.grpc
import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import environment
from benchmarks.overhead_model import PARTS_SUFFIX, SAMPLES_VARIABLE
from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.triton_server import TritonServer

ROOT = Path(__file__).resolve().parents[1]
MODEL = "crepe"
FACTORY = "tools.demo.crepe:crepe_tiny_untrained"
INPUT = "x:FP32[batch=1..64,1024]"
ROW_DIMS = (1, 1024)
MEDIAN_LIMIT_US = 300.0
BUCKETS = tuple(range(1, 9))
WARM_UP_REQUESTS = 200
BLOCK_REQUESTS = 500
"""The model and its copy take turns of so many requests, so that other work on the machine meets both."""
PARTS = ("parse", "choose", "copy in", "run", "cut out", "responses", "metric")

Samples = Mapping[str, list[float]]
"""Microseconds of each request, by part of `execute`."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Times:
    """Median and 99th percentile of a time, microseconds a request."""

    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Times:
        """Of at least two samples."""
        return cls(statistics.median(samples_us), statistics.quantiles(samples_us, n=100)[98])


@dataclass(frozen=True)
class Row:
    """The result. ``overhead`` is ``execute`` less its part ``run``, taken for each request.

    ``parts`` hold the parts of ``execute`` that were called; ``rest`` is what none of them accounts for, the
    stopwatches' own time included. ``weights_bytes`` is by number of buckets.
    """

    model: str
    batch: int
    requests: int
    overhead: Times
    execute: Times
    parts: Mapping[str, Times]
    weights_bytes: Mapping[int, int]


def main(
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")],
    requests: Annotated[int, typer.Option(help="Requests that are measured.", min=2000)] = 4000,
) -> None:
    """Measures the overhead of a request and the weights' memory, and checks both against their limits."""
    with tempfile.TemporaryDirectory(prefix="cudnn_fusion_overhead_") as folder:
        model = tuned_model(Path(folder))
        whole, parts = measured_requests(model, requests, Path(folder))
        weights_bytes = {count: bytes_of_weights(model, count) for count in (1, len(BUCKETS))}
    row = row_of(whole, parts, weights_bytes)
    measured_in = environment(cpu_compatibility())
    measured_in["tritonclient"] = importlib.metadata.version("tritonclient")
    result = {"command": shlex.join(sys.argv), "environment": measured_in, "rows": [asdict(row)]}
    output.write_text(json.dumps(result, indent=1) + "\n")
    print_table(row)
    broken = broken_limits(row)
    for sentence in broken:
        console.print(f"[red]{sentence}[/red]")
    raise typer.Exit(1 if broken else 0)


def tuned_model(folder: Path) -> Path:
    """The directory of the network exported in fp32 and tuned at `BUCKETS`."""
    model = folder / "repository" / MODEL
    run_tool("export.py", f"--model={FACTORY}", f"--input={INPUT}", f"--out={model}")
    buckets = ",".join(map(str, BUCKETS))
    run_tool("pretune.py", str(model), f"--buckets={buckets}", f"--staging={folder / 'staging'}")
    return model


def run_tool(name: str, *arguments: str) -> None:
    """Runs one of tools/*.py; ends the benchmark with its output when it fails."""
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if ended.returncode != 0:
        console.print(ended.stdout + ended.stderr, markup=False)
        raise typer.Exit(1)


def measured_requests(model: Path, requests: int, folder: Path) -> list[Samples]:
    """Samples of the last ``requests`` requests from the model, and from its copy whose parts are timed."""
    names = (MODEL, MODEL + PARTS_SUFFIX)
    repository, samples = folder / "timed", folder / "samples"
    samples.mkdir()
    for name in names:
        timed = shutil.copytree(model, repository / name)
        shutil.copy(ROOT / "benchmarks" / "overhead_model.py", timed / "1" / "model.py")
        config = timed / "config.pbtxt"
        config.write_text(re.sub(r'(?m)^name: ".*"$', f'name: "{name}"', config.read_text()))
    with TritonServer(repository, models=names, env={SAMPLES_VARIABLE: str(samples)}) as server:
        with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
            for name in names:
                send(client, name, WARM_UP_REQUESTS)
            for start in range(0, requests, BLOCK_REQUESTS):
                for name in names:
                    send(client, name, min(BLOCK_REQUESTS, requests - start))
        check_origin(server.metrics())
    measured: list[Samples] = [json.loads((samples / f"{name}.json").read_text()) for name in names]
    return [{part: values[WARM_UP_REQUESTS:] for part, values in each.items()} for each in measured]


def send(client: tritonclient.grpc.InferenceServerClient, model: str, requests: int) -> None:
    """Sends so many requests of one row to ``model``, one after another."""
    random = np.random.default_rng(0)
    rows = [random.standard_normal(ROW_DIMS, dtype=np.float32) for _ in range(16)]
    for number in range(requests):
        tensor = tritonclient.grpc.InferInput("x", rows[0].shape, "FP32")
        tensor.set_data_from_numpy(rows[number % len(rows)])
        client.infer(model, [tensor])


def check_origin(metrics: str) -> None:
    """Ends the benchmark unless every request was served by tuned plans of its exact size."""
    for line in metrics.splitlines():
        tuned = 'choice="exact_shape"' in line and 'origin="exact"' in line
        if line.startswith("cudnn_fusion_requests_total{") and not tuned:
            console.print(f"not measured on tuned plans: {line}", markup=False)
            raise typer.Exit(1)


def bytes_of_weights(model: Path, buckets: int) -> int:
    """Bytes of weights that a server reports when it holds so many buckets."""
    config = model / "config.pbtxt"
    pattern = r'(key: "MAX_BUCKETS" value \{ string_value: )"\d+"'
    config.write_text(re.sub(pattern, rf'\g<1>"{buckets}"', config.read_text()))
    with TritonServer(model.parent, models=[model.name]) as server:
        metrics = server.metrics()
    tuned = re.search(r'^cudnn_fusion_buckets\{[^}]*state="tuned"[^}]*\} (\S+)$', metrics, re.MULTILINE)
    weights = re.search(r'^cudnn_fusion_bytes\{[^}]*kind="weights"[^}]*\} (\S+)$', metrics, re.MULTILINE)
    if weights is None or tuned is None or float(tuned[1]) != buckets:
        console.print(f"the server did not serve {buckets} buckets, or tells nothing of its weights")
        raise typer.Exit(1)
    return int(float(weights[1]))


def row_of(whole: Samples, parts: Samples, weights_bytes: Mapping[int, int]) -> Row:
    """The result: the overhead from the first samples, its parts from the second."""
    overhead = [execute - run for execute, run in zip(whole["execute"], whole["run"], strict=True)]
    named = {part: parts[part] for part in PARTS if part in parts}
    rest = [execute - sum(pieces) for execute, *pieces in zip(parts["execute"], *named.values(), strict=True)]
    return Row(
        MODEL,
        1,
        len(overhead),
        Times.of(overhead),
        Times.of(whole["execute"]),
        {part: Times.of(values) for part, values in (named | {"rest": rest}).items()},
        weights_bytes,
    )


def broken_limits(row: Row) -> list[str]:
    """A sentence for each limit that is broken."""
    broken = []
    if row.overhead.p50_us > MEDIAN_LIMIT_US:
        broken.append(
            f"a request's median overhead is {row.overhead.p50_us:.0f} us; at most {MEDIAN_LIMIT_US:.0f} us "
            "are allowed"
        )
    if len(set(row.weights_bytes.values())) > 1:
        sizes = ", ".join(f"{size} bytes for {count}" for count, size in row.weights_bytes.items())
        broken.append(f"the weights' memory depends on the number of buckets: {sizes}")
    return broken


def print_table(row: Row) -> None:
    """The parts, timed with stopwatches that take time too, then the whole without them."""
    table = Table("microseconds a request", "p50", "p99", box=box.SIMPLE)
    for name, times in row.parts.items():
        table.add_row(name, f"{times.p50_us:.1f}", f"{times.p99_us:.1f}")
    table.add_section()
    for name, times in {"execute": row.execute, "overhead: execute less run": row.overhead}.items():
        table.add_row(name, f"{times.p50_us:.1f}", f"{times.p99_us:.1f}")
    console.print(f"{row.model}, batch {row.batch}, {row.requests} requests")
    console.print(table)
    for count, size in row.weights_bytes.items():
        console.print(f"weights with {count} buckets: {size} bytes")


if __name__ == "__main__":
    typer.run(main)
