"""Files and folders that a configuration names, identified by their content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hookrun.store.named_files import BLOCK, WHOLE, named_files


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_change_of_a_file_or_of_a_data_folder_is_noticed() -> None:
    config = {"data": {"root": "images"}, "hooks": {"h": {"value": {"file": "v.safetensors"}}}}
    Path("images/cat").mkdir(parents=True)
    for path in ("images/cat/1.png", "v.safetensors"):
        Path(path).write_bytes(b"one")
    seen = [named_files(config)]
    for path, content in (("v.safetensors", b"two"), ("images/cat/1.png", b"two"), ("images/cat/2.png", b"")):
        Path(path).write_bytes(content)
        seen.append(named_files(config))
    for each in seen:
        assert set(each) == {"images", "v.safetensors"}
    assert len({tuple(each.items()) for each in seen}) == len(seen)
    assert named_files(config) == seen[-1]


def test_a_large_file_is_identified_by_some_of_its_blocks() -> None:
    size = WHOLE + 5 * BLOCK
    with open("large.bin", "wb") as file:
        os.ftruncate(file.fileno(), size)
    before = named_files({"file": "large.bin"})
    for place in (0, size - 1):
        with open("large.bin", "r+b") as file:
            file.seek(place)
            file.write(b"x")
        now = named_files({"file": "large.bin"})
        assert now != before
        before = now


def test_a_run_does_not_name_itself() -> None:
    for name in ("cnn", "digits", "run"):
        Path(name).mkdir()
    Path("run/status.json").write_text("{}")
    config = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "task": {"run": "run"}}
    assert set(named_files(config)) == {"run"}
    assert named_files(config, Path("run")) == {}


def test_endless_files_are_not_read() -> None:
    os.mkfifo("pipe.bin")
    found = named_files(
        {"data": {"root": ".", "file": "pipe.bin"}, "path": "/dev/zero", "weights": "/proc/self/mem"}
    )
    assert "pipe.bin" not in found
    assert "/dev/zero" not in found
