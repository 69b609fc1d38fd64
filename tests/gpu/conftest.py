"""Fixtures on a real GPU: models exported and tuned here, a real server, a client."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "demo")]

BUCKETS = (1, 8, 64)


def pytest_collection_modifyitems(items):
    if items and not torch.cuda.is_available():
        pytest.exit("tests/gpu need an NVIDIA GPU and a CUDA build of torch; torch sees none", returncode=2)


def tool(name: str, *arguments: object) -> str:
    """Runs one of tools/*.py; gives its output."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def pitch(tmp_path_factory):
    """A function from a precision to CREPE tiny exported in it; not tuned. One export for each precision."""
    made: dict[str, Path] = {}

    def export(precision: str) -> Path:
        if precision not in made:
            made[precision] = tmp_path_factory.mktemp(precision) / "pitch"
            tool(
                "export.py",
                "--model=tools.demo.crepe:crepe_tiny",
                "--input=audio:FP32[batch=1..128,1024]",
                f"--precision={precision}",
                f"--out={made[precision]}",
            )
        return made[precision]

    return export


@pytest.fixture(scope="session")
def tuned_pitch(pitch, tmp_path_factory):
    """A function from a precision to CREPE tiny tuned on this GPU at `BUCKETS`."""
    made: dict[str, Path] = {}

    def tune(precision: str) -> Path:
        if precision not in made:
            made[precision] = pitch(precision)
            staging = tmp_path_factory.mktemp("staging")
            buckets = ",".join(map(str, BUCKETS))
            tool("pretune.py", made[precision], f"--buckets={buckets}", f"--staging={staging}")
        return made[precision]

    return tune
