"""What makes a plan reusable: two records, their table of rules, and how they are read off a machine."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudnn_fusion import devices, preflight
from cudnn_fusion.environment import (
    FIELD_RULES,
    MARKS_STALE,
    MUST_MATCH,
    Compatibility,
    Provenance,
    _read_cpuinfo,
    compare,
    cpu_compatibility,
    cuda_compatibility,
    current_provenance,
    target_compatibility,
)
from cudnn_fusion.records import RecordError

H200 = target_compatibility(devices.load("h200"), 91900)
PROVENANCE = Provenance("0.1.0", "2.13.0", "580.95.05", "1.32.0", "13.0", "x86_64 glibc 2.36")


@pytest.mark.parametrize("record", [Compatibility, Provenance])
def test_the_table_of_rules_has_every_field_exactly_once(record: type) -> None:
    listed = [rule.field for rule in FIELD_RULES if rule.record == record.__name__]
    assert listed == [field.name for field in fields(record)]
    assert all(rule.why and rule.meaning in (MUST_MATCH, MARKS_STALE) for rule in FIELD_RULES)


def test_no_field_can_tell_one_machine_from_its_twin() -> None:
    names = {rule.field for rule in FIELD_RULES}
    assert not names & {"uuid", "pci_id", "pci_bus", "path", "hostname", "host_name", "serial"}


@pytest.mark.parametrize("record", [H200, PROVENANCE])
def test_a_record_comes_back_as_it_was_written(record: Compatibility | Provenance) -> None:
    again = type(record).from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    assert again.hash() == record.hash()
    assert len(record.hash()) == 16


def test_every_difference_changes_the_hash_and_is_reported_with_both_values() -> None:
    for field in fields(Compatibility):
        value = getattr(H200, field.name)
        other = replace(H200, **{field.name: value + 1 if isinstance(value, int) else f"{value}x"})
        assert other.hash() != H200.hash()
        (difference,) = compare(other, H200)
        assert (difference.field, difference.here) == (field.name, value)
        assert difference.meaning == MUST_MATCH


def test_a_difference_in_provenance_marks_stale_only() -> None:
    (difference,) = compare(PROVENANCE, replace(PROVENANCE, driver="590.1"))
    assert str(difference) == "driver: stored 580.95.05, here 590.1"
    assert difference.meaning == MARKS_STALE
    assert compare(PROVENANCE, PROVENANCE) == []


def test_records_of_two_kinds_are_not_compared() -> None:
    with pytest.raises(TypeError, match="cannot compare Compatibility with Provenance"):
        compare(H200, PROVENANCE)


@pytest.mark.parametrize(
    "content", [None, {}, {**H200.to_json(), "uuid": "x"}, {**H200.to_json(), "cudnn": "9"}]
)
def test_what_is_no_environment_is_refused(content: object) -> None:
    with pytest.raises(RecordError):
        Compatibility.from_json(content)


def test_the_described_h200_has_the_figures_that_cudnn_checks() -> None:
    assert H200.device_name == "NVIDIA H200"
    assert H200.compute_capability == "9.0"
    assert (H200.multiprocessors, H200.memory_bus_bits) == (132, 6016)
    assert (H200.cudnn, H200.cuda_driver_api) == (91900, 13000)
    assert (H200.shared_memory_per_block_optin, H200.registers_per_block) == (232448, 65536)
    assert H200.memory_class_gib == 136


def test_a_device_and_its_description_give_the_same_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_driver", lambda: fake_driver(devices.load("h200")))
    monkeypatch.setattr(preflight, "cudnn_version", lambda: 91900)
    assert cuda_compatibility(0) == H200


def test_an_ordinal_that_is_not_visible_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_driver", lambda: fake_driver(devices.load("h200")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(
        preflight.GpuUnavailableError, match=r"device 3 .* 1 are visible .*CUDA_VISIBLE_DEVICES=5"
    ):
        cuda_compatibility(3)


def test_an_incomplete_description_names_what_it_lacks() -> None:
    description = {**devices.load("h200")}
    del description["memory_bus_bits"]
    with pytest.raises(devices.DeviceDescriptionError, match="lacks 'memory_bus_bits'"):
        target_compatibility(description, 91900)
    with pytest.raises(devices.DeviceDescriptionError, match="wrong value"):
        target_compatibility({**description, "memory_bus_bits": "wide"}, 91900)


def test_descriptions_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert devices.names() == ["h200"]
    own = tmp_path / "own.json"
    own.write_text(json.dumps(devices.load("h200")))
    assert devices.load(str(own)) == devices.load("h200")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"properties": 3}', "[" * 100000])
def test_an_unknown_or_broken_description_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(devices.DeviceDescriptionError, match="known: h200"):
        devices.load("b300")
    with pytest.raises(devices.DeviceDescriptionError):
        devices.load(str(tmp_path / "missing.json"))
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(devices.DeviceDescriptionError):
        devices.load(str(path))


def test_the_cpu_environment_follows_the_thread_count() -> None:
    import torch

    before = torch.get_num_threads()
    one = cpu_compatibility()
    try:
        torch.set_num_threads(before + 1)
        assert compare(one, cpu_compatibility())[0].field == "threads"
    finally:
        torch.set_num_threads(before)
    assert one == cpu_compatibility()
    assert one.torch is not None
    assert "+" not in one.torch
    assert one.kind == "cpu"


def test_cpu_features_count_without_their_order() -> None:
    text = "processor : 0\nmodel name\t: AMD EPYC\nflags\t\t: {}\n\nprocessor : 1\nmodel name : B\nflags:\n"
    model, features = _read_cpuinfo(text.format("sse avx avx512f"))
    assert model == "AMD EPYC"
    assert _read_cpuinfo(text.format("avx512f sse avx"))[1] == features
    assert _read_cpuinfo(text.format("sse avx"))[1] != features


def test_provenance_of_cpu_plans_does_not_depend_on_gpu_software() -> None:
    provenance = current_provenance("cpu")
    assert (provenance.driver, provenance.frontend, provenance.cuda_runtime) == (None, None, None)
    assert current_provenance("cuda").frontend == preflight.frontend_version()
    assert Provenance.from_json(provenance.to_json()) == provenance


def fake_driver(description: Any) -> SimpleNamespace:
    """The calls of cuda-python's driver bindings, answering for one described device."""
    properties = description["properties"]
    attributes = {
        "COMPUTE_CAPABILITY_MAJOR": properties["deviceVer"] // 100,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "MULTIPROCESSOR_COUNT": properties["multiProcessorCount"],
        "GLOBAL_MEMORY_BUS_WIDTH": description["memory_bus_bits"],
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": properties["maxSharedMemoryPerBlockOptin"],
        "MAX_REGISTERS_PER_BLOCK": properties["regsPerBlock"],
    }
    name = properties["deviceName"].encode().ljust(256, b"\0")
    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdevice_attribute=SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{key}": key for key in attributes}),
        cuInit=lambda flags: (0,),
        cuDeviceGetCount=lambda: (0, 1),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetName=lambda length, device: (0, name),
        cuDeviceGetAttribute=lambda attribute, device: (0, attributes[attribute]),
        cuDeviceTotalMem=lambda device: (0, properties["totalGlobalMem"]),
        cuDriverGetVersion=lambda: (0, properties["driverVer"]),
    )
