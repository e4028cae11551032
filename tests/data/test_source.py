"""A root folder that is required and missing is an error that says how to get the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from hookrun.data.source import require_root
from hookrun.errors import Problem, SpecError


def test_an_existing_folder_is_returned(tmp_path: Path) -> None:
    assert require_root("digits", tmp_path, "") == tmp_path


def test_a_missing_root_argument_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        require_root("mnist", None, "download it")
    assert caught.value.errors == [
        Problem("data.root", "the data set 'mnist' is read from a folder, and none is given", "download it")
    ]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_path_that_is_not_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError) as caught:
        require_root("mnist", tmp_path / name, "download it")
    (problem,) = caught.value.errors
    assert str(tmp_path / name) in problem.what
    assert problem.hint == "download it"
