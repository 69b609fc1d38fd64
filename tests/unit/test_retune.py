"""Tuning again where plans of another environment lie, within a time, by one process for all."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from filelock import FileLock
from programs import CPU, block, tuner_of, write_version

from cudnn_fusion import retune
from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.pretuning import Pretuning
from cudnn_fusion.retune import retune_in_child, untuned_here
from cudnn_fusion.retune_child import retune as retune_here
from cudnn_fusion.settings import Settings, SettingsError
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.trust import distrust

HERE = cpu_compatibility()
ELSEWHERE = replace(HERE, threads=(HERE.threads or 0) + 62)
BUCKETS = [Bucket.of({"batch": 4}), Bucket.of({"batch": 2})]


@pytest.fixture
def moved(tmp_path):
    """A version whose plans at `BUCKETS` were tuned with other threads than here, and its program."""
    program = write_version(tmp_path / "model", block())
    tuner = tuner_of(program, PlanStore(tmp_path / "tuned"))
    store = PlanStore(tmp_path / "model" / "1" / "plans")
    for bucket in BUCKETS:
        tuner.tune(bucket, None)
    for plan in tuner.store.plans(HERE.hash()):
        found = tuner.store.find(HERE, plan.key)
        assert isinstance(found, Found)
        store.publish(ELSEWHERE, found.plan, found.blob)
    for record in tuner.store.buckets(HERE):
        store.publish_bucket(ELSEWHERE, record)
    (tmp_path / "overlay").mkdir()
    return tmp_path / "model" / "1", program, tmp_path / "overlay"


def test_buckets_of_other_environments_are_untuned_here_until_they_are_tuned(moved):
    version, program, overlay = moved
    stores = [PlanStore(version / "plans"), PlanStore(overlay)]
    assert untuned_here(stores, HERE, program.sha256) == BUCKETS
    assert untuned_here(stores, ELSEWHERE, program.sha256) == []
    assert untuned_here(stores, HERE, "0" * 64) == []
    told = retune_here(version, overlay, CPU, BUCKETS[1:], 1000)
    assert told.startswith("tuned again: batch=2 (")
    assert untuned_here(stores, HERE, program.sha256) == BUCKETS[:1]
    assert PlanStore(version / "plans").buckets(HERE) == []


def test_the_child_tunes_into_the_overlay(moved):
    version, _, overlay = moved
    told = retune_in_child(version, overlay / "new", CPU, BUCKETS, 300)
    assert told.startswith("tuned again: batch=4, batch=2 (")
    assert [record.bucket for record in PlanStore(overlay / "new").buckets(HERE)] == BUCKETS[::-1]


def test_no_bucket_begins_after_the_budget(moved):
    version, _, overlay = moved
    assert retune_here(version, overlay, CPU, BUCKETS, 0) == (
        "tuned again: nothing (0 candidates timed); not yet: batch=4, batch=2"
    )


def test_a_child_that_takes_longer_is_ended(moved):
    version, _, overlay = moved
    began = time.monotonic()
    told = retune_in_child(version, overlay, CPU, BUCKETS, 0.5)
    assert time.monotonic() - began < 10
    assert "not finished within RETUNE_BUDGET_S=0.5; the next start goes on" in told


def test_one_process_tunes_for_all(moved):
    version, _, overlay = moved
    with FileLock(overlay / f".retune-{HERE.hash()}.lock"):
        told = retune_here(version, overlay, CPU, BUCKETS, 0.3)
    assert told == "another process tunes for this overlay at the moment"
    assert PlanStore(overlay).environments() == []
    assert retune_here(version, overlay, CPU, BUCKETS, 1000).startswith("tuned again: batch=4, batch=2")


def test_what_an_ended_child_has_finished_is_not_tuned_again(moved):
    version, _, overlay = moved

    def interrupt(outcome):
        raise KeyboardInterrupt

    opened = Pretuning.open_version(version, CPU, staging=overlay / ".staging", overlay=overlay)
    with closing(opened), pytest.raises(KeyboardInterrupt):
        opened.run(BUCKETS[:1], None, interrupt)
    assert PlanStore(overlay).buckets(HERE) == []
    first = opened.tuner.timed_candidates
    told = retune_here(version, overlay, CPU, BUCKETS[:1], 1000)
    timed = int(told.split("(")[1].split()[0])
    assert 0 < timed < 2 * first
    assert len(PlanStore(overlay).buckets(HERE)) == 1


def test_two_processes_at_once_tune_everything_once(moved):
    """The second waits, and finds it done."""
    version, program, overlay = moved
    with ThreadPoolExecutor(2) as both:
        told = list(both.map(lambda _: retune_in_child(version, overlay, CPU, BUCKETS, 300), range(2)))
    assert all(text.startswith("tuned again: batch=4, batch=2 (") for text in told)
    assert sum("(0 candidates timed)" in text for text in told) == 1
    assert untuned_here([PlanStore(overlay)], HERE, program.sha256) == []


def test_what_others_could_have_put_there_is_not_read_by_the_child(moved):
    version, _, overlay = moved
    overlay.chmod(0o777)
    told = retune_in_child(version, overlay, CPU, BUCKETS, 100)
    assert told.startswith("not tuned again: the overlay is not trusted: ")
    assert list(overlay.iterdir()) == []


def test_a_loose_umask_makes_no_overlay_that_the_server_refuses(moved):
    version, _, overlay = moved
    before = os.umask(0o002)
    try:
        told = retune_in_child(version, overlay / "new", CPU, BUCKETS[1:], 300)
    finally:
        os.umask(before)
    assert told.startswith("tuned again: batch=2 (")
    assert distrust(overlay / "new") is None


@pytest.mark.parametrize(
    ("version", "overlay", "told"),
    [
        ("no such version", "overlay", "not tuned again: "),
        (None, "/proc/no/overlay", "not tuned again: "),
    ],
)
def test_a_child_that_cannot_work_says_why(moved, tmp_path, version, overlay, told):
    known = moved[0] if version is None else tmp_path / version
    assert retune_in_child(known, tmp_path / overlay, CPU, BUCKETS, 100).startswith(told)


def test_a_child_that_cannot_be_started_says_why(moved, monkeypatch):
    monkeypatch.setattr(retune, "interpreter", lambda: "/no/python")
    told = retune_in_child(moved[0], moved[2], CPU, BUCKETS, 100)
    assert "the tuning process cannot be started" in told


def test_the_parameters_ask_for_an_overlay_and_no_signatures():
    overlay = {"PLAN_OVERLAY": "/overlay"}
    assert Settings.from_parameters({}).retune == "never"
    settings = Settings.from_parameters({"RETUNE": "load", "RETUNE_BUDGET_S": "7", **overlay})
    assert (settings.retune, settings.retune_budget_s) == ("load", 7)
    with pytest.raises(SettingsError, match="PLAN_OVERLAY must say where its plans go"):
        Settings.from_parameters({"RETUNE": "load"})
    with pytest.raises(SettingsError, match="one of never, load"):
        Settings.from_parameters({"RETUNE": "always", **overlay})
    signed = {"PLAN_TRUST": "signed", "PLAN_PUBLIC_KEY": "k"}
    with pytest.raises(SettingsError, match="nobody signs its plans"):
        Settings.from_parameters({"RETUNE": "load", **overlay, **signed})
