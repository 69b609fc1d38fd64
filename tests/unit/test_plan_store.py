"""The store: what is read is what was published, or a miss; writers never hurt each other or a reader."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudnn_fusion import devices, plan_store, sealed_files
from cudnn_fusion.environment import Compatibility, target_compatibility
from cudnn_fusion.plan import (
    BucketRecord,
    Candidate,
    Errors,
    Plan,
    PlanFormatError,
    PlanKey,
    SampledOutputs,
    canonical_json,
    sha256_hex,
)
from cudnn_fusion.plan_store import Found, Miss, PlanStore, PlanStoreError

H200 = target_compatibility(devices.load("h200"), 91900)
NEWER_CUDNN = replace(H200, cudnn=92000)
OTHER_GPU = replace(H200, device_name="NVIDIA H100 80GB HBM3", memory_class_gib=80)
CPU = Compatibility("cpu", "AMD EPYC", features="0" * 16, threads=2, torch="2.13.0")
BLOB = bytes(range(256)) * 20


def key(number: int = 0, validation: str = "samples-v1") -> PlanKey:
    sizes = (("x", (1, 64, 56, 56), (200704, 1, 3584, 64)), ("y", (1, number), (number, 1)))
    return PlanKey("5" * 64, sizes, "fp16", validation)


def plan_of(the_key: PlanKey, blob: bytes | None = BLOB, made_at: str = "", timed: bool = True) -> Plan:
    return Plan(
        key=the_key,
        candidate=Candidate("cudnn", "fused", "eng41_k2=3", 41, (("KERNEL_CFG", 3),)),
        workspace_bytes=4096,
        timed=timed,
        time_us=9.5 if timed else None,
        spread_us=0.25 if timed else None,
        torch_time_us=17.5,
        error=Errors(2.1e-4, 1e-5),
        torch_error=Errors(2.2e-4, 1.1e-5),
        checked_on="generated",
        sampled=SampledOutputs(7, (0.5, -1.25e-7, 3.0)),
        candidates_timed=12,
        rejected=(("cudnn:fused:eng32", "too slow"),),
        blob_sha256=None if blob is None else sha256_hex(blob),
        made_at=made_at,
        provenance={"product": "0.1.0", "driver": None},
    )


def tree(root: Path) -> dict[str, str]:
    """Every file under ``root`` with its content's hash, and every directory."""
    return {
        str(path.relative_to(root)): sha256_hex(path.read_bytes()) if path.is_file() else "directory"
        for path in sorted(root.rglob("*"))
    }


def entry_path(store: PlanStore, the_key: PlanKey, compatibility: Compatibility = H200) -> Path:
    return store.root / compatibility.hash() / "entries" / f"{the_key.digest()}.json"


def resealed(data: bytes, old: bytes, new: bytes) -> bytes:
    """A sealed file with changed content and a checksum that matches it."""
    assert old in data
    body = b"{" + data[len(b'{"sha256":"') + 64 + 2 :].replace(old, new)
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


@pytest.fixture
def filled(store: PlanStore) -> PlanStore:
    store.publish(H200, plan_of(key()), BLOB)
    return store


def missed(store: PlanStore, the_key: PlanKey, compatibility: Compatibility = H200) -> str:
    answer = store.find(compatibility, the_key)
    assert isinstance(answer, Miss)
    assert answer.reason
    assert "\n" not in answer.reason
    return answer.reason


class TestReading:
    def test_what_was_published_is_found(self, filled: PlanStore) -> None:
        assert filled.find(H200, key()) == Found(plan_of(key()), BLOB)

    def test_a_plan_without_a_blob_is_found_without_one(self, store: PlanStore) -> None:
        store.publish(CPU, plan_of(key(), None), None)
        assert store.find(CPU, key()) == Found(plan_of(key(), None), None)

    def test_files_are_readable_for_others_as_the_umask_says(self, filled: PlanStore) -> None:
        """The server often runs as another user than the tuner."""
        mask = os.umask(0)
        os.umask(mask)
        for path in filled.root.rglob("*.*"):
            assert path.stat().st_mode & 0o777 == 0o666 & ~mask

    def test_the_same_content_at_two_paths_gives_the_same_keys(
        self, filled: PlanStore, tmp_path: Path
    ) -> None:
        """Repositories are copied to a new temporary path at each start (triton server issue 4587)."""
        copy = PlanStore(tmp_path / "elsewhere" / "model" / "1" / "plans")
        shutil.copytree(filled.root, copy.root)
        assert copy.find(H200, key()) == filled.find(H200, key())
        again = PlanStore(tmp_path / "third")
        again.publish(H200, plan_of(key()), BLOB)
        assert tree(again.root) == tree(filled.root)

    def test_a_plan_checked_with_other_settings_is_not_found(self, store: PlanStore) -> None:
        """Tuned with checking off, asked for with checking on (tilelang issue 2793)."""
        store.publish(H200, plan_of(key(validation="unchecked")), BLOB)
        assert "no plan is stored for this segment" in missed(store, key())

    def test_reading_writes_nothing(self, filled: PlanStore, tmp_path: Path) -> None:
        before = tree(tmp_path)
        for store in (filled, PlanStore(tmp_path / "missing" / "plans")):
            for compatibility in (H200, CPU, NEWER_CUDNN):
                store.find(compatibility, key())
                store.find_elsewhere(compatibility, key())
                store.buckets(compatibility)
                store.buckets_elsewhere(compatibility)
                store.plans(compatibility.hash())
            store.environments()
            store.summary()
        assert tree(tmp_path) == before

    def test_an_environment_without_plans_says_so(self, filled: PlanStore) -> None:
        """openxla issue 13241: a valid manifest and nothing beside it."""
        shutil.rmtree(filled.root / H200.hash() / "entries")
        shutil.rmtree(filled.root / H200.hash() / "blobs")
        assert filled.plans(H200.hash()) == []
        assert "0 plans" in filled.summary()
        missed(filled, key())

    def test_an_empty_or_missing_store_says_0_plans(self, store: PlanStore) -> None:
        assert "0 plans" in store.summary()
        assert store.environments() == []
        assert "no plans for this environment" in missed(store, key())
        assert store.plans("../../../etc") == []

    def test_a_root_that_is_a_file_gives_misses_and_refuses_writes(self, tmp_path: Path) -> None:
        root = tmp_path / "plans"
        root.write_text("not a directory")
        store = PlanStore(root)
        missed(store, key())
        assert store.summary()
        with pytest.raises(PlanStoreError, match=f"cannot write {root}.*make its directory writable"):
            store.publish(H200, plan_of(key()), BLOB)

    def test_the_summary_counts(self, filled: PlanStore) -> None:
        filled.publish(H200, plan_of(key(1), timed=False), BLOB)
        filled.publish_bucket(H200, BucketRecord((("batch", 8),), "cd" * 32, (key().digest(),)))
        assert filled.summary().endswith("2 plans (1 timed), 1 buckets")
        assert "NVIDIA H200" in filled.summary()


class TestOtherEnvironments:
    def test_another_cudnn_is_a_miss_that_names_both_versions(self, filled: PlanStore) -> None:
        reason = missed(filled, key(), NEWER_CUDNN)
        assert "91900" in reason
        assert "92000" in reason

    def test_another_gpu_is_a_miss_that_names_both(self, filled: PlanStore) -> None:
        reason = missed(filled, key(), OTHER_GPU)
        assert "NVIDIA H200" in reason
        assert "NVIDIA H100 80GB HBM3" in reason

    def test_the_nearest_environment_is_named(self, filled: PlanStore) -> None:
        filled.publish(OTHER_GPU, plan_of(key()), BLOB)
        assert "device_name" not in missed(filled, key(), NEWER_CUDNN)

    def test_cpu_and_gpu_plans_are_never_offered_to_each_other(self, filled: PlanStore) -> None:
        assert filled.find_elsewhere(CPU, key()) == []
        assert "stored for another" not in missed(filled, key(), CPU)

    def test_elsewhere_gives_the_newest_first(self, store: PlanStore) -> None:
        for compatibility, made_at in ((H200, "2026-01-01T00:00:00"), (OTHER_GPU, "2026-03-01T00:00:00")):
            store.publish(compatibility, plan_of(key(), made_at=made_at), BLOB)
        assert [found for found, _ in store.find_elsewhere(NEWER_CUDNN, key())] == [OTHER_GPU, H200]
        assert [found for found, _ in store.find_elsewhere(H200, key())] == [OTHER_GPU]
        assert store.find_elsewhere(NEWER_CUDNN, key(5)) == []

    def test_several_environments_live_side_by_side(self, filled: PlanStore) -> None:
        """sglang issue 40320; and going back to an old library finds its plans again."""
        filled.publish(NEWER_CUDNN, plan_of(key(), b"newer"), b"newer")
        assert filled.find(H200, key()) == Found(plan_of(key()), BLOB)
        assert filled.find(NEWER_CUDNN, key()) == Found(plan_of(key(), b"newer"), b"newer")
        assert {stored.compatibility for stored in filled.environments()} == {H200, NEWER_CUDNN}

    def test_a_foreign_environment_is_left_exactly_as_it_is(self, filled: PlanStore) -> None:
        """TensorRT-LLM issue 17664: plans of another GPU are neither used nor stamped anew."""
        before = tree(filled.root / H200.hash())
        missed(filled, key(), OTHER_GPU)
        filled.publish(OTHER_GPU, plan_of(key()), BLOB)
        filled.merge_from(filled)
        assert tree(filled.root / H200.hash()) == before

    def test_a_foreign_manifest_in_this_environments_place_is_refused_and_kept(
        self, filled: PlanStore
    ) -> None:
        moved = filled.root / OTHER_GPU.hash()
        shutil.move(filled.root / H200.hash(), moved)
        before = tree(moved)
        assert "belongs to environment" in missed(filled, key(), OTHER_GPU)
        with pytest.raises(PlanStoreError, match=r"move .* away"):
            filled.publish(OTHER_GPU, plan_of(key(1)), BLOB)
        assert tree(moved) == before

    def test_an_entry_copied_from_another_environment_is_not_used(self, filled: PlanStore) -> None:
        filled.publish(OTHER_GPU, plan_of(key(1)), BLOB)
        shutil.copy(entry_path(filled, key()), entry_path(filled, key(), OTHER_GPU))
        assert "belongs to environment" in missed(filled, key(), OTHER_GPU)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def signed(body: bytes) -> bytes:
    """Any bytes as a file whose checksum matches: what a careless or hostile writer could make."""
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body[1:]


HEADER = f'{{"environment":"{H200.hash()}","format":1,"content":'.encode()
BAD_FILES: dict[str, bytes] = {
    "0 bytes": b"",
    "blank": b" \n",
    "no JSON": b"plans!",
    "invalid UTF-8": b"\xff\xfe{}",
    "another JSON": b"{}",
    "JSON null": b"null",
    "signed, empty": signed(b"{"),
    "signed, invalid UTF-8": signed(b'{"a":"\xff"}'),
    "signed, two documents": signed(HEADER + b"{}}{}"),
    "signed, absurd nesting": signed(HEADER + nested(100_000) + b"}"),
    "signed, deep nesting": signed(HEADER + nested(900) + b"}"),
    "signed, a huge integer": signed(HEADER + b"9" * 5000 + b"}"),
    "signed, infinity": signed(HEADER + b"1e999}"),
    "signed, NaN": signed(HEADER + b"NaN}"),
    "signed, a list": signed(b"[1]"),
    "signed, no content": signed(HEADER + b"null}"),
    "signed, lone surrogate": signed(HEADER + b'"\\ud800"}'),
}


class TestDamage:
    """pytorch issues 153791 and 119698: any damage is a miss and one warning, never a traceback."""

    @pytest.mark.parametrize("name", BAD_FILES)
    @pytest.mark.parametrize("place", ["entry", "manifest"])
    def test_a_damaged_file_is_a_miss_and_one_warning(
        self, filled: PlanStore, caplog: pytest.LogCaptureFixture, place: str, name: str
    ) -> None:
        manifest = filled.root / H200.hash() / "manifest.json"
        path = manifest if place == "manifest" else entry_path(filled, key())
        path.write_bytes(BAD_FILES[name])
        with caplog.at_level(logging.WARNING, "cudnn_fusion.plan_store"):
            for _ in range(3):
                missed(filled, key())
                assert filled.plans(H200.hash()) == []
                assert filled.find_elsewhere(NEWER_CUDNN, key()) == []
                assert filled.environments()
        (record,) = caplog.records
        assert str(path) in record.getMessage()
        assert record.exc_info is None

    def test_two_documents_in_one_file_are_a_miss(self, filled: PlanStore) -> None:
        path = entry_path(filled, key())
        path.write_bytes(path.read_bytes() * 2)
        assert "checksum" in missed(filled, key())

    def test_one_damaged_file_does_not_hide_the_others(self, filled: PlanStore) -> None:
        filled.publish(H200, plan_of(key(1)), BLOB)
        entry_path(filled, key()).write_bytes(b"")
        assert filled.plans(H200.hash()) == [plan_of(key(1))]
        assert isinstance(filled.find(H200, key(1)), Found)

    @pytest.mark.parametrize("bad", [BLOB[:-1], b"", b"XXXX" + BLOB[4:], BLOB + b"\0"])
    def test_a_blob_that_does_not_match_its_checksum_is_not_returned(
        self, filled: PlanStore, bad: bytes
    ) -> None:
        """Truncated, or wrong from the first bytes on (TensorRT issue 3566)."""
        (path,) = filled.root.rglob("*.plan")
        path.write_bytes(bad)
        assert "do not match their checksum" in missed(filled, key())
        filled.publish(H200, plan_of(key()), BLOB)
        assert filled.find(H200, key()) == Found(plan_of(key()), BLOB)

    def test_a_missing_blob_is_a_miss(self, filled: PlanStore) -> None:
        next(filled.root.rglob("*.plan")).unlink()
        assert "is missing" in missed(filled, key())

    def test_garbage_that_was_published_comes_back_as_it_is(self, store: PlanStore) -> None:
        """Whether a blob means anything is for the engine to say: the store only vouches for its bytes."""
        store.publish(H200, plan_of(key(), b"garbage"), b"garbage")
        assert store.find(H200, key()) == Found(plan_of(key(), b"garbage"), b"garbage")

    def test_swapped_entries_are_misses(self, filled: PlanStore) -> None:
        filled.publish(H200, plan_of(key(1)), BLOB)
        one, two = entry_path(filled, key()), entry_path(filled, key(1))
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        assert "another key" in missed(filled, key())
        assert "another key" in missed(filled, key(1))
        assert filled.plans(H200.hash()) == []

    def test_another_format_version_is_a_miss_that_names_both(self, filled: PlanStore) -> None:
        path = entry_path(filled, key())
        path.write_bytes(resealed(path.read_bytes(), b'"format":1', b'"format":2'))
        assert "has format version 2, expected 1" in missed(filled, key())

    def test_a_plan_with_a_wrong_field_is_a_miss_that_names_it(self, filled: PlanStore) -> None:
        path = entry_path(filled, key())
        path.write_bytes(resealed(path.read_bytes(), b'"time_us":9.5', b'"time_us":"9.5"'))
        assert "Plan.time_us is '9.5', expected float" in missed(filled, key())

    def test_a_manifest_that_lies_is_a_miss(self, filled: PlanStore) -> None:
        path = filled.root / H200.hash() / "manifest.json"
        path.write_bytes(resealed(path.read_bytes(), b'"cudnn":91900', b'"cudnn":92000'))
        assert "describes another environment" in missed(filled, key())

    def test_plans_without_a_manifest_are_not_used(self, filled: PlanStore) -> None:
        (filled.root / H200.hash() / "manifest.json").unlink()
        assert "is missing, although plans lie beside it" in missed(filled, key())

    @pytest.mark.parametrize("place", ["manifest.json", "entry", "blob"])
    def test_a_directory_or_a_pipe_in_a_files_place_is_a_miss(self, filled: PlanStore, place: str) -> None:
        path = {
            "manifest.json": filled.root / H200.hash() / "manifest.json",
            "entry": entry_path(filled, key()),
            "blob": next(filled.root.rglob("*.plan")),
        }[place]
        path.unlink()
        os.mkfifo(path)
        assert "is not a regular file" in missed(filled, key())
        path.unlink()
        path.mkdir()
        assert path.name in missed(filled, key())
        filled.summary()

    def test_a_file_that_may_not_be_read_is_a_miss(
        self, filled: PlanStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(sealed_files.os, "open", refuse)
        assert "Permission denied" in missed(filled, key())
        assert filled.environments()[0].compatibility is None
        with pytest.raises(PlanStoreError):
            filled.publish(H200, plan_of(key()), BLOB)

    def test_a_link_that_goes_round_is_a_miss(self, filled: PlanStore) -> None:
        path = entry_path(filled, key())
        path.unlink()
        path.symlink_to(path)
        assert "cannot be read" in missed(filled, key())

    def test_no_flipped_bit_changes_what_is_returned(self, filled: PlanStore) -> None:
        seed = int(os.environ.get("TEST_SEED", "20261202"))
        generator = random.Random(seed)
        paths = [path for path in filled.root.rglob("*") if path.is_file()]
        assert len(paths) == 3
        for path in paths:
            good = path.read_bytes()
            for _ in range(int(os.environ.get("BIT_FLIPS", "80"))):
                position, bit = generator.randrange(len(good)), generator.randrange(8)
                bad = bytearray(good)
                bad[position] ^= 1 << bit
                path.write_bytes(bad)
                answer = PlanStore(filled.root).find(H200, key())
                assert isinstance(answer, Miss), f"TEST_SEED={seed}: {path.name}, byte {position}, bit {bit}"
            path.write_bytes(good)
        assert isinstance(filled.find(H200, key()), Found)

    def test_no_truncation_is_read(self, filled: PlanStore) -> None:
        for path in [path for path in filled.root.rglob("*") if path.is_file()]:
            good = path.read_bytes()
            for length in range(0, len(good), max(1, len(good) // 40)):
                path.write_bytes(good[:length])
                missed(filled, key())
            path.write_bytes(good)


class TestWriting:
    def test_a_newer_plan_replaces_the_older(self, filled: PlanStore) -> None:
        newer = replace(plan_of(key(), b"newer"), time_us=8.0)
        filled.publish(H200, newer, b"newer")
        assert filled.find(H200, key()) == Found(newer, b"newer")

    def test_a_blob_that_is_not_the_plans_is_refused(self, store: PlanStore) -> None:
        for plan, blob in ((plan_of(key()), b"other"), (plan_of(key()), None), (plan_of(key(), None), BLOB)):
            with pytest.raises(PlanFormatError, match="blob_sha256"):
                store.publish(H200, plan, blob)
        assert not store.root.exists()

    def test_a_plan_that_could_not_be_read_back_is_refused(self, store: PlanStore) -> None:
        wrong: list[Any] = [
            replace(plan_of(key()), time_us=float("nan")),
            replace(plan_of(key()), checked_on="maybe"),
            replace(plan_of(key()), behavior_notes=["a list"]),  # type: ignore[arg-type]
        ]
        for plan in wrong:
            with pytest.raises(PlanFormatError):
                store.publish(H200, plan, BLOB)
        assert not store.root.exists()

    def test_a_full_disk_is_said_and_leaves_nothing_behind(
        self, filled: PlanStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        before = tree(filled.root)
        monkeypatch.setattr(sealed_files.os, "fsync", full)
        with pytest.raises(PlanStoreError, match=r"No space left on device; .* free some space"):
            filled.publish(H200, plan_of(key(1), b"new"), b"new")
        assert tree(filled.root) == before

    def test_buckets_come_back_by_program(self, filled: PlanStore) -> None:
        records = [
            BucketRecord((("batch", size),), program * 32, (key().digest(),), 486.0, 1157.0)
            for program in ("ab", "cd")
            for size in (1, 8)
        ]
        for record in records:
            filled.publish_bucket(H200, record)
        assert filled.buckets(H200, "ab" * 32) == records[:2]
        assert len(filled.buckets(H200)) == 4
        assert filled.buckets(NEWER_CUDNN) == []
        assert filled.buckets_elsewhere(NEWER_CUDNN, "cd" * 32) == records[2:]
        assert filled.buckets_elsewhere(H200) == []

    def test_a_damaged_or_renamed_bucket_is_left_out(self, filled: PlanStore) -> None:
        for size in (1, 8, 16):
            filled.publish_bucket(H200, BucketRecord((("batch", size),), "ab" * 32, ()))
        first, _, last = sorted((filled.root / H200.hash() / "buckets").iterdir())
        first.write_bytes(b"{}")
        last.rename(last.with_name("renamed.json"))
        assert len(filled.buckets(H200)) == 1

    def test_a_bucket_with_very_many_axes_has_a_file_name_that_fits(self, store: PlanStore) -> None:
        record = BucketRecord(tuple((f"axis_{number:03}", 1) for number in range(60)), "ab" * 32, ())
        store.publish_bucket(H200, record)
        assert store.buckets(H200) == [record]

    def test_publishing_from_eight_processes_keeps_everything(self, store: PlanStore) -> None:
        """TensorRT-LLM issue 14441: tuners of one directory."""
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=publish_many, args=(store.root, first)) for first in range(8)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            for plan in store.plans(H200.hash()):
                assert isinstance(store.find(H200, plan.key), Found)
        for writer in writers:
            writer.join()
        assert [writer.exitcode for writer in writers] == [0] * 8
        for number in range(16):
            blob = bytes([number]) * 100
            found = store.find(H200, key(number))
            assert isinstance(found, Found)
            assert found.blob == blob
        assert not store._warned
        assert not list(store.root.rglob(".tmp-*"))

    def test_a_killed_publisher_leaves_nothing_half_written_to_be_read(self, store: PlanStore) -> None:
        program = (
            "import sys; from pathlib import Path\n"
            "sys.path.insert(0, sys.argv[1]); import test_plan_store as t\n"
            "store = t.PlanStore(Path(sys.argv[2])); print('ready', flush=True); number = 0\n"
            "while True:\n"
            "    blob = bytes([number % 7]) * 200_000\n"
            "    store.publish(t.H200, t.plan_of(t.key(number % 7), blob), blob); number += 1\n"
        )
        arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(store.root)]
        generator = random.Random(3)
        for _ in range(3):
            with subprocess.Popen(arguments, stdout=subprocess.PIPE) as publisher:
                assert publisher.stdout is not None
                publisher.stdout.readline()
                time.sleep(0.1 + generator.random() / 10)
                publisher.send_signal(signal.SIGKILL)
            fresh = PlanStore(store.root)
            plans = fresh.plans(H200.hash())
            for plan in plans:
                assert isinstance(fresh.find(H200, plan.key), Found)
            assert not fresh._warned
        assert plans


def publish_many(root: Path, first: int) -> None:
    """Two processes publish each key, every process in an order of its own."""
    store = PlanStore(root)
    for step in range(4):
        number = (first * 2 + step) % 16
        blob = bytes([number]) * 100
        store.publish(H200, plan_of(key(number), blob), blob)


class TestMerging:
    def test_everything_finished_is_copied_and_counted(self, filled: PlanStore, tmp_path: Path) -> None:
        record = BucketRecord((("batch", 8),), "cd" * 32, (key().digest(),))
        filled.publish_bucket(H200, record)
        filled.publish(CPU, plan_of(key(2), None), None)
        (filled.root / H200.hash() / "blobs" / ".tmp-1-abc").write_bytes(b"half")
        target = PlanStore(tmp_path / "model" / "1" / "plans")
        assert target.merge_from(filled) == 2
        assert target.find(H200, key()) == Found(plan_of(key()), BLOB)
        assert target.find(CPU, key(2)) == Found(plan_of(key(2), None), None)
        assert target.buckets(H200) == [record]
        assert not [name for name in tree(target.root) if "/." in f"/{name}"]

    def test_of_chosen_plans_only_these_come_with_the_buckets_that_they_fill(
        self, filled: PlanStore, tmp_path: Path
    ) -> None:
        filled.publish(H200, plan_of(key(1), b"one"), b"one")
        filled.publish(CPU, plan_of(key(), None), None)
        whole = BucketRecord((("batch", 8),), "cd" * 32, (key().digest(),))
        more = BucketRecord((("batch", 9),), "cd" * 32, (key().digest(), key(1).digest()))
        for record in (whole, more):
            filled.publish_bucket(H200, record)
        target = PlanStore(tmp_path / "target")
        assert target.merge_from(filled, {H200.hash(): {key(7).digest()}}) == 0
        assert not target.root.exists()
        assert target.merge_from(filled, {H200.hash(): {key().digest()}}) == 1
        assert [stored.hash for stored in target.environments()] == [H200.hash()]
        assert [plan.key for plan in target.plans(H200.hash())] == [key()]
        assert target.buckets(H200) == [whole]

    def test_a_second_merge_changes_nothing(self, filled: PlanStore, tmp_path: Path) -> None:
        """A change in the model directory makes the server reload the model."""
        target = PlanStore(tmp_path / "target")
        target.merge_from(filled)
        times = {path: path.stat().st_mtime_ns for path in target.root.rglob("*")}
        assert target.merge_from(filled) == 0
        assert {path: path.stat().st_mtime_ns for path in target.root.rglob("*")} == times

    def test_a_damaged_plan_is_not_copied_and_a_damaged_copy_is_repaired(
        self, filled: PlanStore, tmp_path: Path
    ) -> None:
        target = PlanStore(tmp_path / "target")
        filled.publish(H200, plan_of(key(1), b"one"), b"one")
        good = entry_path(filled, key(1)).read_bytes()
        entry_path(filled, key(1)).write_bytes(b"")
        assert target.merge_from(filled) == 1
        entry_path(filled, key(1)).write_bytes(good)
        entry_path(target, key()).write_bytes(b"")
        assert target.merge_from(filled) == 2
        assert isinstance(target.find(H200, key()), Found)

    def test_an_untimed_plan_never_replaces_a_timed_one_and_the_newer_wins_else(self, tmp_path: Path) -> None:
        old, new = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
        cases = [  # (timed, made at) there, (timed, made at) coming, whether it replaces
            ((True, old), (False, new), False),
            ((False, new), (True, old), True),
            ((True, old), (True, new), True),
            ((True, new), (True, old), False),
            ((False, old), (False, new), True),
        ]
        for number, (there, coming, replaces) in enumerate(cases):
            target, source = PlanStore(tmp_path / f"target{number}"), PlanStore(tmp_path / f"source{number}")
            present, incoming = (
                plan_of(key(), timed=timed, made_at=made_at) for timed, made_at in (there, coming)
            )
            target.publish(H200, present, BLOB)
            source.publish(H200, incoming, BLOB)
            assert target.merge_from(source) == replaces
            assert target.find(H200, key()) == Found(incoming if replaces else present, BLOB)

    def test_a_new_environment_appears_in_one_step(
        self, filled: PlanStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(1, 4):
            filled.publish(H200, plan_of(key(number)), BLOB)
        target = PlanStore(tmp_path / "target")
        seen: list[list[str]] = []
        write = plan_store.write

        def observed(path: Path, data: bytes) -> None:
            write(path, data)
            seen.append([stored.hash for stored in target.environments()])
            assert not (target.root / H200.hash()).exists()

        monkeypatch.setattr(plan_store, "write", observed)
        assert target.merge_from(filled) == 4
        assert len(seen) == 6
        assert not any(seen)
        assert len(target.plans(H200.hash())) == 4

    def test_a_writer_that_comes_first_loses_nothing(
        self, filled: PlanStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = PlanStore(tmp_path / "target")
        rename = os.rename

        def late(source: Path, destination: Path) -> None:
            monkeypatch.setattr(plan_store.os, "rename", rename)
            target.publish(H200, plan_of(key(7)), BLOB)
            rename(source, destination)

        monkeypatch.setattr(plan_store.os, "rename", late)
        assert target.merge_from(filled) == 1
        assert {plan.key for plan in target.plans(H200.hash())} == {key(), key(7)}
        assert not list(target.root.glob(".incoming-*"))

    def test_a_store_without_plans_brings_nothing(self, store: PlanStore, tmp_path: Path) -> None:
        target = PlanStore(tmp_path / "target")
        assert target.merge_from(store) == 0
        shutil.rmtree(store.root, ignore_errors=True)
        store.publish_bucket(H200, BucketRecord((), "cd" * 32, ()))
        assert target.merge_from(store) == 0
        assert not target.root.exists()

    def test_a_target_that_cannot_be_written_is_said(self, filled: PlanStore, tmp_path: Path) -> None:
        root = tmp_path / "file"
        root.write_text("")
        with pytest.raises(PlanStoreError, match="cannot write"):
            PlanStore(root).merge_from(filled)


def test_an_entry_is_one_line_of_plain_json(filled: PlanStore) -> None:
    import json

    document = json.loads(entry_path(filled, key()).read_text())
    assert Plan.from_json(document["content"]) == plan_of(key())
    digest = document.pop("sha256")
    assert digest == sha256_hex(canonical_json(document).encode())
