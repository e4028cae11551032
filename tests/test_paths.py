"""A source file has a test file of the same path; the exceptions are listed with the file that tests them."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "hookrun"

ELSEWHERE = {"tasks/loop/lens/running": "tasks/test_lens.py"}
"""Source file or folder -> the test file that tests it, as it takes part in a whole run."""

NO_CODE = {"version"}


def sources() -> list[str]:
    files = (file.relative_to(PACKAGE).with_suffix("") for file in PACKAGE.rglob("*.py"))
    return sorted(
        file.as_posix() for file in files if not file.name.startswith("__") and file.name not in NO_CODE
    )


def own(source: str) -> Path:
    folder, _, name = source.rpartition("/")
    return TESTS / folder / f"test_{name}.py"


def test_each_source_file_has_a_test_file_of_its_path_or_says_where_it_is_tested() -> None:
    folders = tuple(f"{key}/" for key in ELSEWHERE)
    lacking = [
        source
        for source in sources()
        if not own(source).is_file() and source not in ELSEWHERE and not source.startswith(folders)
    ]
    assert not lacking, f"write {', '.join(str(own(each).relative_to(TESTS.parent)) for each in lacking)}"


def test_exceptions_exist_and_have_no_test_file_of_their_path() -> None:
    for source, tests in ELSEWHERE.items():
        assert (TESTS / tests).is_file(), tests
        assert (PACKAGE / source).with_suffix(".py").is_file() or (PACKAGE / source).is_dir(), source
        assert not own(source).is_file(), (
            f"{source} has a test file of its own now: leave it out of ELSEWHERE"
        )
