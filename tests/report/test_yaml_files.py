"""Files that Hydra wrote: an unreadable one counts as missing, and the page is written."""

from __future__ import annotations

from pathlib import Path

from hookrun.report.yaml_files import read_yaml


def test_an_unreadable_file_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "multirun.yaml"
    assert read_yaml(path, tmp_path) is None
    path.write_text("a: ${b}")
    assert read_yaml(path, tmp_path) == {"a": "${b}"}
    path.write_text("a: [")
    assert read_yaml(path, tmp_path) is None
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert read_yaml(path, tmp_path) is None
