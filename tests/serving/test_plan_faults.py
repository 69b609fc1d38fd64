"""Damaged, foreign and malicious files in a model's directory: served all the same, or refused clearly."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import small_net
import torch
from test_serving import assert_right
from tritonclient.utils import InferenceServerException

from cudnn_fusion.environment import Compatibility
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.store_upkeep import StoreKeeper
from cudnn_fusion.trust import Signer, make_key
from tools.demo.serving_client import Route


def environment_of(model: Path) -> Path:
    """The directory of the only environment for which the model in ``model`` has plans."""
    (directory,) = (model / "1" / "plans").iterdir()
    return directory


def entries_of(model: Path) -> list[Path]:
    return sorted((environment_of(model) / "entries").iterdir())


def empty(path: Path) -> None:
    path.write_bytes(b"")


def double(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def garble(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:200] + b"\xff\xfe\x80" + data[203:])


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def replace_by_another(path: Path) -> None:
    *_, last = (sibling for sibling in sorted(path.parent.iterdir()) if sibling != path)
    shutil.copy(last, path)


def nest_deeply(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    damage.__name__: damage
    for damage in (empty, double, garble, truncate, replace_by_another, nest_deeply, make_a_folder)
}


def warnings_about(model, path: Path) -> int:
    """How many warnings name ``path``, which was damaged in a copy of the model in ``model``'s folder."""
    return sum(str(path) in line for line in model.log_lines("W"))


def assert_serves_quietly(model, damaged: list[Path], missing: str = "") -> None:
    """Right answers to tuned and untuned sizes, one warning for each damaged file and one that says what is
    ``missing``, no error, no traceback."""
    for batch, height in ((1, 16), (3, 16), (17, 16), (2, 40)):
        arrays = small_net.inputs(batch, height)
        assert_right(model.infer(arrays), arrays)
    assert {path.name: warnings_about(model, path) for path in damaged} == {path.name: 1 for path in damaged}
    summary = [line for line in model.log_lines("W") if "torch serves instead until" in line]
    assert [missing in line for line in summary] == ([True] if missing else [])
    assert len(model.log_lines("W")) == len(damaged) + len(summary)
    assert model.log_lines("E") == []
    assert "Traceback" not in model.log()


# Damaged plans


def test_every_damage_at_once(model_server, tuned):
    """Each is a miss with a warning: what caches of compiled kernels have failed to read (pytorch issues
    153791 and 119698)."""
    model = model_server.put("ruin", tuned)
    damaged = entries_of(model.folder)[: len(DAMAGES)]
    for path, damage in zip(damaged, DAMAGES.values(), strict=True):
        damage(path)
    bucket, *_ = sorted((environment_of(model.folder) / "buckets").iterdir())
    damaged_bucket = shutil.copy(bucket, bucket.with_name(f"batch=9,{bucket.name}"))
    truncate(damaged_bucket)
    foreign = environment_of(model.folder).parent / "0123456789abcdef"
    shutil.copytree(environment_of(model.folder), foreign)
    with model:
        assert model.metric("buckets", "state") == {"tuned": 3, "skipped": 0}
        assert model.metric("segments", "origin") == {"exact": 12 - len(DAMAGES), "reference": len(DAMAGES)}
        missing = f"{len(DAMAGES)} of 12 segments in tuned buckets have no usable plan"
        assert_serves_quietly(model, [*damaged, damaged_bucket, foreign / "manifest.json"], missing)


def test_a_manifest_of_another_environment_hides_its_plans(model_server, tuned):
    model = model_server.put("foreign_manifest", tuned)
    manifest = environment_of(model.folder) / "manifest.json"
    document = json.loads(manifest.read_text())
    here = Compatibility.from_json(document["content"])
    other = Compatibility.from_json({**here.to_json(), "device_name": "another CPU"})
    scratch = PlanStore(model_server.repository.parent / "scratch")
    stored = PlanStore(model.folder / "1" / "plans")
    scratch.publish(other, stored.plans(here.hash())[0], None)
    shutil.copy(scratch.root / other.hash() / "manifest.json", manifest)
    with model:
        arrays = small_net.inputs(4)
        _, route = model.infer_and_tell(arrays)
        assert route == Route("untuned", "none", "reference")
        assert_serves_quietly(model, [manifest], "no bucket is tuned")


def test_plans_of_another_environment_are_left_alone(model_server, tuned):
    """Plans of another device were once saved anew as this one's (TensorRT-LLM issue 17664)."""
    model = model_server.put("foreign", tuned)
    plans = model.folder / "1" / "plans"
    moved_elsewhere(plans)
    before = {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()}
    with model:
        assert_serves_quietly(model, [])
        assert model.infer_and_tell(small_net.inputs(4))[1].origin in ("recipe", "reference")
    assert {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()} == before


def with_overlay(overlay):
    line = f'parameters {{ key: "PLAN_OVERLAY" value {{ string_value: "{overlay}" }} }}'
    return lambda config: f"{config}\n{line}\n"


@pytest.mark.parametrize("overlay", ["/missing/overlay", "x" * 5000])
def test_an_overlay_that_is_not_there_is_a_warning(model_server, tuned, overlay):
    with model_server.put(f"overlay_{len(overlay)}", tuned, with_overlay(overlay)) as model:
        assert model.metric("segments", "origin") == {"exact": 12}
        assert ["is not read: is not a directory" in line for line in model.log_lines("W")] == [True]


@pytest.mark.parametrize("mode", [0o755, 0o775])
def test_an_overlay_that_others_can_write_is_not_read(model_server, tuned, tmp_path, mode):
    """The model itself has no plans: what serves comes from the overlay."""
    overlay = tmp_path / "overlay"
    shutil.copytree(tuned / "1" / "plans", overlay)
    for path in (overlay, *overlay.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (overlay / next(overlay.iterdir()).name / "entries").chmod(mode)
    model = model_server.put(f"overlay_{mode}", tuned, with_overlay(overlay))
    shutil.rmtree(model.folder / "1" / "plans")
    with model:
        trusted = mode == 0o755
        assert (model.metric("segments", "origin") == {"exact": 12}) == trusted
        assert any("chmod go-w" in line for line in model.log_lines("W")) == (not trusted)


def test_what_was_tuned_elsewhere_is_tuned_again_at_load_into_the_overlay(model_server, tuned, tmp_path):
    """As behind an update of driver or library; the second start finds it."""
    overlay = tmp_path / "overlay"
    lines = {"PLAN_OVERLAY": overlay, "RETUNE": "load", "RETUNE_BUDGET_S": 100}
    text = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in lines.items()
    )
    model = model_server.put("retuned", tuned, lambda config: f"{config}\n{text}")
    plans = model.folder / "1" / "plans"
    here, other = moved_elsewhere(plans)
    before = {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()}
    for start in (1, 2):
        with model:
            told = [line for line in model.log_lines("W") if "RETUNE=load" in line]
            assert len(told) == (2 if start == 1 else 0)
            assert model.metric("segments", "origin") == {"exact": 12}
            assert model.infer_and_tell(small_net.inputs(4))[1].origin == "exact"
    assert {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()} == before
    assert len(PlanStore(overlay).buckets(here)) == len(PlanStore(plans).buckets(other)) > 0


def moved_elsewhere(plans):
    """Makes plans of this environment those of another; both environments."""
    stored = PlanStore(plans.rename(plans.with_name("moved")))
    (here,) = (environment.compatibility for environment in stored.environments())
    other = Compatibility.from_json({**here.to_json(), "device_name": "another CPU"})
    foreign = PlanStore(plans)
    for plan in stored.plans(here.hash()):
        foreign.publish(other, plan, None)
    for record in stored.buckets(here):
        foreign.publish_bucket(other, record)
    shutil.rmtree(stored.root)
    return here, other


def test_where_only_signed_plans_are_trusted_others_are_not_loaded(model_server, tuned, tmp_path):
    public = make_key(tmp_path / "key.pem")
    lines = "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in (("PLAN_TRUST", "signed"), ("PLAN_PUBLIC_KEY", public))
    )
    model = model_server.put("signed", tuned, lambda config: f"{config}\n{lines}")
    with model:
        assert "exact" not in model.metric("segments", "origin")
        assert any("is not signed" in line for line in model.log_lines("W"))
        model.infer(small_net.inputs(4))
    StoreKeeper(model.folder / "1" / "plans").sign(Signer(tmp_path / "key.pem"))
    with model:  # what the metric has counted before stays
        assert model.metric("segments", "origin") == {"reference": 12, "exact": 12}


# A damaged or foreign model


def test_a_flipped_bit_in_a_weight_is_refused(model_server, tuned):
    model = model_server.put("flipped", tuned)
    path = model.folder / "1" / "lowered" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with pytest.raises(InferenceServerException, match="was changed or damaged after the export"):
        model.load()


@pytest.mark.parametrize(
    ("dims", "wrong"),
    [("3, -1, 16", "3, -1, 17"), ("3, -1, 16", "3, -1, 16, 1"), ("3, -1, 16", "3, 100000, 16")],
)
def test_dims_that_the_program_has_not_are_refused(model_server, tuned, dims, wrong):
    model = model_server.put(
        f"dims_{len(wrong)}", tuned, lambda c: c.replace(f"[ {dims} ]", f"[ {wrong} ]", 1)
    )
    with pytest.raises(
        InferenceServerException, match=r"has dims \[.*\] after the batch; the program has \["
    ):
        model.load()


# Files that hold code


class _MakesAFile:
    """Unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def payload(tmp_path):
    """Something that makes ``tmp_path / "made"`` when it is unpickled; checked to do so."""
    pickle.loads(pickle.dumps(_MakesAFile(tmp_path / "probe"))).close()
    assert (tmp_path / "probe").exists()
    return _MakesAFile(tmp_path / "made")


def test_a_pt2_file_is_never_read(model_server, tuned, payload):
    model = model_server.put("evil_pt2", tuned)
    torch.save(payload, model.folder / "1" / "model.pt2")
    with model:
        assert model.metric("segments", "origin") == {"exact": 12}
        assert_serves_quietly(model, [])
    assert not payload.path.exists()


@pytest.mark.parametrize("file", ["program.json", "weights.safetensors"])
def test_a_pickle_in_place_of_the_program_is_refused_and_not_opened(model_server, tuned, payload, file):
    model = model_server.put(f"evil_{file.partition('.')[0]}", tuned)
    (model.folder / "1" / "lowered" / file).write_bytes(pickle.dumps(payload))
    with pytest.raises(InferenceServerException) as refused:
        model.load()
    assert re.search(
        rf"the exported program cannot be used: \S+{file} .*tools/export\.py", refused.value.message()
    )
    assert not payload.path.exists()
    assert "Traceback" not in model.log()
