"""CREPE and conv_block through the real Triton server, from cuDNN plans on this GPU."""

import re
import shutil
import time
from pathlib import Path

import crepe
import numpy as np
import pytest
import tones
import torch
import tritonclient.grpc
from conftest import BUCKETS, ROOT, tool
from serving_client import ServingClient
from tritonclient.utils import cuda_shared_memory

from cudnn_fusion import devices, lowered, preflight
from cudnn_fusion.environment import cuda_compatibility, target_compatibility
from cudnn_fusion.partition import partition
from cudnn_fusion.plan_store import PlanStore
from cudnn_fusion.triton_server import TritonServer
from tools.demo.conv_block import conv_block

# Largest difference of an activation (0..1) from PyTorch in float32 on the CPU.
BOUNDS = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 4e-3, "bf16": 4e-2}
SAME_DEVICE = "the committed plans are for an NVIDIA H200 with cuDNN 9.19.0 and a CUDA 13.0 driver"


def serve(repository: Path, *models: str, **arguments) -> TritonServer:
    return TritonServer(repository, models=models, log_file=repository / "triton.log", **arguments)


def segments(server: TritonServer) -> dict[str, float]:
    """Origin of plans to number of segments, from the server's metrics."""
    return {
        match[1]: float(match[2])
        for match in re.finditer(r'cudnn_fusion_segments\{[^}]*origin="(\w+)"[^}]*\} (\S+)', server.metrics())
    }


@pytest.fixture(scope="module")
def frames():
    return tones.join(tones.tones(60, 11), tones.sweep(24, 12), tones.silence(4, 13))


@pytest.fixture(scope="module")
def expected(frames):
    with torch.inference_mode():
        return crepe.crepe_tiny()(torch.from_numpy(frames.samples)).numpy()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_crepe_is_served_by_tuned_plans_and_right(precision, tuned_pitch, tmp_path, frames, expected):
    shutil.copytree(tuned_pitch(precision), tmp_path / "pitch")
    with serve(tmp_path, "pitch") as server, ServingClient(server) as client:
        sites = partition(lowered.read(tmp_path / "pitch" / "1" / "lowered"), with_regions=True).sites
        assert segments(server) == {"exact": len(sites) * len(BUCKETS)}
        for batch in (1, 3, 64, 65):
            for protocol in ("grpc",) if precision == "bf16" else ("grpc", "http"):
                rows = np.arange(batch) % len(frames)
                answer, route = client.infer_and_tell("pitch", frames.samples[rows], protocol)
                difference = np.abs(answer.astype(np.float32) - expected[rows]).max()
                print(f"{precision} batch {batch} {protocol}: {difference:.2e}, {route}")
                assert difference <= BOUNDS[precision]
                assert route.origin == "exact"
        hertz = crepe.decode(torch.from_numpy(expected))[0]
        answer, _ = client.infer_and_tell("pitch", frames.samples[:84], "grpc")
        found = crepe.decode(torch.tensor(answer))[0]
        cents = 1200 * np.abs(np.log2(np.asarray(found) / np.asarray(hertz)[:84]))
        print(f"{precision}: pitch differs from PyTorch's by {cents.max():.2f} cents at most")
        assert cents.max() <= 5
        errors = server.log_errors()
    assert not errors
    cudnn_plans = PlanStore(tmp_path / "pitch" / "1" / "plans").plans(cuda_compatibility(0).hash())
    assert any(plan.candidate.engine == "cudnn" for plan in cudnn_plans)


def test_plans_made_without_a_gpu_serve_here(tmp_path):
    here = cuda_compatibility(0)
    described = target_compatibility(devices.load("h200"), 91900)
    if here != described:
        pytest.skip(f"{SAME_DEVICE}; this is {here.label()}")
    shutil.copytree(ROOT / "model_repository" / "conv_block", tmp_path / "conv_block")
    module = conv_block().cuda()
    with serve(tmp_path, "conv_block") as server, ServingClient(server) as client:
        assert set(segments(server)) == {"exact"}
        for batch in (1, 3, 8, 64):
            images = np.random.default_rng(batch).standard_normal((batch, 64, 56, 56)).astype(np.float16)
            answer, route = client.infer_and_tell("conv_block", images, "grpc")
            with torch.inference_mode():
                wanted = module(torch.from_numpy(images).cuda().float()).double().cpu().numpy()
            error = np.linalg.norm(answer - wanted) / np.linalg.norm(wanted)
            print(f"conv_block batch {batch}: {error:.2e}, {route}")
            assert error < 5e-4
            assert route.origin == "exact"


def test_inputs_and_outputs_in_cuda_shared_memory(tmp_path):
    shutil.copytree(ROOT / "model_repository" / "conv_block", tmp_path / "conv_block")
    images = np.random.default_rng(5).standard_normal((3, 64, 56, 56)).astype(np.float16)
    with torch.inference_mode():
        wanted = conv_block().cuda()(torch.from_numpy(images).cuda().float()).double().cpu().numpy()
    with serve(tmp_path, "conv_block") as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        regions = {}
        for name in ("image", "output"):
            regions[name] = cuda_shared_memory.create_shared_memory_region(name, images.nbytes, 0)
            raw = cuda_shared_memory.get_raw_handle(regions[name])
            client.register_cuda_shared_memory(name, raw, 0, images.nbytes)
        try:
            cuda_shared_memory.set_shared_memory_region(regions["image"], [images])
            tensor = tritonclient.grpc.InferInput("image", images.shape, "FP16")
            tensor.set_shared_memory("image", images.nbytes)
            output = tritonclient.grpc.InferRequestedOutput("output")
            output.set_shared_memory("output", images.nbytes)
            client.infer("conv_block", [tensor], outputs=[output])
            answer = cuda_shared_memory.get_contents_as_numpy(regions["output"], np.float16, images.shape)
            error = np.linalg.norm(answer - wanted) / np.linalg.norm(wanted)
            print(f"conv_block over CUDA shared memory: {error:.2e}")
            assert error < 5e-4
        finally:
            client.unregister_cuda_shared_memory()
            client.close()
            for region in regions.values():
                cuda_shared_memory.destroy_shared_memory_region(region)


def test_the_description_of_the_h200_is_what_an_h200_says():
    here = cuda_compatibility(0)
    if here.device_name != "NVIDIA H200":
        pytest.skip("this is no H200")
    described = target_compatibility(devices.load("h200"), preflight.cudnn_version())
    assert described.to_json() | {"cuda_driver_api": here.cuda_driver_api} == here.to_json()


def test_untuned_sizes_go_from_reference_to_heuristic(pitch, tmp_path, frames, expected):
    shutil.copytree(pitch("fp16"), tmp_path / "pitch", ignore=shutil.ignore_patterns("plans"))
    with serve(tmp_path, "pitch") as server, ServingClient(server) as client:
        started = time.perf_counter()
        first = client.infer("pitch", frames.samples[:5], "grpc")
        print(f"first answer of an untuned size: {(time.perf_counter() - started) * 1e3:.1f} ms")
        assert np.abs(first.astype(np.float32) - expected[:5]).max() <= BOUNDS["fp16"]
        routes = []
        deadline = time.monotonic() + 90
        while not routes or (routes[-1].origin != "heuristic" and time.monotonic() < deadline):
            answer, route = client.infer_and_tell("pitch", frames.samples[:5], "grpc")
            assert np.abs(answer.astype(np.float32) - expected[:5]).max() <= BOUNDS["fp16"]
            routes.append(route)
            time.sleep(0.2)
        assert routes[0].origin == "reference"
        assert routes[-1].origin == "heuristic"
        assert not server.log_errors()


def test_plans_of_another_driver_are_rebuilt_as_recipes(tuned_pitch, tmp_path, frames, expected):
    model = tmp_path / "pitch"
    shutil.copytree(tuned_pitch("fp16"), model)
    here = cuda_compatibility(0)
    store, moved = PlanStore(model / "1" / "plans"), PlanStore(tmp_path / "moved")
    other = type(here).from_json({**here.to_json(), "cuda_driver_api": 12090})
    for plan in store.plans(here.hash()):
        moved.publish(other, plan, store.find(here, plan.key).blob)
    for record in store.buckets(here):
        moved.publish_bucket(other, record)
    shutil.rmtree(model / "1" / "plans")
    shutil.copytree(tmp_path / "moved", model / "1" / "plans")
    repository = tmp_path / "repository"
    repository.mkdir()
    model.rename(repository / "pitch")
    with serve(repository, "pitch", ready_timeout_s=240) as server, ServingClient(server) as client:
        found = segments(server)
        print(f"segments by origin under another driver: {found}")
        assert found.get("recipe", 0) > 0
        assert not set(found) - {"recipe", "heuristic", "reference"}
        answer = client.infer("pitch", frames.samples[:8])
        assert np.abs(answer.astype(np.float32) - expected[:8]).max() <= BOUNDS["fp16"]
        assert "12090" in server.log()


def test_a_second_tuning_builds_and_times_nothing(tuned_pitch):
    output = tool("pretune.py", tuned_pitch("fp16"), "--buckets=1,8,64")
    assert "candidates built 0, timed 0" in " ".join(output.split())


def test_a_restart_builds_and_times_nothing_and_says_how_long_it_took(tuned_pitch, tmp_path):
    shutil.copytree(tuned_pitch("fp16"), tmp_path / "pitch")
    with serve(tmp_path, "pitch") as server:
        metrics = server.metrics()
    for stage in ("built", "timed"):
        assert re.search(rf'cudnn_fusion_candidates_total\{{[^}}]*stage="{stage}"[^}}]*\}} 0', metrics)
    parts = dict(re.findall(r'cudnn_fusion_load_seconds\{[^}]*part="(\w+)"[^}]*\} (\S+)', metrics))
    print(f"seconds of loading: {parts}")
    assert {"imports", "read", "plans", "executors", "warm_up"} <= set(parts)
