"""A source file has a test file of the same path; a few are tested elsewhere, where a person is told to look."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "hookrun"

ELSEWHERE = {
    "cli/launching": "cli/test_launchers.py",
    "cli/running": "cli/test_main.py",
    "ranks/group": "ranks/test_failures.py",
    "runtime/compiled": "semantics/test_compilers_and_wrappers.py",
    "runtime/parts": "semantics/test_tokens.py",
    "runtime/tokens/part": "semantics/test_tokens.py",
    "runtime/wrapped": "ranks/test_own_loops.py",
    "tasks/loop/lens": "tasks/test_lens.py",
    "tasks/loop/loggers": "tasks/loop/loggers/test_together.py",
    "tasks/loop/next_token": "tasks/loop/test_continuing.py",
    "tasks/loop/own_code": "tasks/test_own_python.py",
    "tasks/loop/own_losses": "tasks/test_own_python.py",
    "tasks/loop/parts": "test_build.py",
    "tasks/loop/predicted": "tasks/loop/test_score_metrics.py",
    "tasks/loop/prepared": "tasks/test_prepare.py",
    "tasks/loop/producer": "tasks/loop/test_nonfinite.py",
    "tasks/loop/rank_budgets": "ranks/test_tokens_and_settings.py",
    "tasks/loop/rank_fit": "ranks/test_tokens_and_settings.py",
    "tasks/loop/rank_states": "ranks/test_resuming.py",
    "tasks/loop/running": "tasks/test_train.py",
    "tasks/loop/sample_pictures": "report/sections/test_classes.py",
    "tasks/loop/scored": "tasks/loop/test_score_metrics.py",
    "tasks/loop/shared": "cli/test_sweep_check.py",
    "tasks/loop/sink": "runtime/test_state.py",
    "tasks/loop/spans": "tasks/test_texts_and_spans.py",
    "tasks/loop/trained": "tasks/test_training_settings.py",
    "tasks/loop/training": "tasks/test_train.py",
    "tasks/loop/under_hooks": "tasks/test_train.py",
    "tasks/loop/watch": "tasks/loop/test_nonfinite.py",
}
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


def test_what_is_tested_elsewhere_is_there_and_has_no_file_of_its_own() -> None:
    for source, tests in ELSEWHERE.items():
        assert (TESTS / tests).is_file(), tests
        assert (PACKAGE / source).with_suffix(".py").is_file() or (PACKAGE / source).is_dir(), source
        assert not own(source).is_file(), (
            f"{source} has a test file of its own now: leave it out of ELSEWHERE"
        )
