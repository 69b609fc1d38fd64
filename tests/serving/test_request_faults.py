"""Requests that cannot be served, alone and among others: each gets its own error, and the server goes on."""

import socket
from collections import Counter

import numpy as np
import pytest
import small_net
from model_server import TIMEOUT_S, joined_in_threes, request_inputs, wait_until
from test_serving import assert_right
from tritonclient.utils import InferenceServerException

from tools.demo.serving_client import Route

HEIGHT_ERROR = "axis height is {}; this model takes 16 to 64"
# Triton's own code for HTTP and gRPC's name, as tritonclient reports them.
INVALID = {"grpc": "StatusCode.INVALID_ARGUMENT", "http": "400"}


@pytest.fixture(scope="module")
def joined(model_server, tuned):
    """The tuned network, its requests run three at a time."""
    with model_server.put("joined", tuned, joined_in_threes) as model:
        yield model


def assert_still_serving(model):
    arrays = small_net.inputs(2, seed=77)
    assert_right(model.infer(arrays), arrays)


@pytest.fixture
def one_execute(joined):
    """Sends three requests, gives what came back; fails unless the server ran them in one execute."""

    def executes() -> Counter[int]:
        """How many there have been of each number of rows."""
        return Counter({b.batch_size: b.compute_infer.count for b in joined.statistics().batch_stats})

    def send(requests):
        before = executes()
        results = joined.infer_at_once(requests)
        # Triton counts after it has answered.
        assert wait_until(lambda: executes() != before)
        assert executes() - before == {3: 1}
        return results

    return send


# Several requests in one execute


@pytest.mark.parametrize("heights", [(80, 16, 8), (65, 30, 15)])
def test_bad_requests_do_not_spoil_the_good_one_beside_them(one_execute, joined, heights):
    """The Python backend's own quality check: of three requests the first and the third are bad."""
    requests = [small_net.inputs(1, height, seed) for seed, height in enumerate(heights)]
    first, second, third = one_execute(requests)
    assert_right(second, requests[1])
    for error, height in ((first, heights[0]), (third, heights[2])):
        assert isinstance(error, InferenceServerException)
        assert error.status() == INVALID["grpc"]
        assert HEIGHT_ERROR.format(height) in error.message()
    assert joined.log_lines("E") == []


def test_requests_of_different_heights_are_grouped_and_answered_in_order(one_execute, joined):
    """Servers that stack what they join have mixed these up (triton server issue 6937)."""
    before = joined.routes()
    requests = [small_net.inputs(1, height, seed) for seed, height in enumerate((16, 32, 16))]
    for answer, arrays in zip(one_execute(requests), requests, strict=True):
        assert_right(answer, arrays)
    assert joined.routes() - before == {
        Route("batch=4,height=16", "padded", "exact"): 2,
        Route("untuned", "none", "reference"): 1,
    }


def test_a_group_takes_rows_from_all_its_requests(one_execute):
    requests = [small_net.inputs(1, 16, seed) for seed in (10, 11, 12)]
    for answer, arrays in zip(one_execute(requests), requests, strict=True):
        assert_right(answer, arrays)


# Single requests


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("height", [15, 65, 1000])
def test_a_size_out_of_range_is_refused_with_what_came_and_what_is_allowed(net, height, protocol):
    before = net.metric("errors_total", "reason").get("invalid", 0)
    with pytest.raises(InferenceServerException) as refused:
        net.infer(small_net.inputs(1, height), protocol)
    assert refused.value.status() == INVALID[protocol]
    assert HEIGHT_ERROR.format(height) in refused.value.message()
    assert net.metric("errors_total", "reason")["invalid"] == before + 1
    assert_still_serving(net)


def test_inputs_with_different_numbers_of_rows_are_refused(net):
    arrays = small_net.inputs(3) | {"scale": small_net.inputs(2)["scale"]}
    with pytest.raises(InferenceServerException, match="'image' batch size does not match"):
        net.infer(arrays)
    assert_still_serving(net)


BAD = {
    "zero rows": {"image": np.zeros((0, 3, 16, 16), np.float32), "scale": np.zeros((0, 4), np.float32)},
    "zero height": {"image": np.zeros((1, 3, 0, 16), np.float32)},
    "missing axis": {"image": np.zeros((3, 16, 16), np.float32)},
    "additional axis": {"image": np.zeros((1, 1, 3, 16, 16), np.float32)},
    "wrong channels": {"image": np.zeros((1, 4, 16, 16), np.float32)},
    "wrong type": {"image": np.zeros((1, 3, 16, 16), np.int32)},
    "half precision": {"image": np.zeros((1, 3, 16, 16), np.float16)},
    "too many rows": {"image": np.zeros((65, 3, 16, 16), np.float32), "scale": np.zeros((65, 4), np.float32)},
}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("case", BAD)
def test_a_request_that_does_not_fit_is_an_error_and_never_a_hang(net, case, protocol):
    with pytest.raises(InferenceServerException) as refused:
        net.infer(small_net.inputs(1) | BAD[case], protocol)
    assert refused.value.status() == INVALID[protocol], refused.value
    assert refused.value.message()
    assert_still_serving(net)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_missing_input_and_an_unknown_output_are_named(net, protocol):
    arrays = small_net.inputs(1)
    with pytest.raises(InferenceServerException, match=r"scale|expected 2 inputs"):
        net.infer({"image": arrays["image"]}, protocol)
    with pytest.raises(InferenceServerException, match="logits"):
        net.infer(arrays, protocol, outputs=["logits"])
    assert_still_serving(net)


def test_a_client_that_gives_up_does_not_disturb_the_next(net):
    with pytest.raises(InferenceServerException):
        net.server.control.infer("net", request_inputs(small_net.inputs(64, 64)), client_timeout=1e-4)
    assert_still_serving(net)


def test_a_stop_in_the_middle_of_a_body_does_not_disturb_the_next(net):
    host, port = net.server.triton.http_url.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n{")
    assert_still_serving(net)
