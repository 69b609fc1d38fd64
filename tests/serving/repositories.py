"""Making model repositories for tests."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ECHO = Path(__file__).parents[2] / "tools" / "demo" / "echo"


@dataclass(frozen=True)
class SourceModel:
    """A model given as text: its config.pbtxt and its 1/model.py."""

    config: str
    code: str


def make_repository(root: Path, models: Mapping[str, Path | SourceModel]) -> Path:
    """A repository under ``root`` (new) with a copy of each model, named by its key."""
    root.mkdir(parents=True)
    for name, model in models.items():
        folder = root / name
        if isinstance(model, SourceModel):
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(model.config)
            (folder / "1" / "model.py").write_text(model.code)
        else:
            shutil.copytree(model, folder, ignore=shutil.ignore_patterns("__pycache__"))
            rename(folder / "config.pbtxt", name)
    return root


def rename(config: Path, name: str) -> None:
    """Makes the model's name in ``config`` agree with its folder's, as Triton demands."""
    if config.is_file():
        config.write_text(re.sub(r'(?m)^name:\s*"[^"]*"', f'name: "{name}"', config.read_text()))


def on_cpu(config: str) -> str:
    """``config`` with its instance groups on the CPU: Triton refuses KIND_GPU on a machine without one."""
    config = re.sub(r"\bKIND_GPU\b", "KIND_CPU", config)
    return re.sub(r"\bgpus\s*:\s*\[[^\]]*\]\s*,?", "", config)


def python_model(initialize: str = "pass", execute: str = "return []") -> str:
    """Source of a model for the Python backend with these statements as its methods' bodies."""
    return (
        "import os, time\n"
        "import triton_python_backend_utils as pb_utils\n\n"
        "class TritonPythonModel:\n"
        f"    def initialize(self, args):\n        {initialize}\n\n"
        f"    def execute(self, requests):\n        {execute}\n"
    )


def simple_config(name: str) -> str:
    """One FP32 input X and output Y of any length, no batching."""
    return (
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n'
        'input [ { name: "X", data_type: TYPE_FP32, dims: [ -1 ] } ]\n'
        'output [ { name: "Y", data_type: TYPE_FP32, dims: [ -1 ] } ]\n'
        "instance_group [ { kind: KIND_CPU, count: 1 } ]\n"
    )
