"""A page is one file that loads nothing and runs no code from a run directory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from report_pages import SHORT, table

import hookrun
from hookrun.actions.base import RECORD_KEYS
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.report.section import ReportSection
from hookrun.report.sections import OF_A_RUN
from hookrun.store.files import StoreError


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

    monkeypatch.setattr("hookrun.report.page.write_page", refuse)
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


def test_it_is_made_at_the_end_of_a_multirun(sweep: Path, page) -> None:
    found = page(sweep)
    assert "done 6" in found.text and "val/accuracy" in found.text
    assert all((sweep / str(job) / "report.html").is_file() for job in range(6))


def test_the_table_holds_every_job_with_its_keys_and_latest_metrics(sweep: Path) -> None:
    rows = table(sweep)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [(row["train.optimizer.lr"], row["seed"]) for row in rows[:3]] == [
        ("0.001", "0"),
        ("0.001", "1"),
        ("0.01", "0"),
    ]
    for row in rows:
        last = hookrun.open_run(sweep / row["job"]).metrics[-1]
        assert (float(row["val/accuracy"]), float(row["val/loss"])) == (last["accuracy"], last["loss"])
        assert (row["status"], row["exit_code"], row["reason"]) == ("done", "0", "")
        assert float(row["seconds"]) > 0


def test_the_training_loss_is_the_mean_of_the_last_epoch(sweep: Path) -> None:
    for row in table(sweep):
        (mean,) = [
            line["loss"]
            for line in hookrun.open_run(sweep / row["job"]).metrics
            if (line["split"], line["of"]) == ("train", "epoch")
        ]
        assert float(row["train/loss"]) == mean


def test_names_in_a_sweep_are_escaped(copied: Path, page) -> None:
    evil = "<script>alert(1)</script>"
    (copied / "0/.hydra/overrides.yaml").write_text(json.dumps([f"{evil}={evil}"]))
    (copied / "1/status.json").write_text(json.dumps({"status": "failed", "reason": evil}))
    (copied / "2").rename(copied / '"><img src=x>')
    write_report(copied)
    found = page(copied)
    assert found.tags.count("script") == 1
    assert evil in found.text and "x" not in found.links


def test_the_page_of_an_interrupted_sweep(folder: Path, page, monkeypatch) -> None:
    from hookrun import tasks

    ran = tasks.run
    seen = []

    def interrupted(prepared, path, **options):
        seen.append(path)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return ran(prepared, path, **options)

    monkeypatch.setattr(tasks, "run", interrupted)
    assert main([*SHORT, "hydra.sweep.dir=cut", "seed=1,2,3"]) == 130
    assert "done 1" in page(folder / "cut").text


def test_a_section_is_one_entry_of_the_list(observed: Path, tmp_path: Path, page, monkeypatch) -> None:
    """The page and its navigation name no section."""
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    added = ReportSection("mine", "My section", lambda facts: [f"seed {facts.config['seed']}"], "notes.html")
    missing = ReportSection("none", "Nothing to say", lambda facts: None, "notes.html")
    monkeypatch.setattr("hookrun.report.page.OF_A_RUN", (missing, *OF_A_RUN, added))
    write_report(path)
    found = page(path)
    assert '<a href="#mine">My section</a>' in found.source and "<li>seed 0</li>" in found.source
    assert "Nothing to say" not in found.text
    assert found.source.index("<li>seed 0</li>") > found.source.index('id="repeat"')
