"""Each field of the environment changed alone: what serves follows the table in the code, as the docs say."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from programs import CPU, block, tuner_of, write_version

from cudnn_fusion.engines.torch_eager import TorchEngine
from cudnn_fusion.environment import (
    FIELD_RULES,
    MUST_MATCH,
    Compatibility,
    Provenance,
    cpu_compatibility,
    current_provenance,
)
from cudnn_fusion.plan_cache import PlanCache
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.shapes import Bucket

README = Path(__file__).parents[2] / "README.md"
BUCKET = Bucket.of({"batch": 2})
IN_WORDS = {
    "cudnn": "cuDNN version",
    "cuda_driver_api": "CUDA driver API version",
    "memory_bus_bits": "memory bus",
    "shared_memory_per_block_optin": "shared-memory",
    "registers_per_block": "register limits",
    "memory_class_gib": "memory class",
    "driver": "driver release",
    "product": "product version",
}
"""Fields that the README calls otherwise than their names with blanks."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    program = write_version(directory / "model", block())
    tuner = tuner_of(program, PlanStore(directory / "plans"))
    tuner.tune(BUCKET, None)
    return tuner


def answers(tuned, compatibility, provenance):
    """What serves each segment on a machine like that."""
    cache = PlanCache(
        [tuned.store], compatibility, provenance, {"torch": TorchEngine(CPU)}, torch.device("cpu")
    )
    return cache.plan([(work.segment, work.sizes) for work in tuned.work(BUCKET)])


def changed(record, field):
    value = getattr(record, field)
    return replace(record, **{field: f"{value or ''}x" if isinstance(value, str | None) else value + 1})


def test_nothing_changed_serves_exactly(tuned):
    for answer in answers(tuned, cpu_compatibility(), current_provenance("cpu")):
        assert (answer.origin, answer.reason, answer.stale) == ("exact", "", ())


@pytest.mark.parametrize("field", [field.name for field in fields(Compatibility) if field.name != "kind"])
def test_a_field_that_must_match_makes_recipes_and_names_itself(tuned, field):
    for answer in answers(tuned, changed(cpu_compatibility(), field), current_provenance("cpu")):
        assert answer.origin == "recipe"
        assert f"{field}: " in answer.reason
        others = {f.name for f in fields(Compatibility)} - {field}
        assert not any(f"{other}: stored" in answer.reason for other in others)


def test_plans_of_a_gpu_are_nothing_to_a_cpu(tuned):
    for answer in answers(tuned, changed(cpu_compatibility(), "kind"), current_provenance("cpu")):
        assert answer.origin == "reference"


@pytest.mark.parametrize("field", [field.name for field in fields(Provenance)])
def test_any_other_field_serves_and_marks_stale(tuned, field):
    for answer in answers(tuned, cpu_compatibility(), changed(current_provenance("cpu"), field)):
        assert answer.origin == "exact"
        (stale,) = answer.stale
        assert stale.startswith(f"{field} ")


def test_the_readme_has_every_field_in_the_row_of_its_meaning():
    text = README.read_text()
    rows = re.findall(r"^\| ([^|]*) \| (plans of that environment|served)", text, re.MULTILINE)
    (must_match,) = [names for names, follows in rows if follows.startswith("plans")]
    (marks_stale,) = [names for names, follows in rows if follows == "served"]
    for rule in FIELD_RULES:
        if rule.field == "kind":
            continue  # GPU and CPU plans are said to be different things by the row itself
        row = must_match if rule.meaning == MUST_MATCH else marks_stale
        name = IN_WORDS.get(rule.field, rule.field.replace("_", " "))
        assert name in row or name in row.replace("CUDA", "cuda"), (rule.field, row)
