"""Exports a PyTorch model into a Triton model repository.

    python tools/export.py --model my_package.my_module:make_model \\
        --input "image:FP32[batch=1..64,3,224,224]" --precision fp16 --out model_repository/my_model
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cudnn_fusion.declarations import InputDeclaration
from cudnn_fusion.lowered import Program, ProgramError
from cudnn_fusion.model_directory import WrittenModel, model_name, write_model
from cudnn_fusion.program import export_program, load_model

# Without rich's markup, which takes [batch=1..64,...] for a tag; a factory's own failure is one line.
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    *,
    model: Annotated[
        str, typer.Option(help="package.module:factory (a function that returns a module) or a .pt2 file")
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="NAME:DTYPE[dims], by forward()'s names or in its order; a dim is a size or AXIS=MIN..MAX, "
            "as in image:FP32[batch=1..64,3,height=224..512,224]",
        ),
    ],
    out: Annotated[Path, typer.Option(help="directory to write, model_repository/NAME")],
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16")] = "fp32",
    output: Annotated[str, typer.Option(help="names for the outputs, NAME,NAME,... in their order")] = "",
    version: Annotated[int, typer.Option(help="version directory to write")] = 1,
    force: Annotated[bool, typer.Option(help="replace a directory that no export made")] = False,
) -> None:
    """Exports MODEL for inference, checks the result against it, and writes OUT for Triton."""
    # torch logs whole graphs when it refuses one; the reason is in the exception.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore", FutureWarning)
    try:
        name = model_name(out)
        declarations = [InputDeclaration.parse(text) for text in inputs]
        output_names = [name.strip() for name in output.split(",")] if output else None
        exported, program = export_program(
            load_model(model), declarations, precision, name=name, output_names=output_names
        )
        written = write_model(exported, program, out, version=version, force=force)
    except (ProgramError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    _print_summary(written, Console())


def _print_summary(written: WrittenModel, console: Console) -> None:
    program = written.program
    table = Table(title=f"{program.name}, version {written.version}, {program.precision}")
    for column in ("", "name", "type", "shape"):
        table.add_column(column)
    for kind, specs in (("input", program.inputs), ("output", program.outputs)):
        for spec in specs:
            table.add_row(kind, escape(spec.name), spec.dtype, escape(str(list(spec.shape)).replace("'", "")))
    console.print(table)
    console.print(f"axes: {_axes_text(program)}", soft_wrap=True)
    console.print(f"batch axis: {program.batch_axis or 'none (requests are not joined)'}")
    console.print(f"{len(program.nodes)} operations, {_weight_bytes(program) / 2**20:.1f} MiB of weights")
    for note in (*program.notes, *written.messages):
        console.print(f"- {escape(note)}", soft_wrap=True)
    console.print(f"written to {written.directory}", soft_wrap=True, highlight=False)


def _axes_text(program: Program) -> str:
    return ", ".join(f"{axis.name}={axis.minimum}..{axis.maximum}" for axis in program.axes) or "none"


def _weight_bytes(program: Program) -> int:
    return sum(weight.nbytes for weight in program.weights.values())


if __name__ == "__main__":
    app()
