"""tools/plans.py: what it says of tuned, untuned and foreign plans."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from programs import block, tuner_of, write_version
from typer.testing import CliRunner

from cudnn_fusion.environment import Compatibility, cpu_compatibility, current_provenance
from cudnn_fusion.plan import BucketRecord, Plan
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.report import ModelReport, ReportError
from cudnn_fusion.shapes import Bucket
from tools.plans import age, app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "model_repository" / "conv_block"


def plans(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(text: str) -> str:
    """Without the line breaks of a table's cells."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model tuned on this CPU at batch 2."""
    directory = tmp_path_factory.mktemp("repository") / "block"
    program = write_version(directory, block())
    tuner_of(program, PlanStore(directory / "1" / "plans")).tune(Bucket.of({"batch": 2}), None)
    return directory


@pytest.fixture
def h200() -> Compatibility:
    (stored,) = ModelReport(EXAMPLE / "1").environments()
    return stored.compatibility


def changed_plans(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a model whose plans have other values in some fields."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("plans"))
    old, new = PlanStore(source / "1" / "plans"), PlanStore(target / "1" / "plans")
    for stored in old.environments():
        for plan in old.plans(stored.hash):
            found = old.find(stored.compatibility, plan.key)
            assert isinstance(found, Found)
            new.publish(stored.compatibility, replace(plan, **changes), found.blob)
        for record in old.buckets(stored.compatibility):
            new.publish_bucket(stored.compatibility, record)
    return target


def test_list_shows_times_errors_and_layers(model):
    done = plans("list", model, "--json")
    assert done.exit_code == 0, done.stderr
    (environment,) = json.loads(done.stdout)
    assert environment["environment"] == cpu_compatibility().hash()
    for plan in environment["plans"]:
        assert plan["time_us"] > 0
        assert plan["torch_time_us"] > 0
        assert plan["speed_up"] == pytest.approx(plan["torch_time_us"] / plan["time_us"])
        assert plan["error"]["rms"] < 1e-5
        assert plan["buckets"] == ["batch=2"]
        assert plan["layers"]
        assert plan["segment"].startswith("conv2d")
    (record,) = environment["buckets"]
    assert record["model_time_us"] > 0
    text = words(plans("list", model).stdout)
    assert "bucket batch=2" in text
    assert "speed-up" in text
    assert f"model {record['model_time_us']:.1f} us, torch {record['torch_time_us']:.1f} us" in text


def test_list_runs_as_a_program_and_marks_untimed_plans():
    command = [sys.executable, str(ROOT / "tools" / "plans.py"), "list", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA H200" in done.stdout
    assert "3 plans (0 timed)" in done.stdout
    assert done.stdout.count("untimed") == 3


def test_list_says_zero_plans(model, tmp_path):
    shutil.copytree(model, tmp_path / "block", ignore=shutil.ignore_patterns("plans"))
    done = plans("list", tmp_path / "block")
    assert done.exit_code == 0
    assert "0 plans" in done.stdout


def test_plans_of_an_earlier_program_are_marked(model, tmp_path):
    write_version(tmp_path / "block", block(seed=1))
    shutil.copytree(model / "1" / "plans", tmp_path / "block" / "1" / "plans")
    assert ModelReport(tmp_path / "block" / "1").program.sha256 != ModelReport(model / "1").program.sha256
    assert "(another program)" in words(plans("list", tmp_path / "block").stdout)


def generic(plan: Plan) -> dict[str, object]:
    return {"candidate": replace(plan.candidate, engine_id=0, plan_name="eng0")}


def partly_fused(plan: Plan) -> dict[str, object]:
    return {"candidate": replace(plan.candidate, form="conv2d+bias")}


def slow(plan: Plan) -> dict[str, object]:
    return {"timed": True, "time_us": 20.0, "spread_us": 0.5, "torch_time_us": 10.0}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (generic, "a generic cuDNN engine"),
        (partly_fused, "cuDNN runs conv2d+bias only, torch the rest of conv2d+bias+relu"),
        (slow, "slower than torch"),
    ],
)
def test_a_plan_that_is_worth_a_look_is_marked(tmp_path, change, hint):
    """Fallback engines were about 50 times slower and nothing said so (onnxruntime issue 22705)."""
    (stored,) = ModelReport(EXAMPLE / "1").environments()
    assert not any(hint in tuned.hint for tuned in stored.plans)
    other = changed_plans(EXAMPLE, tmp_path / "conv_block", **change(stored.plans[0].plan))
    (environment,) = json.loads(plans("list", other, "--json").stdout)
    assert all(hint in plan["hint"] for plan in environment["plans"])
    done = plans("why", other, "--sizes", "batch=8", "--target", "h200", "--json")
    assert all(hint in item["hint"] for item in json.loads(done.stdout)["segments"])


@pytest.mark.parametrize(("model_us", "noted"), [(9.0, False), (10.3, False), (11.0, True)])
def test_list_notes_a_bucket_that_is_slower_than_torch(model, tmp_path, model_us, noted):
    copy = changed_plans(model, tmp_path / "copy")
    store = PlanStore(copy / "1" / "plans")
    (record,) = store.buckets(cpu_compatibility())
    store.publish_bucket(cpu_compatibility(), replace(record, model_time_us=model_us, torch_time_us=10.0))
    said = words(plans("list", copy).stdout)
    assert f"model {model_us} us, torch 10.0 us" in said
    assert ("as a whole slower than torch" in said) is noted


def test_why_tells_the_bucket_and_the_origin_of_each_segment(model):
    report = ModelReport(model / "1")
    padded = report.answer(Bucket.of({"batch": 1}), cpu_compatibility(), current_provenance("cpu"))
    assert padded.choice.kind == "padded"
    assert {item.origin for item in padded.segments} == {"exact"}
    assert {item.stale for item in padded.segments} == {()}
    described = plans("why", model, "--sizes", "batch=1")
    assert "padded: 1 rows in batch=2" in described.stdout
    assert "to tune this shape" not in described.stdout
    for item in report.left():
        assert item.reason in words(described.stdout)


def test_why_without_plans_says_how_to_tune_the_buckets_it_would_use():
    done = plans("why", EXAMPLE, "--sizes", "batch=60")
    assert done.exit_code == 0, done.stderr
    assert "no plans for this environment" in words(done.stdout)
    assert "batch=60: none: no tuned bucket fits, runs at its own sizes; tuned buckets: none" in done.stdout
    assert f"tools/pretune.py {EXAMPLE} --buckets " in done.stdout
    assert "batch=60" in done.stdout


def test_why_refuses_a_number_that_no_size_is():
    done = plans("why", EXAMPLE, "--sizes", f"batch={'9' * 5000}")
    assert done.exit_code == 1
    assert "write AXIS=NUMBER" in words(done.stderr)


def test_why_refuses_what_the_server_refuses():
    done = plans("why", EXAMPLE, "--sizes", "batch=65")
    assert done.exit_code == 1
    assert "1 to 64" in words(done.stderr)


def test_why_names_what_differs_from_the_stored_environment(h200):
    report = ModelReport(EXAMPLE / "1")
    other = replace(h200, cudnn=92000, cuda_driver_api=13010)
    answer = report.answer(Bucket.of({"batch": 8}), other)
    assert {item.origin for item in answer.segments} == {"recipe"}
    for item in answer.segments:
        assert item.why_not_better.count("stored 91900, here 92000") == 1
        assert item.why_not_better.count("stored 13000, here 13010") == 1


def test_why_looks_as_a_target_would(h200):
    done = plans("why", EXAMPLE, "--sizes", "batch=3", "--target", "h200", "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choice"]["kind"] == "padded"
    assert [item["origin"] for item in answer["segments"]] == ["exact"]
    said = plans("why", EXAMPLE, "--target", "h200").stdout
    assert said.startswith(f"target: {h200.label()} ({h200.hash()})\n")
    assert "for the smallest request; for another: --sizes batch=..." in said


def test_why_marks_plans_made_by_other_versions_as_stale(model):
    report = ModelReport(model / "1")
    newer = replace(current_provenance("cpu"), torch="99.0")
    answer = report.answer(Bucket.of({"batch": 2}), cpu_compatibility(), newer)
    for item in answer.segments:
        (stale,) = item.stale
        assert stale.startswith("torch: stored")
        assert stale.endswith("here 99.0")


def test_a_damaged_plan_is_named_by_why(tmp_path, h200):
    shutil.copytree(EXAMPLE, tmp_path / "conv_block")
    for blob in (tmp_path / "conv_block").rglob("*.plan"):
        blob.write_bytes(blob.read_bytes()[:-1])
    answer = ModelReport(tmp_path / "conv_block" / "1").answer(Bucket.of({"batch": 8}), h200)
    for item in answer.segments:
        assert item.origin == "heuristic"
        assert "checksum" in item.why_not_better


def test_a_bucket_that_the_program_does_not_take_is_left_out(tmp_path, h200):
    shutil.copytree(EXAMPLE, tmp_path / "conv_block")
    report = ModelReport(tmp_path / "conv_block" / "1")
    for sizes in ((("batch", 0),), (("batch", 65),), (("height", 3),)):
        report.store.publish_bucket(h200, BucketRecord(sizes, report.program.sha256, ("0" * 64,)))
    (environment,) = report.environments()
    assert [record.bucket.name for record in environment.buckets] == ["batch=1", "batch=8", "batch=64"]
    assert report.answer(Bucket.of({"batch": 64}), h200).choice.kind == "exact_shape"


def test_report_says_what_is_fused_and_what_is_not(model):
    found = json.loads(plans("report", model, "--json").stdout)
    assert found["fused"]
    assert all(item["reason"] for item in found["left"])
    text = words(plans("report", model).stdout)
    for item in found["fused"]:
        assert f"{item['name']} {item['segment']} {len(item['covers'])}" in text
    for item in found["left"]:
        assert item["reason"] in text


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("batch", "AXIS=NUMBER"),
        ("batch=x", "AXIS=NUMBER"),
        ("height=3", "batch=1.."),
        ("batch=0", "the model takes 1 to"),
        ("batch=1,batch=2", "twice"),
        ("[red]=3", "[red]=3"),
    ],
)
def test_wrong_sizes_get_a_sentence(model, sizes, said):
    done = plans("why", model, "--sizes", sizes)
    assert done.exit_code == 1
    assert done.stderr.startswith("error:")
    assert said in done.stderr


def test_an_unknown_target_gets_a_sentence():
    done = plans("why", EXAMPLE, "--target", "h2000")
    assert done.exit_code == 1
    assert "known: h200" in done.stderr


def test_a_directory_without_a_model_gets_a_sentence(tmp_path):
    for directory in (tmp_path / "missing", tmp_path):
        done = plans("list", directory)
        assert done.exit_code == 1
        assert "tools/export.py" in done.stderr
    (tmp_path / "1" / "lowered").mkdir(parents=True)
    (tmp_path / "1" / "lowered" / "program.json").write_text("{")
    assert "program.json" in plans("report", tmp_path).stderr
    with pytest.raises(ReportError, match=r"program\.json"):
        ModelReport(tmp_path / "1")


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        (timedelta(seconds=-5), "0 min"),
        (timedelta(minutes=59), "59 min"),
        (timedelta(hours=47, minutes=59), "47 h"),
        (timedelta(days=2), "2 d"),
    ],
)
def test_age_is_in_the_largest_whole_unit(passed, text):
    now = datetime(2026, 1, 31, tzinfo=UTC)
    assert age((now - passed).isoformat(), now) == text
    assert age("", now) == "-"
