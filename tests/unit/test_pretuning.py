"""Pre-tuning a model directory, and its command line."""

import hashlib
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import CPU, Block, FakeEngine, block, line, program_of, right, served, write_version
from torch import nn
from typer.testing import CliRunner

from cudnn_fusion import lowered, pretuning
from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.instance import Place
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.pretuning import (
    PretuneError,
    Pretuning,
    latest_version,
    load_samples,
    parse_buckets,
    parse_shard,
    versions,
)
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.staging import Staging
from cudnn_fusion.tuner import Shard

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
try:
    import pretune
finally:
    sys.path.pop(0)


def batch(*rows):
    return [Bucket.of({"batch": n}) for n in rows]


def tree(directory):
    """What a server would see change."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in sorted(directory.rglob("*"))
    }


def interrupt(outcome):
    raise KeyboardInterrupt


def zeros(ready, operands, out):
    return out.zero_()


@pytest.fixture
def model(tmp_path):
    """The directory of an exported model."""
    directory = tmp_path / "model"
    write_version(directory, block())
    return directory


@pytest.fixture
def cli(model, tmp_path):
    """The command line on that model; gives exit code and words printed."""

    def run(*arguments):
        result = CliRunner().invoke(
            pretune.app, [str(model), "--staging", str(tmp_path / "staging"), *arguments]
        )
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, " ".join(result.output.split())

    return run


@pytest.fixture
def engines(monkeypatch):
    """Makes these the engines of this machine."""

    def use(*wanted):
        place = Place(CPU, {engine.name: engine for engine in wanted}, cpu_compatibility())
        monkeypatch.setattr(pretuning, "place", lambda device: place)

    return use


class TestCommandLine:
    def test_tunes_and_publishes(self, cli, model):
        code, said = cli("--buckets", "1,2")
        assert code == 0
        assert (
            "4 of 4 segments x buckets have a plan; candidates built 12, timed 12; plans published 4" in said
        )
        program = lowered.read(model / "1" / "lowered")
        store = PlanStore(model / "1" / "plans")
        assert served(program, store).load().buckets == batch(2, 1)

    def test_a_second_run_does_nothing_and_changes_nothing(self, cli, model, tmp_path):
        cli("--buckets", "1,2")
        before = tree(model)
        code, said = cli("--buckets", "1,2")
        assert code == 0
        assert "candidates built 0, timed 0; plans published 0" in said
        assert tree(model) == before

    def test_force_tunes_again(self, cli, model):
        cli("--buckets", "1")
        before = tree(model)
        code, said = cli("--buckets", "1", "--force")
        assert code == 0
        assert "candidates built 6, timed 6; plans published 2" in said
        assert tree(model) != before

    def test_more_buckets_are_added(self, cli, model):
        cli("--buckets", "1")
        _, said = cli("--buckets", "1,4")
        assert "4 of 4 segments x buckets have a plan; candidates built 6, timed 6; plans published 2" in said

    def test_fails_with_reasons_when_every_candidate_fails(self, cli, model, engines):
        """onnxruntime_backend issue 144: a run that made no plan must say so."""
        engines(FakeEngine({"wrong": zeros}, refused={"refused": "workspace [limit] is 0"}))
        before = tree(model)
        code, said = cli("--buckets", "2")
        assert code == 1
        assert "0 of 2 segments x buckets have a plan" in said
        assert "no plan for conv2d at batch=2:" in said
        assert "cudnn:fake:wrong: wrong: error" in said
        assert "cudnn:fake:refused: workspace [limit] is 0" in said, "brackets are no markup"
        assert tree(model) == before
        assert not (model / "1" / "plans").exists()

    def test_fails_when_one_segment_has_no_plan(self, cli, model, engines):
        def only_with_residual(ready, operands, out):
            return right(ready, operands, out) if "residual" in operands else out

        engines(FakeEngine({"partial": only_with_residual}))
        code, said = cli("--buckets", "2")
        assert code == 1
        assert "1 of 2 segments x buckets have a plan" in said
        assert PlanStore(model / "1" / "plans").buckets(cpu_compatibility()) == []

    def test_a_model_without_anything_to_fuse(self, cli, model):
        program = program_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "x:FP32[batch=1..8,4]")
        write_version(model, program)
        code, said = cli()
        assert code == 1
        assert "no part of this model can be fused" in said
        assert "1 x aten.relu.default: no fusible convolution directly before it takes it in" in said

    def test_an_interruption_is_told_and_continued(self, cli, model, engines):
        class Impatient(FakeEngine):
            """Is interrupted at its second segment."""

            def build(self, segment, sizes, candidate):
                if len(self.built) == 1:
                    raise KeyboardInterrupt
                return super().build(segment, sizes, candidate)

        engines(Impatient({"sound": right}))
        before = tree(model)
        code, said = cli("--buckets", "2")
        assert code == 130
        assert "interrupted; finished plans are kept in" in said
        assert tree(model) == before
        engines(FakeEngine({"sound": right}))
        code, said = cli("--buckets", "2")
        assert code == 0
        assert "candidates built 1, timed 1; plans published 2" in said

    def test_an_interruption_before_anything_is_open(self, cli, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(pretuning, "latest_version", interrupted)
        code, said = cli()
        assert code == 130
        assert said.startswith("interrupted")

    def test_samples_are_used_and_said(self, cli, model, tmp_path):
        np.savez(tmp_path / "s.npz", x=np.random.default_rng(0).standard_normal((3, 3, 8, 8)))
        code, _ = cli("--buckets", "2", "--samples", str(tmp_path / "s.npz"))
        assert code == 0
        plans = PlanStore(model / "1" / "plans").plans(cpu_compatibility().hash())
        assert {plan.checked_on for plan in plans} == {"samples"}

    @pytest.mark.parametrize(
        ("arrays", "said"),
        [
            ({"y": np.zeros((1, 3, 8, 8))}, "no array for input 'x'; they hold ['y']"),
            ({"x": np.zeros((1, 3, 9, 8))}, "dims [1, 3, 9, 8]; expected one row or more of [3, 8, 8]"),
            ({"x": np.array([{"a": 1}])}, "Object arrays cannot be loaded"),
            ({"x": np.array(["text"])}, "save arrays of numbers with numpy.savez"),
        ],
    )
    def test_samples_that_do_not_fit(self, cli, model, tmp_path, arrays, said):
        np.savez(tmp_path / "s.npz", **arrays)
        before = tree(model)
        code, printed = cli("--samples", str(tmp_path / "s.npz"), "--buckets", "1")
        assert code == 1
        assert "not tuned:" in printed
        assert said in printed
        assert tree(model) == before

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--buckets", "0"], "batch=0; the model takes 1 to 64"),
            (["--buckets", "1,65"], "batch=65; the model takes 1 to 64"),
            (["--buckets", "[/oops]"], "each bucket needs a whole number for each of batch"),
            (["--target", "no-such-gpu"], "no-such-gpu"),
            (["--target", "no-such-gpu"], "h200"),
        ],
    )
    def test_arguments_that_cannot_be_meant(self, cli, model, arguments, said):
        before = tree(model)
        code, printed = cli(*arguments)
        assert code == 1
        assert "not tuned:" in printed
        assert said in printed
        assert tree(model) == before


class TestRuns:
    def opened(self, model, tmp_path, **arguments):
        return Pretuning.open(model, CPU, staging=tmp_path / "staging", **arguments)

    @pytest.mark.parametrize("finished", [1, 3])
    def test_the_model_directory_is_not_touched_until_the_end(self, model, tmp_path, finished):
        before = tree(model)
        outcomes = []

        def interrupt(outcome):
            outcomes.append(outcome)
            assert tree(model) == before
            if len(outcomes) == finished:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.opened(model, tmp_path).run(batch(1, 2), None, interrupt)
        assert tree(model) == before
        result = self.opened(model, tmp_path).run(batch(1, 2), None, lambda outcome: None)
        assert result.timed_candidates == 3 * (4 - finished)
        assert (result.tuned, result.published) == (4, 4)

    def test_two_paths_of_one_model_share_their_unfinished_work(self, model, tmp_path):
        """The same model loaded from two paths (triton server issue 4587): nothing is keyed by path."""
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy)
        with pytest.raises(KeyboardInterrupt):
            self.opened(model, tmp_path).run(batch(1, 2), None, interrupt)
        result = self.opened(copy, tmp_path).run(batch(1), None, lambda outcome: None)
        assert (result.timed_candidates, result.published) == (3, 2)

    def test_a_tuned_model_under_another_path_is_not_tuned_again(self, model, tmp_path):
        self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy)
        result = self.opened(copy, tmp_path).run(batch(2), None, lambda outcome: None)
        assert (result.timed_candidates, result.published) == (0, 0)

    def test_a_finished_run_leaves_nothing_for_later_ones(self, model, tmp_path):
        """Another copy of the model, and this one without its plans, are tuned anew."""
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy)
        for directory in (model, copy):
            with closing(self.opened(directory, tmp_path)) as opened:
                assert opened.run(batch(2), None, lambda outcome: None).timed_candidates == 6
            assert not any((tmp_path / "staging").iterdir())

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_finished_run_leaves_the_work_of_one_that_is_not(self, model, tmp_path, ended):
        """Another bucket's, of a run that was interrupted or is at work."""
        unfinished = self.opened(model, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            unfinished.run(batch(1), None, interrupt)
        if ended:
            unfinished.close()
        with closing(self.opened(model, tmp_path)) as finished:
            finished.run(batch(2), None, lambda outcome: None)
        with closing(self.opened(model, tmp_path)) as resumed:
            assert resumed.run(batch(1), None, lambda outcome: None).timed_candidates == 3
        unfinished.close()
        assert ended is not any((tmp_path / "staging").iterdir()), "published by now, and nobody's"

    def test_a_run_that_dies_while_it_clears_spoils_nothing(self, model, tmp_path, monkeypatch):
        removed = []
        monkeypatch.setattr("shutil.rmtree", lambda path, **_: removed.append(path))
        self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        monkeypatch.undo()
        (hidden,) = (path for path in removed if path.name.startswith(".removed"))
        next(hidden.glob("*/manifest.json")).unlink()
        shutil.rmtree(model / "1" / "plans")
        assert self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None).timed_candidates == 6

    def test_a_run_for_another_copy_leaves_the_work_of_an_interrupted_one(self, model, tmp_path):
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy)
        with closing(self.opened(model, tmp_path)) as opened, pytest.raises(KeyboardInterrupt):
            opened.run(batch(1, 2), None, interrupt)
        for directory, timed in ((copy, 9), (model, 9)):
            with closing(self.opened(directory, tmp_path)) as opened:
                assert opened.run(batch(1, 2), None, lambda outcome: None).timed_candidates == timed
        assert not any((tmp_path / "staging").iterdir())

    def test_interrupted_again_and_again_nothing_piles_up(self, model, tmp_path):
        for finished in (1, 2, 3, 4):
            seen = []

            def stop(outcome, seen=seen, finished=finished):
                seen.append(outcome)
                if len(seen) == finished:
                    raise KeyboardInterrupt

            with closing(self.opened(model, tmp_path)) as opened, pytest.raises(KeyboardInterrupt):
                opened.run(batch(1, 2), None, stop)
            assert len(list((tmp_path / "staging").glob("*/*"))) == 1
            assert len(list((tmp_path / "staging").rglob("entries/*"))) == finished

    def test_incomplete_runs_leave_nothing_either(self, model, tmp_path, monkeypatch):
        """What has a plan is published, and taken from there; a forced run tunes it again."""

        def half(ready, operands, out):
            return right(ready, operands, out) if "residual" in operands else out

        engines = {"cudnn": FakeEngine({"half": half})}
        monkeypatch.setattr(pretuning, "place", lambda device: Place(CPU, engines, cpu_compatibility()))
        for force, reused in ((False, False), (False, True), (True, False), (True, False)):
            with closing(self.opened(model, tmp_path, force=force)) as opened:
                result = opened.run(batch(2), None, lambda outcome: None)
            assert (result.tuned, result.complete) == (1, False)
            assert not any((tmp_path / "staging").iterdir())
            assert [o.reused for o in result.outcomes if o.plan is not None] == [reused]

    @pytest.mark.parametrize("at", [3, 4])
    def test_forced_plans_that_vanish_are_no_success(self, model, tmp_path, at):
        """Older ones lie in the model's directory."""
        self.opened(model, tmp_path).run(batch(1, 2), None, lambda outcome: None)
        opened, seen = self.opened(model, tmp_path, force=True), []

        def vanish(outcome):
            seen.append(outcome)
            if len(seen) == at:
                shutil.rmtree(opened.staging.directory)

        with pytest.raises(PretuneError, match=r"not published.*conv2d"):
            opened.run(batch(1, 2), None, vanish)

    def test_a_record_that_vanishes_is_no_success(self, model, tmp_path):
        self.opened(model, tmp_path).run(batch(1, 2), None, lambda outcome: None)
        write_version(model, program_of(Block(seed=8)))
        opened, seen = self.opened(model, tmp_path), []

        def vanish(outcome):
            seen.append(outcome)
            if len(seen) == 3:
                shutil.rmtree(opened.staging.directory)

        with pytest.raises(PretuneError, match=r"not published.*batch=1"):
            opened.run(batch(1, 2), None, vanish)

    def test_a_half_written_file_keeps_nothing_from_being_removed(self, model, tmp_path):
        """A run that is killed while it writes leaves one beside its entries."""
        with closing(self.opened(model, tmp_path)) as opened:
            with pytest.raises(KeyboardInterrupt):
                opened.run(batch(1), None, interrupt)
            (entry,) = opened.staging.directory.glob("*/entries/*")
            (entry.parent / ".tmp-1-0").write_bytes(b"{")
        self.opened(model, tmp_path).run(batch(1), None, lambda outcome: None)
        assert not list((tmp_path / "staging").rglob("entries/*"))

    def test_plans_that_cannot_be_read_now_are_not_removed(self, model, tmp_path):
        with closing(self.opened(model, tmp_path)) as opened:
            with pytest.raises(KeyboardInterrupt):
                opened.run(batch(1), None, interrupt)
            (entry,) = opened.staging.directory.glob("*/entries/*")
            kept, entry_bytes = entry, entry.read_bytes()
            entry.write_bytes(b"")
        assert kept.exists()
        kept.write_bytes(entry_bytes)
        assert self.opened(model, tmp_path).run(batch(1), None, lambda outcome: None).timed_candidates == 3

    def test_plans_that_vanish_before_they_are_published_are_no_success(self, model, tmp_path):
        opened = self.opened(model, tmp_path)

        def vanish(outcome):
            if outcome.bucket == batch(2)[0]:
                shutil.rmtree(opened.staging.directory)

        with pytest.raises(PretuneError, match=r"not published.*conv2d.*run the same command again"):
            opened.run(batch(1, 2), None, vanish)
        assert not PlanStore(model / "1" / "plans").buckets(cpu_compatibility())[1:]

    def test_a_model_directory_that_cannot_be_written_is_refused_at_once(self, model, monkeypatch):
        monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
        with pytest.raises(PretuneError, match=r"cannot write to .*; make it writable"):
            Pretuning.open(model, CPU)

    def test_a_refused_run_leaves_no_directory(self, model, tmp_path):
        self.opened(model, tmp_path).close()
        assert not any((tmp_path / "staging").iterdir())
        with pytest.raises(PretuneError, match="nope"):
            self.opened(model, tmp_path, target="nope")
        assert not any((tmp_path / "staging").iterdir())

    def test_a_forced_run_goes_on_with_an_interrupted_forced_one_alone(self, model, tmp_path):
        def timed(stop, **arguments):
            with closing(self.opened(model, tmp_path, **arguments)) as opened, suppress(KeyboardInterrupt):
                opened.run(batch(2), None, stop)
            return opened.tuner.timed_candidates

        assert timed(interrupt) == 3
        assert timed(lambda outcome: None, force=True) == 6, "what another run has left is not taken"
        assert timed(interrupt, force=True) == 3
        assert timed(lambda outcome: None, force=True) == 3
        assert timed(lambda outcome: None, force=True) == 6

    def test_what_else_staging_holds_is_not_published(self, model, tmp_path):
        """Plans of an unfinished run for another bucket, and of another environment."""
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy)
        opened = self.opened(model, tmp_path)
        outcomes = []
        opened.tuner.on_outcome = outcomes.append
        opened.tuner.tune(batch(1)[0], None)
        elsewhere = replace(cpu_compatibility(), device_name="another CPU")
        opened.tuner.store.publish(elsewhere, outcomes[0].plan, None)
        result = self.opened(copy, tmp_path).run(batch(2), None, lambda outcome: None)
        assert (result.tuned, result.published) == (2, 2)
        published = PlanStore(copy / "1" / "plans")
        assert [stored.compatibility for stored in published.environments()] == [cpu_compatibility()]
        assert len(published.plans(cpu_compatibility().hash())) == 2
        (record,) = published.buckets(cpu_compatibility())
        assert record.bucket == batch(2)[0]

    def test_a_new_version_with_other_weights_takes_the_plans_over(self, model, tmp_path):
        self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        program = write_version(model, program_of(Block(seed=8)), version=2)
        first = tree(model / "1")
        opened = self.opened(model, tmp_path)
        assert opened.version_directory == model / "2"
        result = opened.run(batch(2), None, lambda outcome: None)
        assert (result.tuned, result.timed_candidates, result.published) == (2, 0, 2)
        assert served(program, PlanStore(model / "2" / "plans")).load().buckets == batch(2)
        assert tree(model / "1") == first, "the older version is not reloaded"

    def test_an_equal_new_version_has_its_own_plans(self, model, tmp_path):
        self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        program = write_version(model, block(), version=2)
        opened = Pretuning.open(model, CPU, staging=tmp_path / "another staging directory")
        result = opened.run(batch(2), None, lambda outcome: None)
        assert (result.timed_candidates, result.published) == (0, 2)
        assert served(program, PlanStore(model / "2" / "plans")).load().buckets == batch(2)

    def test_exporting_again_in_place_keeps_what_is_right(self, model, tmp_path):
        self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        program = write_version(model, program_of(Block(seed=8)))
        assert served(program, PlanStore(model / "1" / "plans")).load().buckets == []
        result = self.opened(model, tmp_path).run(batch(2), None, lambda outcome: None)
        assert (result.tuned, result.timed_candidates) == (2, 0)
        report = served(program, PlanStore(model / "1" / "plans")).load()
        assert report.buckets == batch(2)

    def test_samples_of_a_wrong_kind_leave_everything_as_it_was(self, model, tmp_path):
        before = tree(model)
        with pytest.raises(ValueError, match="no array for input"):
            self.opened(model, tmp_path).run(batch(2), {"y": torch.zeros(1)}, lambda outcome: None)
        assert tree(model) == before


class TestInterrupts:
    """Of the program as it is run from a shell."""

    def started(self, model, tmp_path):
        tool = Path(__file__).parents[2] / "tools" / "pretune.py"
        command = [sys.executable, "-u", tool, model, "--buckets", "1,2", "--staging", tmp_path / "staging"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @pytest.mark.parametrize("after_s", [0.6, 1.5])
    def test_while_it_starts(self, model, tmp_path, after_s):
        process = self.started(model, tmp_path)
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        assert "Traceback" not in said
        assert process.returncode == 130

    def test_twice(self, model, tmp_path):
        process = self.started(model, tmp_path)
        assert "buckets batch=1 batch=2" in process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        assert "Traceback" not in said
        assert "interrupted" in said
        assert process.returncode == 130


class TestVersions:
    def test_the_newest_exported_one_is_tuned(self, tmp_path):
        for name in ("1", "2", "10", "backup"):
            (tmp_path / name / "lowered").mkdir(parents=True)
        (tmp_path / "11").mkdir()
        assert latest_version(tmp_path) == tmp_path / "10"
        assert [path.name for path in versions(tmp_path)] == ["11", "10", "2", "1"]

    def test_a_directory_that_is_no_model(self, tmp_path):
        with pytest.raises(PretuneError, match="is not a directory; export"):
            latest_version(tmp_path / "missing")
        with pytest.raises(PretuneError, match="no exported version; export"):
            latest_version(tmp_path)

    def test_a_damaged_program(self, model):
        (model / "1" / "lowered" / "program.json").write_text("{}")
        with pytest.raises(PretuneError, match=r"export the model with tools/export.py"):
            Pretuning.open(model, CPU)

    def test_staging_goes_by_content(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        one, two = (replace(block(), sha256=hashlib.sha256(text).hexdigest()) for text in (b"1", b"2"))
        places = [Staging(p, tmp_path).directory.parent for p in (one, replace(one, name="other"), two)]
        assert places[0].is_relative_to(tmp_path)
        assert places[0] == places[1] != places[2]

    def test_staging_without_a_writable_home(self, model, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(PretuneError, match="--staging"):
            Pretuning.open(model, CPU)


class TestBuckets:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1,8,64", [1, 8, 64]),
            (" 8 , 1 ", [8, 1]),
            ("8,8", [8]),
            ("batch=8", [8]),
            ("batch=8;batch=2;", [8, 2]),
        ],
    )
    def test_batch_sizes(self, text, expected):
        assert parse_buckets(text, block()) == batch(*expected)

    def test_sizes_of_all_axes(self):
        wanted = [Bucket.of({"batch": 8, "length": 300}), Bucket.of({"batch": 1, "length": 4})]
        assert parse_buckets("batch=8,length=300; length = 4, batch=1", line()) == wanted

    def test_defaults_are_powers_of_two_and_the_maximum(self):
        assert parse_buckets("", block()) == batch(1, 2, 4, 8, 16, 32, 64)
        assert parse_buckets("", line()) == [Bucket.of({"batch": n, "length": 400}) for n in (1, 2, 4, 8)]

    @pytest.mark.parametrize(
        ("program", "text", "said"),
        [
            (block, "1,,2", "a whole number for each of batch"),
            (block, "1;2", "a whole number for each of batch"),
            (block, "-1", "a whole number"),
            (block, "1.5", "a whole number"),
            (block, "rows=3", "for each of batch"),
            (block, "batch=1,batch=8", "batch is given twice in one bucket; put ';' between buckets"),
            (block, "batch=65", "batch=65; the model takes 1 to 64"),
            (line, "8", "as in --buckets 'batch=1,length=4;batch=8,length=400'"),
            (line, "batch=8", "for each of batch, length"),
            (line, "batch=1,length=3", "length=3; the model takes 4 to 400"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, program, text, said):
        with pytest.raises(PretuneError, match=said) as error:
            parse_buckets(text, program())
        assert repr(text) in str(error.value)

    def test_a_program_without_axes_has_one_bucket(self):
        static = replace(block(), axes=(), batch_axis=None)
        assert parse_buckets("", static) == [Bucket(())]
        with pytest.raises(PretuneError, match="no dynamic axes; leave --buckets out"):
            parse_buckets("8", static)


class TestSamples:
    def test_arrays_by_name(self, tmp_path):
        np.savez(tmp_path / "s.npz", a=np.ones((2, 3), np.float16), b=np.arange(4))
        arrays = load_samples(tmp_path / "s.npz")
        assert arrays["a"].dtype == torch.float16
        assert arrays["b"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "content", [b"", b"not a file of arrays", b"PK\x03\x04 and then nothing", b"\x93NUMPY\x01\x00"]
    )
    def test_files_that_hold_no_arrays(self, tmp_path, content):
        path = tmp_path / "s.npz"
        path.write_bytes(content)
        with pytest.raises(PretuneError, match=r"cannot read samples from .*s\.npz"):
            load_samples(path)

    @pytest.mark.parametrize("damage", ["encrypted", "of an unknown method", "of a header that is cut"])
    def test_samples_that_are_damaged(self, tmp_path, damage):
        """What reads them raises another error for each."""
        path = tmp_path / "samples.npz"
        np.savez(path, x=np.zeros((1, 3, 8, 16), "f4"))
        data = bytearray(path.read_bytes())
        entry = data.find(b"PK\x01\x02")
        if damage == "encrypted":
            data[entry + 8] |= 1
            data[6] |= 1
        elif damage == "of an unknown method":
            data[entry + 10] = data[8] = 99
        else:
            header = bytes(data[data.find(b"{'descr'") : data.find(b"}") + 1])
            with zipfile.ZipFile(path) as archive:
                array = archive.read("x.npy").replace(header, header[:-6] + b"((((((")
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("x.npy", array)
            data = bytearray(path.read_bytes())
        path.write_bytes(data)
        with pytest.raises(PretuneError, match="cannot read samples from"):
            load_samples(path)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(PretuneError, match="cannot read samples from"):
            load_samples(tmp_path / "missing.npz")

    def test_an_array_without_a_name(self, tmp_path):
        np.save(tmp_path / "s.npy", np.zeros(3))
        with pytest.raises(PretuneError, match=r"an array without a name; save it with numpy\.savez"):
            load_samples(tmp_path / "s.npy")

    def test_nothing_is_unpickled(self, tmp_path):
        class Trap:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "sprung",))

        np.savez(tmp_path / "s.npz", x=np.array([Trap()], dtype=object))
        with pytest.raises(PretuneError, match="Object arrays cannot be loaded"):
            load_samples(tmp_path / "s.npz")
        assert not (tmp_path / "sprung").exists()


class TestShards:
    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_shards_tuned_apart_come_together_without_tuning_anything_twice(self, model, tmp_path, count):
        together = tmp_path / "together" / "model"
        shutil.copytree(model, together)
        store, parts = PlanStore(together / "1" / "plans"), []
        for number in range(1, count + 1):
            machine = tmp_path / f"machine{number}" / "model"
            shutil.copytree(model, machine)
            staging = tmp_path / f"staging{number}"
            opened = Pretuning.open(machine, CPU, staging=staging, shard=Shard(number, count))
            with closing(opened):
                result = opened.run(batch(1, 2), None, lambda outcome: None)
            assert result.complete
            plans = PlanStore(machine / "1" / "plans")
            assert plans.buckets(cpu_compatibility()) == []
            parts.append({plan.key.digest() for plan in plans.plans(cpu_compatibility().hash())})
            store.merge_from(plans)
        assert sum(map(len, parts)) == len(set().union(*parts)) == 4
        with closing(Pretuning.open(together, CPU, staging=tmp_path / "last")) as opened:
            result = opened.run(batch(1, 2), None, lambda outcome: None)
        assert (result.tuned, result.timed_candidates) == (4, 0)
        assert [record.bucket for record in store.buckets(cpu_compatibility())] == batch(1, 2)

    @pytest.mark.parametrize(
        "text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1/9999999999999"]
    )
    def test_a_shard_that_is_none_is_refused(self, text):
        with pytest.raises(PretuneError, match="write NUMBER/COUNT"):
            parse_shard(text)

    def test_the_command_says_what_is_next(self, model, tmp_path):
        arguments = [str(model), "--buckets", "1", "--staging", str(tmp_path / "s"), "--shard"]
        told = CliRunner().invoke(pretune.app, [*arguments, "1/2"]).stdout
        assert "part 1 of 2: buckets are served once all parts are together" in " ".join(told.split())
        wrong = CliRunner().invoke(pretune.app, [*arguments, "5/2"])
        assert wrong.exit_code == 1
        assert "as in 2/4" in wrong.stdout
