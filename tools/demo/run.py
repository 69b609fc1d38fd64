"""A pitch model from PyTorch to Triton: exported, served untuned, tuned, served again, and checked.

    python tools/demo/run.py --seed 7

Sends sounds whose pitch is known and compares what comes back with the truth and with PyTorch. The exit code
is 1 when an answer is wrong, with a sentence for each thing that is.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import crepe
import numpy as np
import report
import tones
import torch
import typer
from report import Answers
from rich.console import Console
from rich.text import Text
from serving_client import PROTOCOLS, ServingClient, interleaved_times_ms
from tritonclient.utils import InferenceServerException

from cudnn_fusion.triton_server import ServerNotFoundError, ServerStartError, TritonServer

ROOT = Path(__file__).resolve().parents[2]
ECHO = Path(__file__).resolve().parent / "echo"
MODEL = "pitch"
LARGEST_BATCH = 128
BUCKETS = (1, 8, 64)
# 1, 8 and 64 are buckets; 3 and 63 are padded to one; 65 is larger than the largest and is split.
BATCHES = (1, 3, 8, 63, 64, 65)
LATENCY_ROUNDS = 250

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class StepFailedError(RuntimeError):
    """A program that the demo runs has failed; the demo cannot go on."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seed: Annotated[
        int | None, typer.Option(help="Makes the sounds repeatable; random if not given.")
    ] = None,
    repository: Annotated[Path, typer.Option(help="Where the model is exported to.")] = Path(
        "model_repository"
    ),
    keep: Annotated[bool, typer.Option(help="Keep the exported model and the servers' logs.")] = False,
) -> None:
    """Export a pitch model, tune it, serve it with Triton and check its answers."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seed = secrets.randbelow(2**31) if seed is None else seed
    console.print(f"seed {seed} (repeat with --seed {seed})")
    folder = Path(tempfile.mkdtemp(prefix="cudnn_fusion_demo_"))
    model = repository / MODEL
    failures = ["the demo did not come to its end"]
    try:
        failures = run(model, folder, seed)
    except (StepFailedError, ServerNotFoundError, ServerStartError, InferenceServerException) as error:
        failures = [str(error)]
    except KeyboardInterrupt:
        failures = ["interrupted"]
        raise typer.Exit(130) from None
    finally:
        clean_up(model, folder, keep, failed=bool(failures))
    for failure in failures:
        console.print(Text.assemble(("wrong: ", "bold red"), failure), soft_wrap=True)
    if failures:
        raise typer.Exit(1)
    console.print("[bold green]every answer was right[/]")


def run(model: Path, folder: Path, seed: int) -> list[str]:
    """All steps; a sentence for each thing that was wrong. Logs go into ``folder``."""
    frames = tones.join(tones.tones(60, seed), tones.sweep(24, seed + 1), tones.silence(4, seed + 2))
    headline("Export: PyTorch to a Triton model")
    export(model)

    headline("Serve the untuned model")
    with serving(model.parent, folder / "untuned.log", [MODEL]) as (server, client):
        failures = check_untuned(client, frames)
        failures += report.log_failures("the server of the untuned model", server.log_errors())

    headline("Tune it on this machine")
    program("tools/pretune.py", str(model), "--buckets", ",".join(map(str, BUCKETS)))

    headline("Serve the tuned model")
    echo_repository = folder / "echo_repository"
    shutil.copytree(ECHO, echo_repository / "echo", ignore=shutil.ignore_patterns("__pycache__"))
    with serving(model.parent, folder / "tuned.log", [MODEL, "echo"], echo_repository) as (server, client):
        expected = pytorch_activations(frames.samples)
        failures += check_one_by_one(client, frames, expected)
        failures += check_batches(client, frames, expected)
        headline("Latency beside a model that only echoes")
        compare_latency(client, frames)
        failures += report.log_failures("the server of the tuned model", server.log_errors())
    return failures


def headline(text: str) -> None:
    """Prints the title of a step."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def export(model: Path) -> None:
    """Exports CREPE tiny to ``model``, in place of what an earlier run has left there, its plans included."""
    shutil.rmtree(model, ignore_errors=True)
    program(
        "tools/export.py",
        "--model=tools.demo.crepe:crepe_tiny",
        f"--input=audio:FP32[batch=1..{LARGEST_BATCH},{tones.FRAME_SAMPLES}]",
        "--precision=fp32",
        f"--out={model}",
    )


def program(script: str, *arguments: str) -> None:
    """Runs one of the project's programs and shows what it prints. StepFailedError when it fails."""
    command = f"$ python {script} {' '.join(arguments)}"
    console.print(command, style="dim", markup=False, soft_wrap=True)
    ended = subprocess.run([sys.executable, str(ROOT / script), *arguments], check=False)
    if ended.returncode != 0:
        raise StepFailedError(f"{script} failed with exit code {ended.returncode}; its output is above")


@contextmanager
def serving(
    repository: Path, log: Path, models: list[str], *more: Path
) -> Iterator[tuple[TritonServer, ServingClient]]:
    """A server with ``models`` alone, from ``repository`` and ``more``, and a client of it."""
    load = [f"--load-model={model}" for model in models]
    explicit = ["--model-control-mode=explicit", *load]
    with TritonServer(repository, *more, models=models, extra_args=explicit, log_file=log) as server:
        console.print(
            f"Triton is ready: HTTP {server.http_url}, gRPC {server.grpc_url}, {' and '.join(models)}"
        )
        with ServingClient(server) as client:
            yield server, client


def pytorch_activations(samples: tones.Samples) -> tones.Samples:
    """[frames, 360]: what the original module answers in this process."""
    module = crepe.crepe_tiny()
    with torch.inference_mode():
        return np.asarray(module(torch.from_numpy(samples)).numpy(), dtype=np.float32)


def check_untuned(client: ServingClient, frames: tones.Frames) -> list[str]:
    """Without plans, the answer has to come from the reference engine."""
    _, route = client.infer_and_tell(MODEL, frames.samples[:3], "grpc")
    console.print(f"3 frames: {report.describe(route)}")
    if route is None or route.origin != "reference":
        return [f"an untuned model was served by {report.describe(route)}, not by reference"]
    return []


def check_one_by_one(client: ServingClient, frames: tones.Frames, expected: tones.Samples) -> list[str]:
    """Every frame as a request of its own, over gRPC and HTTP in turn."""
    activations = []
    routes = []
    for index, frame in enumerate(frames.samples):
        answer, route = client.infer_and_tell(MODEL, frame[None], PROTOCOLS[index % 2])
        activations.append(answer)
        routes.append(route)
    answers = Answers.of(frames, np.concatenate(activations), expected)
    console.print(report.tone_table(answers, routes))
    console.print(report.summary(answers))
    return report.failures("one by one", answers)


def check_batches(client: ServingClient, frames: tones.Frames, expected: tones.Samples) -> list[str]:
    """Requests of several frames; each bucket, padding and splitting are met, over both protocols."""
    failures = []
    rows = []
    for batch in BATCHES:
        for protocol in PROTOCOLS:
            chosen = np.arange(batch) % len(frames)
            part = frames.take(chosen)
            answer, route = client.infer_and_tell(MODEL, part.samples, protocol)
            answers = Answers.of(part, answer, expected[chosen])
            rows.append((f"{batch} over {protocol}", answers, route))
            failures += report.failures(f"batch of {batch} over {protocol}", answers)
            if route is None or route.origin not in ("exact", "recipe"):
                failures.append(f"a tuned model served a batch of {batch} by {report.describe(route)}")
    console.print(report.batch_table(rows))
    return failures


def compare_latency(client: ServingClient, frames: tones.Frames) -> None:
    """Prints latencies of the model and of the echo model, measured in turn."""
    rows = []
    for batch in (1, 8):
        samples = frames.samples[:batch]
        calls = {name: partial(client.infer, name, samples) for name in ("echo", MODEL)}
        times = interleaved_times_ms(calls, LATENCY_ROUNDS)
        rows += [(name, batch, values) for name, values in times.items()]
    console.print(report.latency_table(rows))


def clean_up(model: Path, folder: Path, keep: bool, failed: bool) -> None:
    """Removes what the demo has made; after a failure the logs stay, and it says where."""
    if keep or failed:
        console.print(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if keep:
        console.print(f"model: {model}")
    else:
        shutil.rmtree(model, ignore_errors=True)
        console.print(f"{model} is removed again; --keep keeps it")


if __name__ == "__main__":
    app()
