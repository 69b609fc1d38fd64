"""tools/plans.py: what it says of tuned, untuned and foreign plans."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import block, tuner_of, write_version

from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.report import ModelReport, ReportError
from cudnn_fusion.shapes import Bucket

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "model_repository" / "conv_block"


def plans(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "plans.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model tuned on this CPU at batch 2."""
    directory = tmp_path_factory.mktemp("repository") / "block"
    program = write_version(directory, block())
    tuner_of(program, PlanStore(directory / "1" / "plans")).tune(Bucket.of({"batch": 2}), None)
    return directory


def test_list_shows_times_errors_and_layers(model):
    done = plans("list", model, "--json")
    assert done.returncode == 0, done.stderr
    (environment,) = json.loads(done.stdout)
    assert environment["environment"] == cpu_compatibility().hash()
    for plan in environment["plans"]:
        assert plan["time_us"] > 0
        assert plan["torch_time_us"] > 0
        assert plan["error"]["rms"] < 1e-5
        assert plan["buckets"] == ["batch=2"]
        assert plan["layers"]
    text = plans("list", model).stdout
    assert "batch=2" in text
    assert "speed-up" in text


def test_list_marks_untimed_plans(model):
    done = plans("list", EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA H200" in done.stdout
    assert "untimed" in done.stdout


def test_list_says_zero_plans(model, tmp_path):
    shutil.copytree(model, tmp_path / "block", ignore=shutil.ignore_patterns("plans"))
    done = plans("list", tmp_path / "block")
    assert done.returncode == 0
    assert "0 plans" in done.stdout


def test_why_tells_the_bucket_and_the_origin_of_each_segment(model):
    report = ModelReport(model / "1")
    here = cpu_compatibility()
    padded = report.answer(Bucket.of({"batch": 1}), here)
    assert padded.choice.kind == "padded"
    assert {item.origin for item in padded.segments} == {"exact"}
    described = plans("why", model, "--sizes", "batch=1")
    assert "padded: 1 rows in batch=2" in described.stdout


def test_why_names_what_differs_from_the_stored_environment():
    done = plans("why", EXAMPLE, "--sizes", "batch=3", "--target", "h200")
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout
    report = ModelReport(EXAMPLE / "1")
    (stored,) = report.environments()
    other = type(stored.compatibility).from_json(
        {**stored.compatibility.to_json(), "cudnn": 92000, "cuda_driver_api": 13010}
    )
    answer = report.answer(Bucket.of({"batch": 8}), other)
    assert {item.origin for item in answer.segments} == {"recipe"}
    for item in answer.segments:
        assert "91900" in item.why_not_better
        assert "13010" in item.why_not_better


def test_report_says_what_is_fused_and_what_is_not(model):
    done = plans("report", model, "--json")
    found = json.loads(done.stdout)
    assert found["fused"]
    assert all(item["reason"] for item in found["left"])


@pytest.mark.parametrize("sizes", ["batch", "batch=x", "height=3", "batch=0"])
def test_wrong_sizes_get_a_sentence(model, sizes):
    done = plans("why", model, "--sizes", sizes)
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_without_a_model_gets_a_sentence(tmp_path):
    for directory in (tmp_path / "missing", tmp_path):
        done = plans("list", directory)
        assert done.returncode == 1
        assert "tools/export.py" in done.stderr
    (tmp_path / "1" / "lowered").mkdir(parents=True)
    with pytest.raises(ReportError, match=r"program\.json"):
        ModelReport(tmp_path / "1")
