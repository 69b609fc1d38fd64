"""Which overlays are read."""

import os

import pytest

from cudnn_fusion.trust import distrust


@pytest.fixture
def overlay(tmp_path):
    directory = tmp_path / "overlay"
    (directory / "0123456789abcdef" / "entries").mkdir(parents=True)
    (directory / "0123456789abcdef" / "entries" / "plan.json").write_text("{}")
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


def test_what_only_its_owner_writes_is_trusted(overlay, tmp_path):
    assert distrust(overlay) is None
    (tmp_path / "link").symlink_to(overlay)
    assert distrust(tmp_path / "link") is None


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("place", [".", "0123456789abcdef", "0123456789abcdef/entries/plan.json"])
def test_what_others_can_write_is_refused(overlay, place, mode):
    path = overlay / place
    path.chmod(path.stat().st_mode | mode)
    reason = distrust(overlay)
    assert str(path.resolve()) in reason
    assert "chmod go-w" in reason


def test_what_another_user_owns_is_refused(overlay, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    owner = overlay.stat().st_uid
    if owner:
        assert f"belongs to user {owner}" in distrust(overlay)
    else:
        assert distrust(overlay) is None  # root may own it
        os.chown(overlay / "0123456789abcdef", 1234, -1)
        assert "belongs to user 1234" in distrust(overlay)


def test_links_in_it_and_what_is_no_directory_are_refused(overlay, tmp_path):
    (overlay / "0123456789abcdef" / "blobs").symlink_to("/tmp")
    assert "is a link" in distrust(overlay)
    assert distrust(tmp_path / "absent") == "is not a directory"
    assert distrust(tmp_path / ("x" * 5000)) == "is not a directory"
