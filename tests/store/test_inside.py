"""Files of a stranger's run directory: regular ones only, and no link is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hookrun.store.inside import (
    MOST_HOLES,
    is_there,
    kind_of,
    listed_inside,
    open_inside,
    read_inside,
    size_inside,
)


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/b"
    path.write_bytes(b"12345")
    assert read_inside(path, tmp_path, limit=5) == b"12345"
    assert size_inside(path, tmp_path) == 5
    with pytest.raises(OSError, match="it has 5 bytes, more than the 4 that are read"):
        read_inside(path, tmp_path, limit=4)
    with pytest.raises(FileNotFoundError):
        open_inside(tmp_path / "a/c", tmp_path)


def test_other_files_are_refused_without_waiting_for_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("secret")
    (run / "link").symlink_to(tmp_path / "secret")
    (run / "folder").symlink_to(tmp_path)
    os.mkfifo(run / "pipe")
    (run / "real").mkdir()
    (run / "plain").write_text("")
    for name, said in {
        "link": "it is a link",
        "folder/secret": "it is a link",
        "pipe": "it is a pipe",
        "real": "it is a folder",
        "plain/x": "a folder of that path is a file",
        "real/../plain": "leads out of the run directory",
    }.items():
        with pytest.raises(OSError, match=said):
            open_inside(run / name, run)


def test_the_run_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").write_text("x")
    (tmp_path / "latest").symlink_to("run")
    assert read_inside(tmp_path / "latest/a", limit=1) == b"x"


def test_a_sparse_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(MOST_HOLES + 1)
    with pytest.raises(OSError, match="of which only 0 are on the disk"):
        open_inside(tmp_path / "holes")


def test_names_are_listed_with_links_that_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "b/c/file").write_text("")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "z").symlink_to(tmp_path / "nowhere")
    found = {path: kind_of(stat) for path, stat in listed_inside(tmp_path)}
    assert set(found) == {"a", "z", "b/c/file"}
    assert found["b/c/file"] == "" and found["a"].startswith("a link")
    assert is_there(tmp_path / "z") and not is_there(tmp_path / "y")
    assert list(listed_inside(tmp_path, "none")) == []
