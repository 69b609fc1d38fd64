"""Requests that are run together: one that fails does not fail the others."""

from types import SimpleNamespace

from cudnn_fusion.instance import Instance
from cudnn_fusion.requests import Incoming
from cudnn_fusion.shapes import Bucket


def incoming(index: int) -> Incoming:
    return Incoming(index, [], Bucket.of({"batch": 1}), frozenset(), on_gpu=False)


def test_a_group_that_fails_is_run_one_by_one():
    runs = []

    def run(requests):
        runs.append([request.index for request in requests])
        if any(request.index == 1 for request in requests):
            raise IndexError("index out of range in self")
        return (("bucket", "batch=1"),)

    instance = SimpleNamespace(_run=run)
    instance._run_apart = lambda requests: Instance._run_apart(instance, requests)
    results = {
        served[0].index: result
        for served, result in Instance._run_apart(instance, [incoming(i) for i in range(3)])
    }
    assert runs == [[0, 1, 2], [0], [1], [2]]
    assert isinstance(results[1], IndexError)
    assert results[0] == results[2] == (("bucket", "batch=1"),)
