"""Stores of plans kept in order: what is damaged or left over, what differs, what an archive carries."""

import io
import os
import shutil
import tarfile
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from programs import block, tuner_of, write_version
from typer.testing import CliRunner

from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.plan import sha256_hex
from cudnn_fusion.plan_store import Found, PlanStore
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.store_upkeep import StoreKeeper, UpkeepError, differences
from tools.plans import app

HERE = cpu_compatibility()
OTHER = replace(HERE, device_name="Another CPU")


def plans(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result) -> str:
    return " ".join((result.stdout + result.stderr).split())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    directory = tmp_path_factory.mktemp("repository") / "block"
    program = write_version(directory, block())
    tuner_of(program, PlanStore(directory / "1" / "plans")).tune(Bucket.of({"batch": 2}), None)
    return directory


@pytest.fixture
def model(tuned, tmp_path):
    """A model tuned on this CPU at batch 2, and a blob of each of its plans."""
    directory = shutil.copytree(tuned, tmp_path / "block")
    store = PlanStore(directory / "1" / "plans")
    for plan in store.plans(HERE.hash()):
        blob = plan.key.digest().encode()
        store.publish(HERE, with_blob(plan, blob), blob)
    return directory


def with_blob(plan, blob):
    return replace(plan, blob_sha256=sha256_hex(blob))


def keeper(model):
    return StoreKeeper(model / "1" / "plans")


def files(model, pattern):
    return sorted((model / "1" / "plans" / HERE.hash()).glob(pattern))


class TestProblems:
    def test_a_store_as_it_was_published_has_none(self, model):
        assert list(keeper(model).problems()) == []

    @pytest.mark.parametrize(
        ("pattern", "damage", "words"),
        [
            ("entries/*.json", lambda path: path.write_bytes(path.read_bytes()[:-9]), "checksum"),
            ("entries/*.json", lambda path: path.write_bytes(b"\0" * 100), "checksum"),
            ("blobs/*.plan", lambda path: path.write_bytes(b"other"), "do not match their checksum"),
            ("blobs/*.plan", os.remove, "is missing"),
            ("buckets/*.json", lambda path: path.write_bytes(b"{}"), ""),
            ("manifest.json", lambda path: path.write_bytes(b"{}"), ""),
        ],
    )
    def test_every_damaged_file_is_named(self, model, pattern, damage, words):
        path = files(model, pattern)[0]
        damage(path)
        found = {problem.path: problem.reason for problem in keeper(model).problems()}
        assert words in found[path]
        result = plans("verify", model, "--files-only")
        assert result.exit_code == 1
        assert str(path) in result.stdout

    def test_a_bucket_that_names_an_absent_plan_is_one(self, model):
        entry = files(model, "entries/*.json")[0]
        entry.unlink()
        (problem,) = keeper(model).problems()
        assert problem.path == files(model, "buckets/*.json")[0]
        assert problem.reason == "names 1 plans that are not usable here"


class TestVerify:
    def test_plans_are_loaded_and_compared_here(self, tuned):
        result = plans("verify", tuned)
        assert result.exit_code == 0, result.stdout
        assert "0 problems" in result.stdout
        assert "2 layers x buckets, 0 not served by the stored plan" in words(result)

    def test_a_plan_that_does_not_load_here_is_named(self, model):
        store = PlanStore(model / "1" / "plans")
        plan = store.plans(HERE.hash())[0]
        foreign = replace(plan.candidate, engine="cudnn", form="conv2d")
        store.publish(HERE, replace(with_blob(plan, b"x"), candidate=foreign), b"x")
        result = plans("verify", model)
        assert result.exit_code == 1
        assert "1 not served by the stored plan" in words(result)
        assert "engine cudnn is not available" in words(result)

    def test_nothing_tuned_here_is_said(self, tuned, tmp_path):
        directory = shutil.copytree(tuned, tmp_path / "block")
        keeper_ = keeper(directory)
        os.rename(keeper_.root, directory / "elsewhere")
        result = plans("verify", directory)
        assert "nothing is tuned for this machine" in words(result)


class TestLeftovers:
    def later(self, days):
        return datetime.now(UTC) + timedelta(days=days)

    def test_an_environment_untouched_for_long_goes_and_this_one_stays(self, model):
        store = PlanStore(model / "1" / "plans")
        plan = store.plans(HERE.hash())[0]
        store.publish(OTHER, with_blob(plan, b"blob"), b"blob")
        found = keeper(model).leftovers(timedelta(days=100), self.later(101), keep=HERE)
        assert [leftover.path.name for leftover in found] == [OTHER.hash()]
        assert found[0].bytes > 4
        assert keeper(model).leftovers(timedelta(days=100), self.later(99), keep=HERE) == []
        keeper(model).remove(found[0])
        assert [e.compatibility for e in store.environments()] == [HERE]
        assert [path.name for path in store.root.iterdir()] == [HERE.hash()]
        keeper(model).remove(found[0])  # another one was faster

    def test_a_blob_that_no_plan_names_goes_once_it_is_old(self, model):
        blob = files(model, "blobs/*.plan")[0].with_name(f"{sha256_hex(b'old')}.plan")
        blob.write_bytes(b"old")
        assert keeper(model).leftovers(timedelta(days=100), self.later(0.5)) == []
        (found,) = keeper(model).leftovers(timedelta(days=100), self.later(2))
        assert (found.path, found.bytes, found.reason) == (blob, 3, "no plan names it")
        keeper(model).remove(found)
        assert blob.exists()  # touched meanwhile: a writer is about to name it
        os.utime(blob, (1, 1))
        keeper(model).remove(found)
        assert not blob.exists()
        assert list(keeper(model).problems()) == []

    def test_a_blob_that_a_plan_came_to_name_stays(self, model):
        store = PlanStore(model / "1" / "plans")
        blob = files(model, "blobs/*.plan")[0].with_name(f"{sha256_hex(b'back')}.plan")
        blob.write_bytes(b"back")
        os.utime(blob, (1, 1))
        (found,) = keeper(model).leftovers(timedelta(days=100), self.later(2))
        plan = store.plans(HERE.hash())[0]
        store.publish(HERE, with_blob(plan, b"back"), b"back")
        assert time.time() - blob.stat().st_mtime < 60
        keeper(model).remove(found)
        assert isinstance(store.find(HERE, plan.key), Found)

    def test_what_cannot_be_read_stays(self, model):
        files(model, "manifest.json")[0].write_bytes(b"{}")
        assert keeper(model).leftovers(timedelta(days=1), self.later(1000)) == []

    def test_nothing_is_removed_unless_it_is_asked_for(self, model):
        store = PlanStore(model / "1" / "plans")
        plan = replace(store.plans(HERE.hash())[0], made_at="2020-01-01T00:00:00+00:00")
        store.publish(OTHER, with_blob(plan, b"blob"), b"blob")
        assert "1 left over" in words(plans("gc", model))
        assert len(store.environments()) == 2
        assert "Another CPU" in words(plans("gc", model, "--unseen-days", 30, "--remove"))
        assert len(store.environments()) == 1
        assert "0 left over" in words(plans("gc", model))


class TestDiffAndMerge:
    def test_equal_stores_do_not_differ(self, model):
        assert differences(keeper(model), keeper(model)) == []
        assert "0 differences" in words(plans("diff", model, model))

    def test_what_one_has_alone_or_chose_otherwise_is_told(self, model, tmp_path):
        other = PlanStore(tmp_path / "overlay")
        first, second = keeper(model).plans(HERE.hash())
        otherwise = replace(first.candidate, form="row_major")
        other.publish(HERE, replace(with_blob(first, b"x"), candidate=otherwise), b"x")
        found = {d.key: (d.first, d.second) for d in differences(keeper(model), other)}
        assert found[second.key.digest()] == (second, None)
        assert found[first.key.digest()][1].candidate == otherwise
        text = words(plans("diff", model, tmp_path / "overlay"))
        assert "2 differences" in text
        assert HERE.label() in text

    def test_merge_and_promote_take_what_is_newer(self, model, tmp_path):
        overlay = PlanStore(tmp_path / "overlay")
        plan = keeper(model).plans(HERE.hash())[0]
        newer = replace(with_blob(plan, b"new"), made_at="2099-01-01T00:00:00+00:00")
        overlay.publish(HERE, newer, b"new")
        overlay.publish(OTHER, newer, b"new")
        assert "2 plans promoted" in words(plans("promote", overlay.root, model))
        assert keeper(model).find(HERE, plan.key) == Found(newer, b"new")
        assert "0 plans taken" in words(plans("merge", model, overlay.root))
        result = plans("promote", model, tmp_path / "overlay")
        assert result.exit_code == 1
        assert "holds no exported model" in words(result)


class TestArchives:
    def test_plans_are_the_same_behind_a_journey(self, model, tmp_path):
        archive = tmp_path / "plans.tar.gz"
        assert "2 plans written" in words(plans("export", model, archive))
        (tmp_path / "arrived").mkdir()
        assert "2 plans taken" in words(plans("import", tmp_path / "arrived", archive))
        arrived = PlanStore(tmp_path / "arrived")
        assert differences(keeper(model), arrived) == []
        assert arrived.buckets(HERE) == keeper(model).buckets(HERE)
        assert [path.name for path in arrived.root.iterdir()] == [HERE.hash()]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["arrived", "block", "plans.tar.gz"]

    def test_damaged_plans_do_not_travel(self, model, tmp_path):
        files(model, "blobs/*.plan")[0].write_bytes(b"damaged")
        assert keeper(model).export(tmp_path / "a.tar.gz") == 1

    def test_a_store_without_plans_is_not_exported(self, tmp_path):
        with pytest.raises(UpkeepError, match="holds no plans"):
            StoreKeeper(tmp_path / "none").export(tmp_path / "a.tar.gz")
        assert not (tmp_path / "a.tar.gz").exists()

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\0\0\0\0\0"])
    def test_what_is_no_archive_is_refused_in_words(self, content, tmp_path):
        (tmp_path / "a").write_bytes(content)
        (tmp_path / "store").mkdir()
        result = plans("import", tmp_path / "store", tmp_path / "a")
        assert result.exit_code == 1
        assert "cannot be unpacked" in words(result)
        assert list((tmp_path / "store").iterdir()) == []

    def test_an_archive_writes_nowhere_else(self, model, tmp_path):
        """Absolute names, names that climb, and links."""
        target = tmp_path / "store"
        target.mkdir()
        for name, link in (("../../outside", None), (str(tmp_path / "absolute"), None), ("link", "/etc")):
            archive = tmp_path / "evil.tar.gz"
            with tarfile.open(archive, "w:gz") as file:
                member = tarfile.TarInfo(name)
                if link:
                    member.type, member.linkname = tarfile.SYMTYPE, link
                    file.addfile(member)
                else:
                    member.size = 4
                    file.addfile(member, io.BytesIO(b"evil"))
            with pytest.raises(UpkeepError, match=r"cannot be unpacked|holds no plans"):
                StoreKeeper(target).import_from(archive)
        assert list(target.iterdir()) == []
        assert not (tmp_path / "absolute").exists()
        assert not (tmp_path.parent / "outside").exists()

    def test_a_damaged_archive_is_never_a_traceback(self, model, tmp_path):
        keeper(model).export(tmp_path / "a")
        data = (tmp_path / "a").read_bytes()
        for at in range(10, len(data), len(data) // 40):
            (tmp_path / "a").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with suppress(UpkeepError):
                StoreKeeper(tmp_path / f"store{at}").import_from(tmp_path / "a")

    def test_an_archive_is_not_written_over_a_directory(self, model, tmp_path):
        result = plans("export", model, tmp_path)
        assert result.exit_code == 1
        assert "is a directory" in words(result)

    def test_an_absent_archive_is_said(self, model, tmp_path):
        result = plans("import", model, tmp_path / "absent")
        assert result.exit_code == 1
        assert "is not a file" in words(result)


@pytest.mark.parametrize("command", ["verify", "gc"])
def test_what_is_no_store_is_said(command, tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"")
    result = plans(command, tmp_path)
    assert result.exit_code == 1
    assert "holds neither a model nor only plans" in words(result)
    result = plans(command, tmp_path / "absent")
    assert result.exit_code == 1
    assert "is not a directory" in words(result)
