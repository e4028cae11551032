"""The page of a run: made from the run's directory alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import hookrun
from hookrun.actions.base import RECORD_KEYS
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.report.__main__ import main as report_main
from hookrun.report.section import ReportSection
from hookrun.report.sections import OF_A_RUN
from hookrun.store.files import StoreError


def test_it_is_written_at_the_end_of_a_run_and_its_path_is_printed(run, page, capsys) -> None:
    path = run("task=evaluate", "train.limit_batches=1")
    assert f"report: {path}/report.html" in capsys.readouterr().out
    assert "evaluate" in page(path).text and "done" in page(path).text


def test_it_shows_the_experiment_and_the_versions(observed: Path, page) -> None:
    text, found = page(observed).text, hookrun.open_run(observed)
    for said in ["task train", "model mlp ", "data digits", "seed 0", "exit code 0", found.env["torch"]]:
        assert said in text
    assert found.plan["hash"][:12] in text
    last = found.metrics[-1]
    assert f"val accuracy {last['accuracy']:.4g}" in text and f"val loss {last['loss']:.4g}" in text


# ---- how runs end


def test_a_page_that_cannot_be_written_does_not_fail_the_run(run, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write report.html: No space left on device")

    monkeypatch.setattr("hookrun.report.pages.write_page", refuse)
    path = run("task=evaluate", "train.limit_batches=1")
    said = capsys.readouterr().err
    assert "report: not made: cannot write report.html: No space left on device" in said
    assert f"python -m hookrun.report {path}" in said
    assert hookrun.open_run(path).status["status"] == "done"


def test_a_refused_directory_keeps_the_page_it_has(run, observed: Path) -> None:
    before = (observed / "report.html").stat().st_mtime_ns
    assert main(["model=mlp", f"hydra.run.dir={observed}"]) == 2
    assert (observed / "report.html").stat().st_mtime_ns == before


# ---- again


def test_every_record_begins_with_the_same_keys(observed: Path) -> None:
    records = hookrun.open_run(observed).stats
    assert {tuple(record)[: len(RECORD_KEYS)] for record in records} == {RECORD_KEYS}


def test_a_section_is_one_entry_of_the_list(observed: Path, tmp_path: Path, page, monkeypatch) -> None:
    """The page and its navigation name no section."""
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    added = ReportSection("mine", "My section", lambda facts: [f"seed {facts.config['seed']}"], "notes.html")
    missing = ReportSection("none", "Nothing to say", lambda facts: None, "notes.html")
    monkeypatch.setattr("hookrun.report.pages.OF_A_RUN", (missing, *OF_A_RUN, added))
    write_report(path)
    found = page(path)
    assert '<a href="#mine">My section</a>' in found.source and "<li>seed 0</li>" in found.source
    assert "Nothing to say" not in found.text
    assert found.source.index("<li>seed 0</li>") > found.source.index('id="repeat"')


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


def test_every_figure_has_a_caption_its_numbers_and_a_button(observed: Path, page) -> None:
    source = page(observed).source
    figures = re.findall(r"<figure.*?</figure>", source, re.S)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(r'role="img"[^>]* aria-label="[^"]{20,}"', figure)
        assert "data-save=" in figure and "<details><summary>the numbers" in figure
    accuracy = next(figure for figure in figures if "<span>accuracy</span>" in figure)
    last = hookrun.open_run(observed).metrics[-1]["accuracy"]
    assert "val: " in accuracy and f'<td class="token">{last:.4g}</td>' in accuracy


def test_it_makes_no_network_request(observed: Path, page) -> None:
    found = page(observed)
    assert found.links and all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\(|<link|\bsrc=[\"']?http", found.source)


def test_names_are_escaped(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    for name in ("plan.json", "model.json", "hooks.json", "stats.jsonl", "status.json", "env.json"):
        file = path / name
        text = file.read_text().replace("layers.1", r"<img src=x onerror=alert(1)>\u202e</script>\n&amp;")
        file.write_text(text.replace('"done"', r'"</b><script>alert(1)</script>"'))
    write_report(path)
    found = page(path)
    assert "<script>alert" not in found.source and "onerror" not in found.links
    assert found.tags.count("script") == 1 and "\u202e" not in found.source
    assert "<img src=x onerror=alert(1)>" in found.text
