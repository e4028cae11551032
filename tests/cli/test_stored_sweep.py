"""The sweep that `resume` names, and the command line that Hydra stored there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hookrun.errors import SpecError
from hookrun.sweeps.stored_sweep import StoredSweep, is_sweep, sweep_folder


def sweep(folder: Path, text: str = "hydra: {}\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text(text)
    return folder


def test_resume_names_a_sweep_by_its_folder_or_as_latest(cwd: Path) -> None:
    old, new = sweep(cwd / "multirun/b"), sweep(cwd / "multirun/a")
    for folder, when in ((old, 1), (new, 2)):
        os.utime(folder / "multirun.yaml", (when, when))
    (cwd / "multirun/link").symlink_to(new)
    assert sweep_folder("latest") == new and sweep_folder("multirun/b") == old
    assert is_sweep("multirun/b") and not is_sweep("multirun") and not is_sweep("latest")
    for wrong in ("multirun", "nowhere"):
        with pytest.raises(SpecError):
            sweep_folder(wrong)


def test_a_file_that_hydra_did_not_write_is_refused(cwd: Path) -> None:
    for number, text in enumerate(
        ("hydra: [1]\n", "hydra: {overrides: 3}\n", "[", "a: 1\n", "x: !!python/name:os\n")
    ):
        folder = sweep(cwd / str(number), text)
        with pytest.raises(SpecError, match=r"multirun\.yaml"):
            StoredSweep(folder, False).command(None, (), (), has_folder=False)


def test_only_resume_sets_the_directory(cwd: Path) -> None:
    folder = cwd / "it's ${a}"
    stored = StoredSweep(folder, is_typed=True)
    _, overrides = stored.command(None, (), ["seed=1"], has_folder=False)
    assert overrides == ["seed=1", f"hydra.sweep.dir='{cwd}/it\\'s \\${{a}}'"]
    with pytest.raises(SpecError, match="leave it out"):
        stored.command(None, (), ["+hydra.sweep.dir=b"], has_folder=False)
