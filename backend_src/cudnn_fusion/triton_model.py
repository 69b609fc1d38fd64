"""The Triton Python model: requests in, responses out.

The path of a request: `TritonPythonModel.execute` -> `instance.Instance.execute` -> `requests.parse`
(checked, sizes taken) -> `requests.group` -> `served_model.ServedModel.choose` and ``executor`` (bucket,
plans) -> `requests.copy_in` -> `executor.Executor.run` -> `requests.cut_out` -> responses in order.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudnn_fusion.cpu_threads import let_threads_sleep
from cudnn_fusion.settings import Settings, SettingsError


class TritonPythonModel:
    """One instance of a model.

    Heavy modules are imported in `initialize`: Triton loads this module in a process of its own too, to
    complete the configuration.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the lowered program and its tuned buckets, each plan checked before it serves.

        ``args`` as Triton gives them. Raises TritonModelException when the model cannot be served at all; a
        missing, foreign or damaged plan is no reason for that.
        """
        import time

        started = time.perf_counter()
        import triton_python_backend_utils as pb_utils

        config = json.loads(args["model_config"])
        parameters = {n: v["string_value"] for n, v in config.get("parameters", {}).items()}
        try:
            settings = Settings.from_parameters(parameters)
        except SettingsError as error:
            raise pb_utils.TritonModelException(f"model {args['model_name']}: {error}") from error
        let_threads_sleep()
        import torch

        from cudnn_fusion.instance import Clock, Instance, ServingError, instance_device
        from cudnn_fusion.metrics import Metrics

        self._pb_utils = pb_utils
        _log_to_server(pb_utils.Logger)
        # For this thread, on which Triton calls `execute` too: inference_mode there costs 40 us each time.
        torch.set_grad_enabled(False)
        clock = Clock()
        clock.seconds["imports"] = time.perf_counter() - started
        try:
            device = instance_device(args["model_instance_kind"], args["model_instance_device_id"])
            self._instance = Instance.open(Path(pb_utils.get_model_dir()), device, settings, clock)
            self._instance.check_config(config)
        except ServingError as error:
            raise pb_utils.TritonModelException(f"model {args['model_name']}: {error}") from error
        self._metrics = Metrics(pb_utils, args["model_name"], args["model_version"])
        self._instance.report_load(self._metrics)
        # What is loaded stays: without it a collection in the middle of a request has little to look at.
        gc.collect()
        gc.freeze()
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {self._instance.describe()}")

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in order; one that cannot be served gets an error of its own."""
        return self._instance.execute(requests, self._pb_utils, self._metrics)

    def finalize(self) -> None:
        """Stops background planning, frees the executors and passes on the last counts."""
        if hasattr(self, "_instance"):
            self._instance.close()
        if hasattr(self, "_metrics"):
            self._metrics.close()


def _log_to_server(logger: Any) -> None:
    package = logging.getLogger("cudnn_fusion")
    package.setLevel(logging.INFO)
    package.addHandler(_ServerLog(logger))


class _ServerLog(logging.Handler):
    """The package's log records in the server's log."""

    def __init__(self, logger: Any) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record at the server's level nearest to its own."""
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)
