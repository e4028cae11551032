"""`python -m hookrun.report` writes pages again."""

from __future__ import annotations

import shutil
from pathlib import Path

from hookrun.report.__main__ import main as report_main


def test_the_module_writes_pages_of_any_directory(observed: Path, tmp_path: Path, capsys) -> None:
    page = observed / "report.html"
    page.unlink()
    assert report_main([str(observed)]) == 0
    assert capsys.readouterr().out.strip() == str(page) and page.is_file()
    assert report_main([str(tmp_path / "nowhere")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert report_main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_an_empty_status_is_an_error_that_names_the_file(observed: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    (path / "status.json").write_text("[]")
    assert report_main([str(path)]) == 1
    assert f"{path}/status.json says no status" in capsys.readouterr().err
