"""A root folder that is needed and not there is an error that says how to get the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.data.source import require_root
from hookrun.errors import Problem, SpecError


def test_a_folder_that_is_there_is_given_back(tmp_path: Path) -> None:
    assert require_root("digits", tmp_path, "") == tmp_path


def test_no_folder_given() -> None:
    with pytest.raises(SpecError) as caught:
        require_root("mnist", None, "download it")
    assert caught.value.errors == [
        Problem("data.root", "the data set 'mnist' lies in a folder, and none is given", "download it")
    ]


@pytest.mark.cases("name", ["missing", "file"])
def test_a_path_that_is_no_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError) as caught:
        require_root("mnist", tmp_path / name, "download it")
    (problem,) = caught.value.errors
    assert str(tmp_path / name) in problem.what
    assert problem.hint == "download it"
