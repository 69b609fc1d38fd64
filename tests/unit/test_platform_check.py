import subprocess
import sys
from pathlib import Path

import pytest

from cudnn_fusion import platform_check

SUPPORTED = {"system": "Linux", "machine": "x86_64", "libc": "glibc 2.35", "python": (3, 11)}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"libc": "glibc 2.40"},
        {"libc": "glibc 3.0"},
        {"python": (3, 12)},
        {"python": (3, 13)},
        {"machine": "AMD64"},
    ],
)
def test_supported_machines_have_no_problems(change):
    assert platform_check.problems(**{**SUPPORTED, **change}) == []


@pytest.mark.parametrize(
    ("change", "found", "needed"),
    [
        ({"system": "Darwin", "libc": ""}, "Darwin", "Linux"),
        ({"system": "Windows", "libc": ""}, "Windows", "Linux"),
        ({"machine": "aarch64"}, "aarch64", "x86-64"),
        ({"libc": "glibc 2.34"}, "glibc 2.34", "2.35"),
        ({"libc": "glibc 2.9"}, "glibc 2.9", "2.35"),
        ({"libc": ""}, "not glibc", "2.35"),
        ({"libc": "glibc unknown"}, "glibc unknown", "2.35"),
        ({"python": (3, 10)}, "3.10", "3.11 to 3.13"),
        ({"python": (3, 14)}, "3.14", "3.11 to 3.13"),
        ({"python": (2, 7)}, "2.7", "3.11 to 3.13"),
    ],
)
def test_one_sentence_says_what_was_found_and_what_is_needed(change, found, needed):
    (sentence,) = platform_check.problems(**{**SUPPORTED, **change})
    assert found in sentence
    assert needed in sentence


def test_every_problem_is_named_in_the_error(monkeypatch):
    monkeypatch.setattr(platform_check.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(platform_check, "_libc_here", lambda: "glibc 2.31")
    with pytest.raises(platform_check.UnsupportedPlatformError, match=r"riscv64.*glibc 2\.31"):
        platform_check.require_supported_platform()


def test_the_file_runs_as_a_script_without_the_package():
    script = Path(platform_check.__file__)
    # -I -S: neither the package nor any installed one can be imported.
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(script)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_script_prints_the_problem_and_fails(tmp_path):
    source = Path(platform_check.__file__).read_text()
    copy = tmp_path / "check.py"
    copy.write_text(source.replace("OLDEST_GLIBC = (2, 35)", "OLDEST_GLIBC = (9, 0)"))
    ended = subprocess.run([sys.executable, str(copy)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "glibc 9.0 or newer is needed" in ended.stdout
