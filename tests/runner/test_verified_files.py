"""Files with checksums: whole or absent, of their own format and name, private to their user."""

from __future__ import annotations

import os
import stat

import pytest

from jaxpage.runner.verified_files import VerifiedFiles, write_atomically


def test_what_was_written_is_read_again_under_its_name_and_format_only(tmp_path):
    files, path = VerifiedFiles(b"one"), tmp_path / "new" / "name.bin"
    files.write(path, b"payload")
    assert files.is_whole(path) and files.read(path) == b"payload"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not VerifiedFiles(b"two").is_whole(path)
    renamed = path.rename(path.with_name("other.bin"))
    assert files.read(renamed) is None and not renamed.exists()
    assert files.read(path) is None  # absent, and that is no problem


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_file_is_removed_and_the_first_one_is_reported(tmp_path, caplog, damage):
    files = VerifiedFiles(b"one")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(damage)
        assert files.read(tmp_path / name) is None and not (tmp_path / name).exists()
    assert caplog.text.count("is damaged") == 1


def test_a_damaged_file_that_cannot_be_removed_stays(tmp_path, monkeypatch):
    """As in a folder that this user may only read."""
    (tmp_path / "a").write_bytes(b"short")

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    assert VerifiedFiles(b"one").read(tmp_path / "a") is None


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
