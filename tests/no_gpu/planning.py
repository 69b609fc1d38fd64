"""Run in a process of its own: plans segments for a described H200, and says in JSON what came of it.

Standard input: a list of ``{"tail": [kinds], "store": directory or null, ...sizes}``.
"""

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from cudnn_fusion import accuracy, devices
from cudnn_fusion.engines.base import CandidateRejectedError
from cudnn_fusion.engines.cudnn_graph import CudnnEngine
from cudnn_fusion.environment import current_provenance, target_compatibility
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.preflight import cudnn_version, load_cudnn
from cudnn_fusion.segment import TRANSPOSED, Operand, Operation, Segment, per_channel_dims
from cudnn_fusion.tuner import untimed_plan

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "tf32": "float32"}
OPERANDS = {"bias": "bias", "scale": "scale", "shift": "shift", "add": "residual"}


def segment_of(case):
    """A segment and its sizes; 8x64x56x56 by 64 3x3 kernels in fp16 unless the case says otherwise."""
    precision = case.get("precision", "fp16")
    dtype = DTYPES[precision]
    groups = case.get("groups", 1)
    x = tuple(case.get("x", [8, 64, 56, 56]))
    k, *kernel = case.get("w", [64, 3, 3])
    ones = [1] * len(kernel)
    kind = case.get("kind", f"conv{len(kernel)}d")
    transposed = kind in TRANSPOSED
    attributes = [
        ("padding_before", tuple(case.get("before", ones))),
        ("padding_after", tuple(case.get("after", ones))),
        ("stride", tuple(case.get("stride", ones))),
        ("dilation", tuple(case.get("dilation", ones))),
        ("groups", groups),
    ]
    if transposed:
        attributes.append(("output_padding", tuple(case.get("output_padding", [0] * len(kernel)))))
    operations = [Operation(kind, "w", tuple(attributes))]
    operands = [Operand("x", dtype, "channels_last", "input"), Operand("w", dtype, "channels_last", "weight")]
    channels = (x[1], k // groups) if transposed else (k, case.get("w_channels", x[1] // groups))
    sizes = {"x": x, "w": (*channels, *kernel)}
    for kind in case["tail"]:
        attribute = {
            "leaky_relu": (("negative_slope", 0.1),),
            "elu": (("alpha", case.get("alpha", 1.0)),),
            "max_pool2d": (("kernel", (3, 3)), ("stride", (2, 2)), ("padding", (1, 1))),
        }
        operations.append(Operation(kind, OPERANDS.get(kind), attribute.get(kind, ())))
        if kind in OPERANDS:
            role = "input" if kind == "add" else "weight"
            operands.append(Operand(OPERANDS[kind], dtype, "channels_last", role))
            sizes[OPERANDS[kind]] = per_channel_dims(k, len(x))
    operands.append(Operand("y", dtype, "channels_last", "output"))
    segment = Segment(tuple(operations), tuple(operands), precision)
    sizes["y"] = segment.output_dims(sizes)
    if "residual" in sizes:
        sizes["residual"] = sizes["y"]
    return segment, sizes


def plan_case(case):
    """Builds the first buildable plan of every form; loads the first back; stores it if asked to."""
    description = devices.load("h200")
    engine = CudnnEngine(torch.device("cuda"), description["properties"])
    segment, sizes = segment_of(case)
    candidates = engine.candidates(segment, sizes)
    answer = {
        "unsupported": engine.unsupported(segment, sizes),
        "count": len(candidates),
        "replayable": [asdict(candidate) for candidate in candidates if candidate.replayable],
        "built": {},
        "rejected": [],
        "neighbours": neighbours(engine, segment, sizes, candidates) if case.get("store") else [],
    }
    for candidate in candidates:
        if candidate.form in answer["built"]:
            continue
        try:
            built = engine.build(segment, sizes, candidate)
        except CandidateRejectedError as reason:
            answer["rejected"].append(str(reason))
            continue
        loaded = read_back(built.blob)
        answer["built"][candidate.form] = {
            "plan": built.candidate.plan_name,
            "engine": built.candidate.engine_id,
            "bytes": len(built.blob),
            "workspace": built.workspace_bytes,
            "notes": built.behavior_notes,
            "loaded_workspace": loaded,
        }
        if case.get("store") and len(answer["built"]) == 1:
            publish(case["store"], segment, sizes, built, description)
    return answer


def neighbours(engine, segment, sizes, candidates):
    """The knobs of a plan and its neighbours, each with the name of what is built of it; of the engine with
    most plans of the first form."""
    first = [candidate for candidate in candidates if candidate.form == candidates[0].form]
    engine_id = statistics.mode(candidate.engine_id for candidate in first)
    plan = next(candidate for candidate in first if candidate.engine_id == engine_id)
    found = [plan, *engine.neighbours(segment, sizes, plan)]
    built = [engine.build(segment, sizes, neighbour).candidate for neighbour in found]
    return [(dict(c.knobs), b.plan_name == c.plan_name) for c, b in zip(found, built, strict=True)]


def read_back(blob):
    """Workspace bytes of the plan that cuDNN makes of the blob, in a graph that knows nothing else."""
    load_cudnn()
    import cudnn

    properties = cudnn.create_device_properties(json.dumps(devices.load("h200")["properties"]))
    graph = cudnn.pygraph(device_property=properties, sm_version=90)
    graph.deserialize(blob)
    return int(graph.get_workspace_size())


def publish(directory, segment, sizes, built, description):
    plan = untimed_plan(segment.key(sizes, accuracy.VALIDATION), built, current_provenance("cuda"))
    compatibility = target_compatibility(description, cudnn_version())
    PlanStore(Path(directory)).publish(compatibility, plan, built.blob)


if __name__ == "__main__":
    print(json.dumps([plan_case(case) for case in json.load(sys.stdin)]))
