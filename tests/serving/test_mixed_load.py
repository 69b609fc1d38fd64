"""Many different requests at once: every answer right or a clear error, and nothing grows.

``LOAD_REQUESTS`` sets how many are sent, ``TEST_SEED`` which.
"""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import small_net
import torch
from model_server import children
from tritonclient.utils import InferenceServerException

REQUESTS = int(os.environ.get("LOAD_REQUESTS", "400"))
SEED = int(os.environ.get("TEST_SEED", "20261202"))
THREADS = 8
KINDS = (
    "right",
    "right",
    "right",
    "untuned height",
    "too high",
    "too low",
    "wrong channels",
    "missing input",
)


def memory_kib(pid: str) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def open_files(pid: str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def one(model, kind: str, seed: int) -> str:
    """Sends one request; gives what came of it, or raises what a user would call a fault."""
    generator = np.random.default_rng(seed)
    rows = int(generator.choice([1, 2, 3, 4, 7, 16, 17, 40]))
    height = {"untuned height": 24, "too high": 65, "too low": 15}.get(kind, 16)
    channels = 4 if kind == "wrong channels" else 3
    arrays = {
        "image": generator.standard_normal((rows, channels, height, 16)).astype(np.float32),
        "scale": generator.standard_normal((rows, 4)).astype(np.float32),
    }
    if kind == "missing input":
        del arrays["scale"]
    protocol = "grpc" if seed % 2 else "http"
    if kind not in ("right", "untuned height"):
        with pytest.raises(InferenceServerException, match=r"\w") as refused:
            model.infer(arrays, protocol)
        assert "timeout" not in str(refused.value).lower(), f"seed {seed}, {kind}: {refused.value}"
        return "refused"
    answer = model.infer(arrays, protocol)
    with torch.inference_mode():
        expected = NET(torch.from_numpy(arrays["image"]), torch.from_numpy(arrays["scale"]))
    for name, value in answer.items():
        np.testing.assert_allclose(
            value, expected[name].numpy(), rtol=1e-3, atol=1e-4, err_msg=f"seed {seed}"
        )
    return "right"


NET = small_net.small_net()


def test_mixed_requests_are_right_or_refused_and_nothing_grows(model_server, net):
    choose = random.Random(SEED)
    work = [(choose.choice(KINDS), SEED + number) for number in range(REQUESTS)]
    quarter = REQUESTS // 4
    with ThreadPoolExecutor(THREADS) as pool:

        def send(part):
            return Counter(pool.map(lambda item: one(net, *item), part))

        counts = send(work[:quarter])
        pids = [str(model_server.triton.pid), *children(model_server.triton.pid)]
        before = {pid: (memory_kib(pid), open_files(pid)) for pid in pids}
        counts += send(work[quarter:])
    grown = {pid: memory_kib(pid) - before[pid][0] for pid in pids}
    files = {pid: open_files(pid) - before[pid][1] for pid in pids}
    print(f"TEST_SEED={SEED}: {dict(counts)} of {REQUESTS}; KiB grown {grown}; files grown {files}")
    assert counts.total() == REQUESTS
    assert max(grown.values()) < 100 * 1024
    assert max(files.values()) <= 4 * THREADS
