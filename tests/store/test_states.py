"""Resumable states: complete or absent, the newest complete one is used, a damaged one is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hookrun.store.files import StoreError
from hookrun.store.states.files import newest_state, remove_states, write_state
from hookrun.store.states.tree import flatten


def write(run: Path, value: int, **options: int) -> Path:
    content = flatten({"value": value, "weight": torch.full((300,), value)})
    return write_state(run, f'{{"value": {value}}}', *content, **options)


def newest(run: Path) -> tuple[int | None, list[str]]:
    found, damaged = newest_state(run)
    return (None if found is None else found.tree["value"]), list(damaged.values())


def test_the_newest_is_read_and_older_ones_are_removed(tmp_path: Path) -> None:
    for value in range(5):
        write(tmp_path, value)
    states = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    found, damaged = newest_state(tmp_path)

    assert states == ["state_000004", "state_000005"]
    assert found is not None and not damaged
    assert found.about == {"value": 4} and found.tree["weight"].equal(torch.full((300,), 4))


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_any_damage_is_found_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    write(tmp_path, 0)
    file = write(tmp_path, 1) / name
    whole = file.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        value, damaged = newest(tmp_path)
        assert value == 0 and "state_000002 is damaged" in damaged[0]
    for content in (whole[:-1], b"", b"{}"):
        file.write_bytes(content)
        assert newest(tmp_path)[0] == 0
    file.unlink()
    assert newest(tmp_path)[0] == 0
    file.symlink_to(tmp_path / "checkpoints" / "state_000001" / name)
    assert newest(tmp_path)[0] == 0


def test_a_state_of_another_version_is_not_used_and_both_versions_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, 0) / "state.json"
    for text in ('{"version": 1}', "[]"):
        file.write_text(text)
        value, damaged = newest(tmp_path)
        assert value is None and "and this hookrun reads version 2" in damaged[0]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / "checkpoints" / ".state_000009.1.tmp").mkdir()
    (tmp_path / "checkpoints" / "state_9").mkdir()
    os.symlink("state_000001", tmp_path / "checkpoints" / "state_000008")
    assert newest(tmp_path) == (0, [])


def test_a_state_that_cannot_be_written_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(
        StoreError, match=r"cannot write .*state_000002: No space left on device; state_000001"
    ):
        write(tmp_path, 1)
    assert os.listdir(tmp_path / "checkpoints") == ["state_000001"]
    assert newest(tmp_path) == (0, [])


def test_removed_with_the_folder_where_nothing_else_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 0)
    remove_states(tmp_path)
    assert not (tmp_path / "checkpoints").exists() and newest(tmp_path) == (None, [])
