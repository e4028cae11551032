"""A section of a page."""

from __future__ import annotations

import shutil
from pathlib import Path

from hookrun.report import write_report
from hookrun.report.section import ReportSection
from hookrun.report.sections import OF_A_RUN


def test_a_section_is_one_entry_of_the_list(observed: Path, tmp_path: Path, page, monkeypatch) -> None:
    """The page and its navigation name no section."""
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    added = ReportSection("mine", "My section", lambda facts: [f"seed {facts.config['seed']}"], "notes.html")
    missing = ReportSection("none", "Nothing to say", lambda facts: None, "notes.html")
    monkeypatch.setattr("hookrun.report.run.OF_A_RUN", (missing, *OF_A_RUN, added))
    write_report(path)
    found = page(path)
    assert '<a href="#mine">My section</a>' in found.source and "<li>seed 0</li>" in found.source
    assert "Nothing to say" not in found.text
    assert found.source.index("<li>seed 0</li>") > found.source.index('id="repeat"')
