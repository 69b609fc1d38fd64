"""The model.py that `benchmarks/overhead.py` serves: the product's model with stopwatches.

Triton loads copies of this file. The product itself is not changed and knows nothing of it: the names through
which `cudnn_fusion.instance` calls its parts are replaced by timed ones in the model's process alone.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cudnn_fusion.triton_model import TritonPythonModel as ServedTritonModel

SAMPLES_VARIABLE = "CUDNN_FUSION_OVERHEAD_SAMPLES"
"""Environment variable with the folder to which the samples go, as the model's name and ``.json``."""

PARTS_SUFFIX = "_parts"
"""Ends the name of a model whose parts are all timed. Of any other only the engine's calls are: stopwatches
take time too."""


class TritonPythonModel(ServedTritonModel):
    """Writes microseconds of every `execute` when it is unloaded: ``{"execute": [...], "run": [...]}``."""

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        self._spent_ns: dict[str, int] = defaultdict(int)
        self._samples_us: dict[str, list[float]] = {}
        self._name = args["model_name"]
        self._time_parts(everything=self._name.endswith(PARTS_SUFFIX))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        self._spent_ns.clear()
        started = time.perf_counter_ns()
        responses = super().execute(requests)
        self._spent_ns["execute"] = time.perf_counter_ns() - started
        for part, spent_ns in self._spent_ns.items():
            self._samples_us.setdefault(part, []).append(spent_ns / 1e3)
        return responses

    def finalize(self) -> None:
        super().finalize()
        Path(os.environ[SAMPLES_VARIABLE], f"{self._name}.json").write_text(json.dumps(self._samples_us))

    def _time_parts(self, everything: bool) -> None:
        from cudnn_fusion import executor, instance, metrics, served_model

        for part, owner, name in (
            ("parse", instance, "parse"),
            ("choose", instance, "group"),
            ("choose", served_model.ServedModel, "choose"),
            ("choose", served_model.ServedModel, "executor"),
            ("copy in", instance, "copy_in"),
            ("run", executor.Executor, "run"),
            ("cut out", instance, "cut_out"),
            ("responses", instance.Instance, "_response"),
            ("metric", metrics.Metrics, "add"),
        ):
            if everything or part == "run":
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spent_ns = self._spent_ns

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent_ns[part] += time.perf_counter_ns() - started

        return timed
