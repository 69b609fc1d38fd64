"""What cuDNN plans for an H200: which forms, which engines, and what is refused."""

import os
from dataclasses import replace

import planning
import pytest
from planning import segment_of

from cudnn_fusion import accuracy, devices, preflight
from cudnn_fusion.engines import cudnn_graph
from cudnn_fusion.engines.cudnn_graph import PLANS_PER_FORM
from cudnn_fusion.environment import target_compatibility
from cudnn_fusion.plan_store import Found, Miss, PlanStore
from cudnn_fusion.preflight import cudnn_version

FUSED = [["bias", "relu"], ["bias", "add", "relu"], ["bias", "silu"]]


@pytest.fixture(scope="module")
def everything(plan, tmp_path_factory):
    """A store with the plans of `FUSED`; what planning said of them and, by name, of the other cases."""
    root = tmp_path_factory.mktemp("plans")
    # One process for all: each takes seconds to start.
    cases = {**CASES, "elu of a half": ELU, "pooled": POOLED}
    answers = plan(*({"tail": tail, "store": str(root)} for tail in FUSED), *cases.values())
    named = dict(zip(cases, answers[len(FUSED) :], strict=True))
    return PlanStore(root), answers[: len(FUSED)], named


@pytest.fixture(scope="module")
def stored(everything):
    return everything[:2]


@pytest.fixture(scope="module")
def planned(everything):
    return everything[2]


def test_the_frontend_is_looked_for_once(monkeypatch):
    """Every run of a plan comes by here, and looking for libcudnn takes milliseconds."""
    frontend = cudnn_graph._cudnn()
    monkeypatch.setattr(preflight, "load_cudnn", lambda: pytest.fail("looked for again"))
    assert cudnn_graph._cudnn() is frontend


def here():
    return target_compatibility(devices.load("h200"), cudnn_version())


@pytest.mark.parametrize("index", range(len(FUSED)), ids=["+".join(tail) for tail in FUSED])
def test_fused_plans_are_compiled_stored_found_and_loaded(stored, index):
    store, answers = stored
    form = "+".join(["conv2d", *FUSED[index]])
    built = answers[index]["built"][form]
    assert built["loaded_workspace"] == built["workspace"]
    segment, sizes = planning.segment_of({"tail": FUSED[index]})
    found = store.find(here(), segment.key(sizes, accuracy.VALIDATION))
    assert isinstance(found, Found)
    assert found.plan.candidate.form == form
    assert found.plan.candidate.plan_name == built["plan"]
    assert not found.plan.timed
    assert len(found.blob) == built["bytes"]


def test_long_chains_are_compiled_at_run_time_and_short_ones_are_not(stored):
    _, answers = stored
    assert answers[0]["built"]["conv2d+bias+relu"]["notes"] == []
    for index in (1, 2):
        form = "+".join(["conv2d", *FUSED[index]])
        assert "RUNTIME_COMPILATION" in answers[index]["built"][form]["notes"]


def test_every_configuration_of_a_runtime_compiled_form_is_a_candidate_once(stored):
    """The heuristics name a few; a form that precompiled engines serve has those of the heuristics alone."""
    _, answers = stored

    def names(answer, form):
        return [c["plan_name"] for c in answer["replayable"] if c["form"] == form]

    assert len(names(answers[0], "conv2d+bias+relu")) <= PLANS_PER_FORM[0]
    for index in (1, 2):
        found = names(answers[index], "+".join(["conv2d", *FUSED[index]]))
        assert len(found) > 30
        assert len(set(found)) == len(found)


def test_neighbours_differ_in_one_knob_from_a_plan_and_are_built_by_their_names(stored):
    _, answers = stored
    (knobs, _), *found = answers[0]["neighbours"]
    assert len(found) >= 8
    for others, same_name in found:
        assert same_name
        assert len(dict(knobs.items() - others.items())) == 1
        assert knobs.keys() == others.keys()
    for index in (1, 2):  # of a kernel that is compiled, every configuration is listed
        assert len(answers[index]["neighbours"]) == 1


def test_a_chain_is_planned_up_to_its_pool(planned):
    built = planned["pooled"]["built"]
    assert {"conv2d+bias+relu", "conv2d+bias"} == set(built)


def test_narrow_convolutions_are_also_planned_folded(planned):
    assert {"conv2d+bias+relu", "conv2d/64+bias+relu", "matmul/64+bias+relu"} <= set(
        planned["audio"]["built"]
    )
    assert any("/" in form for form in planned["three channels"]["built"])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("cudnn", 92000, "92000"),
        ("cuda_driver_api", 13010, "13010"),
        ("device_name", "NVIDIA H100 80GB HBM3", "H100"),
        ("multiprocessors", 114, "114"),
        ("memory_bus_bits", 5120, "5120"),
    ],
)
def test_another_library_or_device_is_a_miss_that_names_it(stored, field, value, named):
    store, _ = stored
    segment, sizes = planning.segment_of({"tail": FUSED[0]})
    miss = store.find(replace(here(), **{field: value}), segment.key(sizes, accuracy.VALIDATION))
    assert isinstance(miss, Miss)
    assert named in miss.reason
    assert field in miss.reason


def test_a_damaged_blob_is_a_miss(stored, tmp_path):
    store, _ = stored
    segment, sizes = planning.segment_of({"tail": FUSED[1]})
    key = segment.key(sizes, accuracy.VALIDATION)
    found = store.find(here(), key)
    blob = store.root / here().hash() / "blobs" / f"{found.plan.blob_sha256}.plan"
    whole = blob.read_bytes()
    try:
        for damaged in (whole[:-100], b"\x00" * 16 + whole[16:], b"", whole[:5000] + b"\xff" + whole[5001:]):
            blob.write_bytes(damaged)
            miss = PlanStore(store.root).find(here(), key)
            assert isinstance(miss, Miss)
            assert "blob" in miss.reason or ".plan" in miss.reason
    finally:
        blob.write_bytes(whole)
    assert isinstance(PlanStore(store.root).find(here(), key), Found)


LINE = {"x": [8, 64, 1500], "w": [64, 3], "before": [1], "after": [1]}
VOLUME = {"x": [2, 32, 16, 28, 28], "w": [32, 3, 3, 3]}
LARGE_KERNEL = {"x": [8, 96, 56, 56], "w": [96, 7, 7], "before": [3, 3], "after": [3, 3], "groups": 96}
UP = {"kind": "conv_transpose2d", "x": [8, 64, 28, 28], "w": [32, 4, 4], "stride": [2, 2]}

CASES = {
    "line": {"tail": ["bias", "gelu"], **LINE},
    "line in fp32": {"tail": ["bias", "relu"], "precision": "fp32", **LINE},
    "line with a residual": {"tail": ["bias", "add", "gelu_tanh"], **LINE},
    "line, depthwise": {"tail": ["bias", "silu"], **LINE, "groups": 64},
    "volume": {"tail": ["bias", "relu"], **VOLUME},
    "volume in bf16": {"tail": ["bias", "gelu"], "precision": "bf16", **VOLUME},
    "large depthwise kernel": {"tail": ["bias"], **LARGE_KERNEL},
    "two of each channel": {"tail": ["bias"], **LARGE_KERNEL, "w": [192, 7, 7]},
    "depthwise hardswish": {"tail": ["bias", "hardswish"], **LARGE_KERNEL},
    "hardswish": {"tail": ["bias", "hardswish"]},
    "hardsigmoid": {"tail": ["bias", "hardsigmoid"]},
    "elu": {"tail": ["bias", "elu"]},
    "gelu": {"tail": ["bias", "gelu"]},
    "approximate gelu": {"tail": ["bias", "gelu_tanh"]},
    "transposed": {"tail": ["bias", "relu"], **UP},
    "transposed without bias": {"tail": [], **UP, "output_padding": [1, 1], "w": [32, 3, 3]},
    "transposed in groups": {"tail": ["bias", "relu"], **UP, "groups": 2},
    "transposed line": {
        "tail": ["bias", "elu"],
        "groups": 2,
        "kind": "conv_transpose1d",
        "x": [8, 64, 280],
        "w": [32, 4],
        "stride": [2],
    },
    "transposed in fp32": {"tail": ["bias"], **UP, "precision": "fp32"},
    "no bias": {"tail": []},
    "relu6": {"tail": ["bias", "relu6"]},
    "leaky relu": {"tail": ["bias", "leaky_relu"]},
    "sigmoid": {"tail": ["bias", "sigmoid"]},
    "tanh": {"tail": ["bias", "tanh"]},
    "scale and shift": {"tail": ["bias", "relu", "scale", "shift"]},
    "stride": {"tail": ["bias", "relu"], "stride": [2, 2]},
    "dilation": {"tail": ["bias", "relu"], "dilation": [2, 2], "before": [2, 2], "after": [2, 2]},
    "groups": {"tail": ["bias", "relu"], "groups": 2},
    "depthwise": {"tail": ["bias", "relu"], "groups": 64},
    "asymmetric padding": {"tail": ["bias", "relu"], "before": [1, 1], "after": [0, 0], "stride": [2, 2]},
    "three channels": {"tail": ["bias", "relu"], "x": [8, 3, 224, 224], "w": [64, 7, 7], "before": [3, 3]},
    "one channel": {"tail": ["bias", "relu"], "x": [8, 1, 1024, 1], "w": [128, 512, 1], "before": [254, 0]},
    "audio": {
        "tail": ["bias", "relu"],
        "x": [8, 16, 64, 1],
        "w": [16, 64, 1],
        "before": [31, 0],
        "after": [32, 0],
    },
    "odd channels": {"tail": ["bias", "relu"], "x": [8, 17, 16, 16], "w": [255, 1, 1], "before": [0, 0]},
    "bf16": {"tail": ["bias", "relu"], "precision": "bf16"},
    "tf32": {"tail": ["bias", "relu"], "precision": "tf32"},
    "fp32": {"tail": ["bias", "relu"], "precision": "fp32"},
    "fp32 silu": {"tail": ["bias", "silu"], "precision": "fp32"},
    "line as an image": {
        "tail": ["bias", "gelu"],
        "x": [8, 64, 1, 1500],
        "w": [64, 1, 3],
        "before": [0, 1],
        "after": [0, 1],
    },
}
if os.environ.get("PLANNED_SEGMENTS") == "all":
    # By the engine of the transposed image, whose every compilation takes four seconds.
    CASES["transposed line, whole"] = {**CASES["transposed line"], "groups": 1}

POOLED = {"tail": ["bias", "relu", "max_pool2d"], "x": [8, 4, 64, 64], "stride": [2, 2]}
ELU = {"tail": ["bias", "elu"], "alpha": 0.5}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_segment_has_a_plan_that_loads(planned, name):
    answer = planned[name]
    whole = segment_of(CASES[name])[0].describe()
    assert whole in answer["built"], answer
    for built in answer["built"].values():
        assert built["bytes"] > 1000
        assert built["loaded_workspace"] == built["workspace"]


@pytest.mark.parametrize(
    ("name", "bare"), [("large depthwise kernel", "conv2d"), ("transposed", "conv_transpose2d")]
)
def test_grouped_and_transposed_convolutions_are_also_planned_bare(planned, name, bare):
    assert bare in planned[name]["built"]
    assert "conv2d" not in planned["relu6"]["built"]


def test_an_elu_that_cudnn_has_not_is_left_to_torch(planned):
    answer = planned["elu of a half"]
    assert list(answer["built"]) == ["conv2d+bias"]
    assert [form for form, _ in answer["unsupported"]] == ["conv2d+bias+elu"]
    assert "elu in cuDNN has alpha 1, this one 0.5" in answer["unsupported"][0][1]


def test_a_line_has_the_plans_of_an_image_of_height_one(planned):
    answer = planned["line as an image"]
    plans = {form: built["plan"] for form, built in planned["line"]["built"].items()}
    assert plans == {
        form.replace("conv2d", "conv1d"): built["plan"] for form, built in answer["built"].items()
    }


def test_strict_fp32_refuses_tensor_cores_and_tf32_does_not(planned):
    assert any("tensor cores" in reason for reason in planned["fp32"]["rejected"])
    assert not planned["tf32"]["rejected"]
    assert planned["fp32"]["built"]["conv2d+bias+relu"] != planned["tf32"]["built"]["conv2d+bias+relu"]


def test_strict_fp32_has_a_plan_of_every_form_though_barred_ones_are_listed_first(planned):
    """With the activation left to torch, too: that form wins where the fused one is a generic engine."""
    answer = planned["fp32 silu"]
    assert list(answer["built"]) == ["conv2d+bias+silu", "conv2d+bias"]
    barred = [reason for reason in answer["rejected"] if "tensor cores" in reason]
    assert len(barred) > PLANS_PER_FORM[1]
