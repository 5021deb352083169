"""Writes that fail for other reasons than a full disk name their file too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from padless.packer.durable import DurableFile


def test_a_write_that_is_refused_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, data: object) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with DurableFile(str(tmp_path), "shard.arrow") as file:
        monkeypatch.setattr(os, "write", refused)
        with pytest.raises(OSError) as found:
            file.write(b"bytes")
        monkeypatch.undo()
    assert found.value.errno == errno.EFBIG
    assert found.value.filename == str(tmp_path / ".shard.arrow.tmp")
