"""Parameters of config.pbtxt."""

from pathlib import Path

import pytest

from cudnn_fusion.settings import Settings, SettingsError


def test_defaults():
    assert Settings.from_parameters({}) == Settings("auto", 4096, 32, None)


def test_values_are_taken():
    parameters = {
        "ENGINE": "reference",
        "EXECUTOR_MEMORY_MB": "512",
        "MAX_BUCKETS": "4",
        "PLAN_OVERLAY": "/plans",
    }
    assert Settings.from_parameters(parameters) == Settings("reference", 512, 4, Path("/plans"))


def test_parameters_of_others_and_empty_ones_are_ignored():
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "MAX_BUCKETS": "", "PLAN_OVERLAY": ""}
    assert Settings.from_parameters(parameters) == Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENGINE", "cudnn"),
        ("ENGINE", ""),
        ("ENGINE", "REFERENCE"),
        *(
            (name, value)
            for name in ("EXECUTOR_MEMORY_MB", "MAX_BUCKETS")
            for value in ("0", "-1", "1.5", "8 GB")
        ),
    ],
)
def test_values_that_cannot_be_meant_are_refused(name, value):
    with pytest.raises(SettingsError) as error:
        Settings.from_parameters({name: value})
    assert name in str(error.value)
    assert repr(value) in str(error.value)
    assert "must be" in str(error.value)
