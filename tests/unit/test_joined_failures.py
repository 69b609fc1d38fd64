"""Requests that are run together: one that fails does not fail the others."""

from types import SimpleNamespace

from cudnn_fusion.instance import Clock, Instance
from cudnn_fusion.requests import Incoming
from cudnn_fusion.shapes import Bucket


def incoming(index: int) -> Incoming:
    return Incoming(index, [], Bucket.of({"batch": 1}), frozenset(), on_gpu=False)


def test_a_group_that_fails_is_run_one_by_one():
    runs = []
    served = (("bucket", "batch=1"),)

    def run(requests):
        runs.append([request.index for request in requests])
        if any(request.index == 1 for request in requests):
            raise IndexError("index out of range in self")
        return served

    counted = []
    triton = SimpleNamespace(
        InferenceResponse=lambda error: error,
        TritonError=lambda message, code: (code, message),
    )
    triton.TritonError.INVALID_ARG = "INVALID_ARG"
    metrics = SimpleNamespace(add=lambda *count: counted.append(count))
    model = SimpleNamespace(cache=SimpleNamespace(loads={"planned": 0}))
    instance = Instance(model, None, Clock())
    instance._run = run
    instance._response = lambda request, _: f"answer {request.index}"
    responses = [None] * 3
    instance._answer([incoming(index) for index in range(3)], responses, triton, metrics)
    assert runs == [[0, 1, 2], [0], [1], [2]]
    assert responses[0] == "answer 0"
    assert responses[2] == "answer 2"
    code, message = responses[1]
    assert code == "INVALID_ARG"
    assert message.startswith("index out of range in self")
    assert counted == [
        ("requests_total", 1, served),
        ("errors_total", 1, (("reason", "failed"),)),
        ("requests_total", 1, served),
    ]
