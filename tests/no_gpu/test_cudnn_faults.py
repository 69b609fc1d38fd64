"""What cuDNN does with plans, recipes and segments that do not fit: a reason each time, never a crash.

Most faults run in one process, which says a line as soon as it has survived one: if it dies, the first fault
without a line has killed it.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planning import segment_of

from cudnn_fusion import planner
from cudnn_fusion.plan import Candidate
from cudnn_fusion.planner import PlanRequest, plan_in_child

EXAMPLE = Path(__file__).resolve().parents[2] / "model_repository" / "conv_block"


def lines(done):
    """The lines that a process of faults has printed, by their first item."""
    answers = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, f"ended with {done.returncode} after {list(answers)}: {done.stderr[-1000:]}"
    return answers


RECIPES = """
import json, torch
from planning import segment_of
from cudnn_fusion import devices
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
from cudnn_fusion.plan import Candidate
from cudnn_fusion.planner import PlanRequest, plan_one
segment, sizes = segment_of({"tail": ["bias", "relu"]})
engine = CudnnEngine(torch.device("cuda"), devices.load("h200")["properties"])
first = engine.candidates(segment, sizes)[0]
before = engine.build(segment, sizes, first)
form = first.form
knob = first.knobs[0][0]
faults = {
    "an engine that is gone": Candidate("cudnn", form, "gone", 9999),
    "a negative engine": Candidate("cudnn", form, "gone", -1),
    "an engine beyond 32 bits": Candidate("cudnn", form, "gone", 2**40),
    "a knob's wrong value": Candidate("cudnn", form, "gone", first.engine_id, ((knob, 12345),)),
    "a knob's value beyond 64 bits": Candidate("cudnn", form, "gone", first.engine_id, ((knob, 2**70),)),
    "a knob that is gone": Candidate("cudnn", form, "gone", first.engine_id, (("NO_SUCH_KNOB", 1),)),
    "a name that is no knob": Candidate("cudnn", form, "gone", first.engine_id, (("__class__", 1),)),
    "a form of another segment": Candidate("cudnn", "conv2d+silu", first.plan_name, first.engine_id),
    "knobs that cannot be replayed": Candidate("cudnn", form, "gone", 32, (("NOT_SET", 1),), False),
}
for name, fault in faults.items():
    try:
        engine.build(segment, sizes, fault)
        reason = None
    except CandidateRejectedError as error:
        reason = str(error)
    next_best = plan_one(engine, PlanRequest(segment, sizes, (fault,)))
    after = engine.build(segment, sizes, first)
    same = (after.candidate, after.blob) == (before.candidate, before.blob)
    print(json.dumps([name, [reason, next_best.candidate == first, same]]), flush=True)
"""

RECIPE_REASONS = {
    "an engine that is gone": "engine id",
    "a negative engine": "engine id",
    "an engine beyond 32 bits": "engine_id",
    "a knob's wrong value": "NOT_SUPPORTED",
    "a knob's value beyond 64 bits": "create_execution_plan",
    "a knob that is gone": "NO_SUCH_KNOB",
    "a name that is no knob": "__class__",
    "a form of another segment": "conv2d+silu",
    "knobs that cannot be replayed": "gone",
}


@pytest.fixture(scope="module")
def faults(script):
    """What one process says of all faults of blobs, segments and recipes: it takes seconds to start."""
    return lines(script(BLOBS + SEGMENTS + RECIPES + SERVED, EXAMPLE, stdin=json.dumps(IMPOSSIBLE)))


@pytest.fixture(scope="module")
def recipes(faults):
    return faults


@pytest.mark.parametrize("fault", RECIPE_REASONS)
def test_a_recipe_that_cannot_be_replayed_has_a_reason_and_the_next_plan_is_built(recipes, fault):
    """Stored plans whose engine or knobs no longer exist ended servers (flashinfer issues 3566 and 3449)."""
    reason, next_is_first_choice, engine_works_on = recipes[fault]
    assert RECIPE_REASONS[fault] in reason
    assert "\n" not in reason
    assert len(reason) < 400
    assert next_is_first_choice
    assert engine_works_on


BLOBS = """
import json, pathlib, sys, torch
from planning import segment_of
from cudnn_fusion import devices
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
import cudnn
properties = devices.load("h200")["properties"]
engine = CudnnEngine(torch.device("cuda"), properties)
def built(tail):
    segment, sizes = segment_of({"tail": tail})
    return engine.build(segment, sizes, engine.candidates(segment, sizes)[0]).blob
caught = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError)
def refusal(blob, **changes):
    description = cudnn.create_device_properties(json.dumps({**properties, **changes}))
    try:
        cudnn.pygraph(device_property=description, sm_version=90).deserialize(blob)
    except caught as error:
        return str(error)
def say(name, answer):
    print(json.dumps([name, answer]), flush=True)
for name, blob in {"precompiled": built(["bias", "relu"]), "compiled": built(["bias", "silu"])}.items():
    say(name + " unchanged", refusal(blob))
    say(name + " multiprocessors", refusal(blob, multiProcessorCount=114))
    say(name + " driver", refusal(blob, driverVer=13010))
    say(name + " capability", refusal(blob, deviceVer=1000))
    say(name + " shared memory", refusal(blob, maxSharedMemoryPerBlockOptin=101376))
    say(name + " device name", refusal(blob, deviceName="NVIDIA H100 80GB HBM3"))
    say(name + " cut", refusal(blob[: len(blob) // 2]))
    say(name + " wrong first bytes", refusal(bytes(16) + blob[16:]))
say("precompiled empty", refusal(b""))
say("precompiled text", refusal(b"not a plan " * 100))
say("committed", [refusal(path.read_bytes()) for path in pathlib.Path(sys.argv[1]).rglob("*.plan")])
"""


@pytest.fixture(scope="module")
def blobs(faults):
    return faults


def test_cudnn_loads_the_plans_of_the_committed_example(blobs):
    assert blobs["committed"] == [None, None, None]


@pytest.mark.parametrize("kind", ["precompiled", "compiled"])
@pytest.mark.parametrize("changed", ["multiprocessors", "driver", "capability", "shared memory"])
def test_cudnn_itself_refuses_a_plan_of_another_device(blobs, kind, changed):
    assert blobs[f"{kind} unchanged"] is None
    assert "ARCH_MISMATCH" in blobs[f"{kind} {changed}"]


@pytest.mark.parametrize("kind", ["precompiled", "compiled"])
def test_cudnn_does_not_look_at_the_device_name_so_the_store_must(blobs, kind):
    assert blobs[f"{kind} device name"] is None


@pytest.mark.parametrize(
    "damage",
    [
        "precompiled cut",
        "compiled cut",
        "precompiled wrong first bytes",
        "compiled wrong first bytes",
        "precompiled empty",
        "precompiled text",
    ],
)
def test_a_blob_that_is_no_plan_is_refused_with_an_error_that_loading_expects(blobs, damage):
    """A blob with wrong first bytes and a matching checksum must not end a server (seen in TensorRT)."""
    assert blobs[damage]


SERVED = """
import shutil, tempfile
from dataclasses import replace
from cudnn_fusion import lowered
from cudnn_fusion.engines.torch_eager import REFERENCE_FORM, TorchEngine
from cudnn_fusion.environment import current_provenance
from cudnn_fusion.interpreter import Interpreter
from cudnn_fusion.plan import sha256_hex
from cudnn_fusion.plan_cache import PlanCache
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.served_model import ServedModel
from cudnn_fusion.settings import Settings
cpu = torch.device("cpu")
described = cudnn.pygraph
class WithoutHandle:
    def __init__(self, handle):
        device = cudnn.create_device_properties(json.dumps(properties))
        self.graph = described(device_property=device, sm_version=90)
    def deserialize(self, handle, blob):
        self.graph.deserialize(blob)
cudnn.pygraph = WithoutHandle
class LoadsAndLetsTorchRun(CudnnEngine):
    def handle(self):
        return None
    def load(self, segment, sizes, *plan):
        super().load(segment, sizes, *plan)
        return TorchEngine(cpu).load(segment, sizes, Candidate("torch", REFERENCE_FORM), None, 0)
version = pathlib.Path(sys.argv[1]) / "1"
program = lowered.read(version / "lowered")
damages = {
    "unchanged": lambda blob: blob,
    "wrong first bytes": lambda blob: bytes(16) + blob[16:],
    "cut": lambda blob: blob[: len(blob) // 2],
    "empty": lambda blob: b"",
}
for name, damage in damages.items():
    root = pathlib.Path(tempfile.mkdtemp())
    # Without its bucket of 64 rows, which takes seconds on a CPU.
    shutil.copytree(version / "plans", root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("batch=64.*"))
    store = PlanStore(root)
    (here,) = [stored.compatibility for stored in store.environments()]
    (plan,) = [plan for plan in store.plans(here.hash()) if plan.key.sizes[0][1][0] == 1]
    blob = damage(store.find(here, plan.key).blob)
    store.publish(here, replace(plan, blob_sha256=sha256_hex(blob)), blob)
    cache = PlanCache([store], here, current_provenance("cpu"), {"cudnn": LoadsAndLetsTorchRun(cpu)}, cpu)
    cache.build_missing = lambda requests: ["no other plan"] * len(requests)
    model = ServedModel(program, cache, [store], Settings())
    report = model.load()
    wrong = []
    for executor in model.live:
        for tensor in executor.inputs:
            tensor.normal_()
        expected = Interpreter(program, program.weights, cpu).run(executor.inputs)
        for got, wanted in zip(executor.run(), expected, strict=True):
            if not torch.allclose(got, wanted, rtol=1e-2, atol=1e-2):
                wrong.append(executor.bucket.name)
    reasons = [served.reason for served in model._served if served.origin != "exact"]
    origins = sorted(executor.origin for executor in model.live)
    shutil.rmtree(root)
    say("served " + name, [origins, reasons, report.skipped, wrong])
"""


@pytest.mark.parametrize("damage", ["wrong first bytes", "cut", "empty"])
def test_a_model_with_a_blob_that_is_no_plan_loads_refuses_that_plan_and_serves_the_rest(faults, damage):
    """The checksum matches: cuDNN itself has to refuse it. Torch stands in for running what cuDNN loads."""
    assert faults["served unchanged"] == [["exact", "exact"], [], [], []]
    origins, (reason,), skipped, wrong = faults[f"served {damage}"]
    assert origins == ["exact", "reference"]
    assert reason.startswith("does not run: not loaded: ")
    assert reason.endswith("; no other plan")
    assert skipped == wrong == []


IMPOSSIBLE = {
    "channels that differ": {"w_channels": 48},
    "channels that groups do not divide": {"groups": 3},
    "no rows": {"x": [0, 64, 56, 56]},
    "a kernel larger than its input": {
        "x": [8, 64, 2, 2],
        "w": [64, 7, 7],
        "before": [0, 0],
        "after": [0, 0],
    },
    "negative padding": {"before": [-1, 0]},
}


SEGMENTS = """
from planning import plan_case
for name, case in {**json.load(sys.stdin), "possible": {}}.items():
    print(json.dumps([name, plan_case({"tail": ["bias", "relu"], **case})]), flush=True)
"""


@pytest.fixture(scope="module")
def planned(faults):
    """What planning says of the impossible cases, and of a possible one as ``possible``."""
    return faults


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_segment_that_cannot_be_planned_has_a_reason_for_every_form(planned, case):
    answer = planned[case]
    assert answer["count"] == 0
    bare = ["conv2d"] if IMPOSSIBLE[case].get("groups", 1) > 1 else []
    assert [form for form, _ in answer["unsupported"]] == ["conv2d+bias+relu", "conv2d+bias", *bare]
    for form, reason in answer["unsupported"]:
        assert reason.startswith(f"cuDNN has no plan for {form}: ")
        assert "\n" not in reason


WITHOUT_DRIVER = """
import json
from planning import plan_case
print(json.dumps(plan_case({"tail": ["bias", "silu"]})))
"""


def test_without_the_driver_only_precompiled_forms_are_planned_and_the_others_have_a_reason(
    script, driverless_environment
):
    done = script(WITHOUT_DRIVER, environment=driverless_environment)
    assert done.returncode == 0, done.stderr[-1000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert list(answer["built"]) == ["conv2d+bias"]
    ((form, reason),) = answer["unsupported"]
    assert form == "conv2d+bias+silu"
    assert "RUNTIME_PREREQUISITE_MISSING" in reason


PLANNER = """
import torch
from cudnn_fusion import devices, planner
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
torch.cuda.init = lambda: None
planner.CudnnEngine = lambda device: CudnnEngine(device, devices.load("h200")["properties"])
planner.main()
"""


@pytest.fixture(scope="module")
def replayed(script, planned):
    """The candidate that recipes name, and what the planning process answers to each request."""
    listed = [planner._candidate(data) for data in planned["possible"]["replayable"]]
    wanted = listed[2]
    renamed = replace(wanted, plan_name="as another version names it")
    vanished = (
        replace(renamed, engine_id=9999, knobs=()),
        replace(renamed, knobs=(("TILE_SIZE", 12345),)),
        replace(renamed, knobs=(("NO_SUCH_KNOB", 1),)),
        Candidate("torch", "channels_last"),
    )
    same, sizes = segment_of({"tail": ["bias", "relu"]})
    new, new_sizes = segment_of({"tail": ["bias", "add", "leaky_relu"], "stride": [2, 2]})
    bad, bad_sizes = segment_of({"tail": ["bias", "relu"], "groups": 3})
    requests = {
        "by name": PlanRequest(same, sizes, (wanted,)),
        "by engine and knobs": PlanRequest(same, sizes, (renamed,)),
        "after vanished ones": PlanRequest(same, sizes, (*vanished, wanted)),
        "only vanished ones": PlanRequest(same, sizes, vanished),
        "none": PlanRequest(new, new_sizes),
        "impossible": PlanRequest(bad, bad_sizes, vanished),
    }
    message = {"device": 0, "requests": [planner._to_json(request) for request in requests.values()]}
    done = script(PLANNER, stdin=json.dumps(message))
    assert done.returncode == 0, done.stderr[-2000:]
    answers = map(planner._answer, json.loads(done.stdout.splitlines()[-1]))
    return listed, wanted, dict(zip(requests, answers, strict=True))


@pytest.mark.parametrize("recipe", ["by name", "by engine and knobs", "after vanished ones"])
def test_a_recipe_of_another_process_is_planned_anew(replayed, recipe):
    listed, wanted, answers = replayed
    assert (wanted.engine_id, wanted.knobs) != (listed[0].engine_id, listed[0].knobs)
    built = answers[recipe]
    assert built.candidate == wanted, "the name that it has here, not the one that it had there"
    assert built.workspace_bytes == answers["by name"].workspace_bytes
    assert len(built.blob) == len(answers["by name"].blob)


def test_vanished_recipes_leave_cudnns_own_first_choice(replayed):
    """As after an update that drops an engine or a knob (flashinfer issues 3566 and 3449)."""
    listed, _, answers = replayed
    assert answers["only vanished ones"].candidate == listed[0]


def test_the_planning_process_answers_each_request_with_a_plan_or_a_reason(replayed):
    _, _, answers = replayed
    assert answers["none"].candidate.form == "conv2d+bias+add+leaky_relu"
    assert len(answers["none"].blob) > 1000
    assert "9999" not in answers["impossible"]
    assert "conv2d+bias+relu: " in answers["impossible"]


def test_a_planning_process_that_dies_is_a_reason_for_each_request(monkeypatch, tmp_path):
    """It runs in this environment's Python, whatever PATH says, and has no GPU to plan for."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho another python was started >&2; exit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    segment, sizes = segment_of({"tail": ["bias", "relu"]})
    first, second = plan_in_child([PlanRequest(segment, sizes)] * 2, torch.device("cuda", 0))
    assert first == second
    assert first.startswith("the planning process ended with code 1: ")
    assert "another python" not in first
    assert "CUDA" in first or "NVIDIA" in first
