"""Plans and buckets as JSON: what was written comes back, anything else is refused with a reason."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from cudnn_fusion.plan import (
    BucketRecord,
    Candidate,
    Errors,
    Plan,
    PlanFormatError,
    PlanKey,
    SampledOutputs,
    canonical_json,
    moment,
    now_text,
)
from cudnn_fusion.shapes import Bucket

KEY = PlanKey("5" * 64, (("x", (8, 64, 56, 56), (200704, 1, 3584, 64)), ("y", (), ())), "fp16", "samples-v1")
PLAN = Plan(
    key=KEY,
    candidate=Candidate("cudnn", "fused", "eng41_k2=3", 41, (("KERNEL_CFG", 3), ("SPLIT_K", -1)), True),
    workspace_bytes=4096,
    timed=True,
    time_us=9.9,
    spread_us=0.25,
    torch_time_us=17.5,
    error=Errors(2.1e-4, 1e-5),
    torch_error=Errors(2.2e-4, 1.1e-5),
    checked_on="generated",
    sampled=SampledOutputs(7, (0.5, -1.25, 3.0)),
    candidates_timed=12,
    rejected=(("cudnn:fused:eng32", "error 0.3 is above 0.001"),),
    behavior_notes=("RUNTIME_COMPILATION",),
    selected_engine="",
    blob_sha256="ab" * 32,
    made_at="2026-12-01T10:00:00+00:00",
    provenance={"product": "0.1.0", "torch": "2.13.0", "driver": None},
)
BUCKET = BucketRecord((("batch", 8), ("height", 224)), "cd" * 32, (KEY.digest(),), 486.0, 1157.0)


def through_text(content: Any) -> Any:
    return json.loads(canonical_json(content))


def test_a_plan_comes_back_as_it_was_written() -> None:
    assert Plan.from_json(through_text(PLAN.to_json())) == PLAN


def test_a_plan_without_optional_parts_comes_back() -> None:
    plan = replace(
        PLAN, timed=False, time_us=None, spread_us=None, torch_time_us=None, error=None, torch_error=None
    )
    plan = replace(plan, sampled=None, checked_on="none", blob_sha256=None, made_at="", provenance={})
    assert Plan.from_json(through_text(plan.to_json())) == plan


def test_a_bucket_record_comes_back_and_names_its_bucket() -> None:
    assert BucketRecord.from_json(through_text(BUCKET.to_json())) == BUCKET
    assert BUCKET.bucket == Bucket.of({"height": 224, "batch": 8})
    static = BucketRecord((), "cd" * 32, ())
    assert BucketRecord.from_json(through_text(static.to_json())) == static


def test_a_key_comes_back_with_the_same_digest() -> None:
    again = PlanKey.from_json(through_text(KEY.to_json()))
    assert again == KEY
    assert again.digest() == KEY.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "6" * 64},
        {"sizes": (("x", (8, 64, 56, 56), (200704, 3136, 56, 1)), ("y", (), ()))},
        {"precision": "tf32"},
        {"validation": "unchecked"},
    ],
)
def test_every_part_of_a_key_changes_its_digest(change: dict[str, Any]) -> None:
    """Layouts are part of it, as in pytorch issue 81106."""
    assert replace(KEY, **change).digest() != KEY.digest()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("time_us",), "9.9", "Plan.time_us is '9.9', expected float"),
        (("time_us",), float("nan"), "Plan.time_us is nan"),
        (("time_us",), float("inf"), "Plan.time_us is inf"),
        (("time_us",), -1.0, "time_us is -1.0, expected 0 or more"),
        (("time_us",), None, "a time if and only if timed"),
        (("timed",), False, "a time if and only if timed"),
        (("timed",), 1, "Plan.timed is 1, expected bool"),
        (("workspace_bytes",), True, "Plan.workspace_bytes is True, expected int"),
        (("workspace_bytes",), 1.5, "expected int"),
        (("workspace_bytes",), 2**63, "an integer of more than 63 bits"),
        (("workspace_bytes",), -5, "0 or more"),
        (("checked_on",), "sample", "one of samples, generated, none"),
        (("candidate", "engine"), "tensorrt", "one of cudnn, depthwise, inductor, stem, torch"),
        (("candidate", "knobs"), [["A"]], "has 1 items, expected 2"),
        (("candidate",), [], "expected an object"),
        (("error", "rms"), -1e-9, "0 or more"),
        (("sampled", "values"), [0.5, None], "expected float"),
        (("sampled", "values"), "0.5", "expected a list"),
        (("key", "sizes"), [["x", [1, 2], [1]]], "a stride for each dimension"),
        (("key", "sizes"), [["x", [-1], [1]]], "sizes of 0 or more"),
        (("blob_sha256",), "../../etc/passwd", "64 hex digits"),
        (("made_at",), "yesterday", "ISO 8601"),
        (("provenance",), {"driver": ["580"]}, "expected text, numbers or null"),
        (("surprise",), 1, "unknown field 'surprise'"),
    ],
)
def test_a_plan_with_one_wrong_field_is_refused_and_the_field_named(
    path: tuple[str, ...], value: object, told: str
) -> None:
    content: Any = copy.deepcopy(PLAN.to_json())
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(PlanFormatError) as problem:
        Plan.from_json(content)
    assert told in str(problem.value)


@pytest.mark.parametrize("name", sorted(PLAN.to_json()))
def test_a_plan_that_lacks_a_field_is_refused(name: str) -> None:
    content = PLAN.to_json()
    del content[name]
    with pytest.raises(PlanFormatError, match=f"lacks the field '{name}'"):
        Plan.from_json(content)


@pytest.mark.parametrize("content", [None, [], "plan", 3, {}])
def test_what_is_no_plan_at_all_is_refused(content: object) -> None:
    with pytest.raises(PlanFormatError):
        Plan.from_json(content)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [["height", 1], ["batch", 1]]},
        {"sizes": [["batch", 1], ["batch", 2]]},
        {"sizes": [["../batch", 1]]},
        {"sizes": [["batch", -1]]},
        {"program_sha256": "short"},
        {"entries": ["../x"]},
        {"model_time_us": -1.0},
    ],
)
def test_a_wrong_bucket_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanFormatError):
        BucketRecord.from_json({**BUCKET.to_json(), **change})


def test_a_timed_plan_never_yields_to_an_untimed_one_and_else_the_newer_wins() -> None:
    untimed = replace(PLAN, timed=False, time_us=None, made_at="2030-01-01T00:00:00+00:00")
    newer = replace(PLAN, made_at="2026-12-01T12:00:00+01:00")
    assert PLAN.is_better_than(untimed)
    assert not untimed.is_better_than(PLAN)
    assert newer.is_better_than(PLAN)
    assert not PLAN.is_better_than(newer)
    assert not PLAN.is_better_than(PLAN)


def test_times_are_compared_as_moments_not_as_text() -> None:
    assert moment("2026-12-01T10:30:00+02:00") < moment("2026-12-01T09:00:00+00:00")
    assert moment("") < moment("2026-12-01T09:00:00") < moment(now_text()).replace(year=9000)
