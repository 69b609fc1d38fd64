"""Exported and tuned models through the real server: right answers, by the plans that were tuned."""

import hashlib
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import small_net
from model_server import children, mapped_regions, parameter, wait_until
from tritonclient.utils import InferenceServerException

from tools.demo.serving_client import Route

TOLERANCE = 1e-4
SEED = int(os.environ.get("TEST_SEED", "20261202"))
NEW_SIZES = 60


def assert_right(answer, arrays, tolerance=TOLERANCE):
    """Every output in ``answer`` is what PyTorch gives for the same inputs."""
    expected = small_net.expected(arrays)
    assert answer
    for name, values in answer.items():
        np.testing.assert_allclose(
            values.astype(np.float32), expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def tree(root: Path) -> dict[str, str]:
    """Every path under ``root``, with the hash of a file's content."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(root.rglob("*"))
    }


# Buckets


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize(
    ("batch", "bucket", "choice"),
    [
        (1, "batch=1,height=16", "exact_shape"),
        (3, "batch=4,height=16", "padded"),
        (16, "batch=16,height=16", "exact_shape"),
        (17, "batch=16,height=16+batch=1,height=16", "split"),
        (40, "batch=16,height=16+batch=16,height=16+batch=16,height=16", "split"),
    ],
)
def test_batches_go_to_tuned_buckets_and_are_right(net, batch, bucket, choice, protocol):
    arrays = small_net.inputs(batch)
    answer, route = net.infer_and_tell(arrays, protocol)
    assert_right(answer, arrays)
    assert route == Route(bucket, choice, "exact")


@pytest.mark.parametrize(("batch", "height"), [(1, 64), (3, 33), (64, 17)])
def test_untuned_sizes_are_served_by_the_reference_and_right(net, batch, height):
    arrays = small_net.inputs(batch, height)
    answer, route = net.infer_and_tell(arrays)
    assert answer["profile"].shape == (batch, height // 4, 16)
    assert_right(answer, arrays)
    assert route == Route("untuned", "none", "reference")


def test_sizes_never_seen_before_are_answered_without_tuning_or_planning(model_server, net):
    """A benchmark, or a planning process, for every new size would show in the size's first request."""

    def started_by_models() -> set[str]:
        return {pid for model in children(model_server.triton.pid) for pid in children(int(model))}

    processes, routes = started_by_models(), net.routes()
    choose = random.Random(SEED)
    sizes = choose.sample([(batch, height) for batch in range(1, 9) for height in range(18, 65)], NEW_SIZES)
    first_s: list[float] = []
    again_s: list[float] = []
    for batch, height in sizes:
        arrays = small_net.inputs(batch, height)
        for seconds in (first_s, again_s):
            started = time.perf_counter()
            answer = net.infer(arrays)
            seconds.append(time.perf_counter() - started)
            assert_right(answer, arrays)
            assert started_by_models() <= processes
    assert net.routes() - routes == {Route("untuned", "none", "reference"): 2 * NEW_SIZES}
    p99_ms = 1000 * statistics.quantiles(first_s, n=100, method="inclusive")[98]
    more_ms = 1000 * (statistics.median(first_s) - statistics.median(again_s))
    print(
        f"TEST_SEED={SEED}: {NEW_SIZES} sizes, p99 {p99_ms:.1f} ms; "
        f"a size's first request takes {more_ms:.1f} ms longer than its second"
    )
    assert more_ms < 50


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("name", ["profile", "scores"])
def test_one_of_two_outputs_may_be_asked_for(net, name, protocol):
    arrays = small_net.inputs(2)
    answer = net.infer(arrays, protocol, outputs=[name])
    assert list(answer) == [name]
    assert_right(answer, arrays)


def test_clients_never_get_each_others_answers(net):
    """A failure that servers with shared buffers have had (triton server issue 5733)."""

    def client(number: int) -> None:
        for turn in range(25):
            arrays = small_net.inputs(1 + (number + turn) % 5, 16, seed=100 * number + turn)
            assert_right(net.infer(arrays, ("grpc", "http")[number % 2]), arrays)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))


def test_nan_stays_in_its_row(net):
    """As in torch, whose relu keeps NaN; some fused kernels make it 0 (tensorflow issue 40072)."""
    arrays = small_net.inputs(3)
    arrays["image"][1, 0, 5, 5] = np.nan
    answer = net.infer(arrays)
    expected = small_net.expected(arrays)
    assert np.isnan(expected["scores"][1]).all()
    for name, values in answer.items():
        assert not np.isnan(values[[0, 2]]).any()
        np.testing.assert_allclose(values, expected[name], TOLERANCE, TOLERANCE, err_msg=name)


# Loading


def test_a_restart_finds_every_plan_and_builds_and_times_nothing(net):
    assert net.metric("candidates_total", "stage") == {"built": 0, "timed": 0}
    assert net.metric("segments", "origin") == {"exact": 12}
    assert net.metric("buckets", "state") == {"tuned": 3, "skipped": 0}
    seconds = net.metric("load_seconds", "part")
    assert set(seconds) == {"imports", "read", "preflight", "weights", "plans", "executors", "warm_up"}
    assert min(seconds.values()) > 0
    assert seconds["imports"] > 0.2


def test_before_tuning_everything_is_served_by_the_reference(model_server, exported):
    with model_server.put("untuned", exported("fp32")) as model:
        assert model.metric("segments", "origin") == {}
        assert model.metric("buckets", "state") == {"tuned": 0, "skipped": 0}
        arrays = small_net.inputs(4)
        started = time.perf_counter()
        assert_right(model.infer(arrays), arrays)
        # The first request must not wait for torch's compiler to be loaded, which takes seconds.
        assert time.perf_counter() - started < 1
        answer, route = model.infer_and_tell(arrays)
        assert_right(answer, arrays)
        assert route == Route("untuned", "none", "reference")
        assert ["no bucket is tuned: " in line for line in model.log_lines("[WE]")] == [True]


def test_serving_writes_nothing_into_the_repository(model_server, tuned):
    """A change there makes Triton load the model anew (triton server issue 7489)."""
    model = model_server.put("unchanged", tuned)
    before = tree(model_server.repository)
    model.load()
    for arrays in (small_net.inputs(4), small_net.inputs(2, 30)):
        assert_right(model.infer(arrays), arrays)
    with pytest.raises(InferenceServerException, match="height"):
        model.infer(small_net.inputs(1, 80))
    assert tree(model_server.repository) == before
    model.unload()
    assert tree(model_server.repository) == before
    assert not [path for path in model_server.repository.rglob("__pycache__") if path.is_dir()]


def test_a_model_at_another_path_finds_the_same_plans(model_server, tuned, net):
    """Triton copies models from object stores to temporary paths (triton server issue 4587)."""
    with model_server.put("moved", tuned, elsewhere=True) as model:
        assert model.metric("segments", "origin") == {"exact": 12}
        assert model.metric("candidates_total", "stage") == {"built": 0, "timed": 0}
        arrays = small_net.inputs(16)
        answer, route = model.infer_and_tell(arrays)
        assert_right(answer, arrays)
        assert route == Route("batch=16,height=16", "exact_shape", "exact")


def test_a_model_is_unloaded_without_a_trace_and_loaded_again(model_server, tuned, net):
    def regions() -> set[Path]:
        return mapped_regions(model_server.triton.pid)

    def processes() -> set[str]:
        return children(model_server.triton.pid)

    def only_net_is_left() -> bool:
        return len(processes()) == len(regions()) == 1

    # Models that earlier tests have unloaded leave in their own time.
    assert wait_until(only_net_is_left)
    model = model_server.put("again", tuned)
    for _ in range(2):
        model.load()
        assert len(processes()) == len(regions()) == 2
        arrays = small_net.inputs(1)
        assert_right(model.infer(arrays), arrays)
        before = regions()
        model.unload()
        assert wait_until(only_net_is_left)
        (gone,) = before - regions()
        assert not gone.exists()
        assert "successfully unloaded 'again'" in model.log()
        with pytest.raises(InferenceServerException, match="again"):
            model.infer(arrays)
    assert model.log_lines("E") == []


# Settings


def test_engine_reference_serves_no_plan(model_server, tuned):
    with model_server.put("plain", tuned, parameter("ENGINE", "reference")) as model:
        arrays = small_net.inputs(3)
        answer, route = model.infer_and_tell(arrays)
        assert_right(answer, arrays)
        assert route.origin == "reference"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ENGINE", "nonsense", "parameter ENGINE is 'nonsense'; it must be one of auto, reference"),
        ("MAX_BUCKETS", "none", "parameter MAX_BUCKETS is 'none'; it must be a whole number"),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused(model_server, tuned, name, value, sentence):
    model = model_server.put(f"refused_{name.lower()}", tuned, parameter(name, value))
    with pytest.raises(InferenceServerException, match=sentence):
        model.load()
    assert "Traceback" not in model.log()


def test_fewer_buckets_are_built_when_so_told_and_all_are_served(model_server, tuned):
    with model_server.put("one_bucket", tuned, parameter("MAX_BUCKETS", "1")) as model:
        assert model.metric("buckets", "state") == {"tuned": 1, "skipped": 2}
        assert "batch=4,height=16: over MAX_BUCKETS=1" in model.log()
        for batch, choice in ((1, "padded"), (16, "exact_shape"), (17, "split")):
            arrays = small_net.inputs(batch)
            answer, route = model.infer_and_tell(arrays)
            assert_right(answer, arrays)
            assert (route.choice, route.origin) == (choice, "exact")


def two_on_cpu(config: str) -> str:
    return config + "instance_group [ { kind: KIND_CPU count: 2 } ]\n"


def test_two_instances_share_the_requests_and_are_both_right(model_server, tuned):
    with model_server.put("double", tuned, two_on_cpu) as model:
        for instance in ("double_0_0", "double_0_1"):
            assert f"{instance}: program" in model.log()

        def client(number: int) -> None:
            arrays = small_net.inputs(1 + number % 3, 16, seed=number)
            assert_right(model.infer(arrays), arrays)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(client, range(36)))


WARM_UP = """model_warmup [ {
  name: "random" batch_size: 3
  inputs { key: "image" value { data_type: TYPE_FP32 dims: [ 3, 16, 16 ] random_data: true } }
  inputs { key: "scale" value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
} ]
"""


@pytest.mark.parametrize(
    ("precision", "output_type", "tolerance"),
    [("fp16", np.float16, 1e-2), ("bf16", ml_dtypes.bfloat16, 1e-1)],
)
def test_half_precision_is_served_from_fp32_inputs(model_server, exported, precision, output_type, tolerance):
    """Warmed up with random bytes, which hold NaN and infinity in floating types."""
    with model_server.put(f"half_{precision}", exported(precision), lambda c: c + WARM_UP) as model:
        arrays = small_net.inputs(5)
        for protocol in ("grpc", "http"):
            answer = model.infer(arrays, protocol)
            assert {values.dtype for values in answer.values()} == {np.dtype(output_type)}
            assert_right(answer, arrays, tolerance)
