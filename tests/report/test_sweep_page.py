"""The page and the table of a sweep, from its directory alone, whatever state its jobs are in."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hookrun
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.report.jobs import find_jobs
from hookrun.report.sweep_facts import swept_keys

SHORT = ("-m", "compute.device=cpu", "model=mlp", "train.limit_batches=1", "train.epochs=1")


def table(path: Path) -> list[dict[str, str]]:
    with (path / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def copied(sweep: Path, tmp_path: Path) -> Path:
    path = tmp_path / "moved"
    shutil.copytree(sweep, path)
    return path


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


def test_the_page_leads_to_the_page_of_each_job(sweep: Path, page) -> None:
    links = [link for link in page(sweep).links if link.startswith("./")]
    best_first = sorted(table(sweep), key=lambda row: -float(row["objective"]))
    assert links == [f"./{row['job']}/report.html" for row in best_first]
    assert all((sweep / link).is_file() for link in links)


def test_the_page_says_the_objective_and_marks_the_best_job(sweep: Path, copied: Path, page) -> None:
    best = max(table(sweep), key=lambda row: float(row["objective"]))
    found = page(sweep)
    assert f"maximize val/accuracy (best epoch of a run). Best: job {best['job']} with" in found.text
    assert found.source.count('<tr id="best">') == 1 and "Single batches" not in found.text
    for job in range(6):  # as an earlier version left them: no means of training, no result in the status
        path = copied / str(job)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        kept = [line for line in lines if line.pop("of") == "batch" or line["split"] == "val"]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        status = json.loads((path / "status.json").read_text())
        del status["objective"]
        (path / "status.json").write_text(json.dumps(status))
    write_report(copied)
    old = page(copied)
    assert "Single batches, not means train/accuracy, train/loss" in old.text
    assert f"Best: job {best['job']} with" in old.text


def test_the_training_loss_is_the_mean_of_the_last_epoch(sweep: Path) -> None:
    for row in table(sweep):
        (mean,) = [
            line["loss"]
            for line in hookrun.open_run(sweep / row["job"]).metrics
            if (line["split"], line["of"]) == ("train", "epoch")
        ]
        assert float(row["train/loss"]) == mean


def test_repetitions_are_one_curve_with_a_band(sweep: Path, page) -> None:
    source = page(sweep).source
    assert "<span>val/accuracy against train.optimizer.lr</span>" in source and 'class="band c0"' in source
    assert "against seed" not in source


def test_one_key_is_a_curve_two_are_a_map_and_three_a_curve_each(copied: Path, page) -> None:
    def with_keys(*keys: str) -> str:
        for job in range(6):
            values = [f"{key}={(job // 2**place) % 2 + 1}" for place, key in enumerate(keys)]
            (copied / f"{job}/.hydra/overrides.yaml").write_text(json.dumps(values))
        write_report(copied)
        return str(page(copied).source)

    assert "val/accuracy against a<" in with_keys("a")
    two = with_keys("a", "b")
    assert "<span>val/accuracy</span>" in two and "across: a; down: b" in two
    three = with_keys("a", "b", "c")
    assert all(f"val/accuracy against {key}<" in three for key in "abc")


def test_the_cells_of_a_map_are_means(copied: Path, page) -> None:
    for job in range(6):
        (copied / f"{job}/.hydra/overrides.yaml").write_text(
            json.dumps([f"a={job % 2}", f"b={job % 2}", f"seed={job}"])
        )
    write_report(copied)
    section = page(copied).source.split("<span>val/accuracy</span>")[1].split("</figure>")[0]
    found = [[float(row["val/accuracy"]) for row in table(copied)[start::2]] for start in (0, 1)]
    first, second = (f"{sum(some) / 3:.3g}" for some in found)
    assert re.findall(r'class="on-\w+">([\w.]*)<', section) == [first, "", "", second]


def test_jobs_that_failed_are_listed_with_their_reasons(folder: Path, page) -> None:
    assert main([*SHORT, "hydra.sweep.dir=unlucky", "train.optimizer.name=SGD,SparseAdam"]) == 1
    found, rows = page(folder / "unlucky"), table(folder / "unlucky")
    assert "done 1" in found.text and "failed 1" in found.text
    assert "1 job did not end well" in found.text
    assert "SparseAdam does not support dense gradients" in found.text
    assert [(row["status"], row["exit_code"]) for row in rows] == [("done", "0"), ("failed", "1")]
    assert "SparseAdam" in rows[1]["reason"]


def test_it_can_be_made_while_jobs_run(copied: Path, page) -> None:
    status = json.loads((copied / "5/status.json").read_text())
    (copied / "5/status.json").write_text(
        json.dumps({**status, "status": "running", "ended": None, "exit_code": None})
    )
    (copied / "4/status.json").unlink()  # Hydra has made its directory, and that is all
    (copied / "4/metrics.jsonl").unlink()
    with (copied / "5/metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "accu')
    write_report(copied)
    found = page(copied)
    assert "2 jobs not finished" in found.text and "running 1" in found.text and "not started 1" in found.text
    assert [row["status"] for row in table(copied)][4:] == ["not started", "running"]


def test_directories_of_other_machines_and_depths_are_found(copied: Path) -> None:
    (copied / "lr=0.1").mkdir()
    (copied / "5").rename(copied / "lr=0.1" / "seed=1")
    write_report(copied)
    names = [job.name for job in find_jobs(copied)]
    assert set(names) == {"0", "1", "2", "3", "4", "lr=0.1/seed=1"}


def test_a_job_that_goes_on_or_is_edited_after_a_page_is_read_again(copied: Path) -> None:
    before = find_jobs(copied)
    assert all(job.status == "done" for job in before)
    path = copied / before[0].name / "status.json"
    path.write_text(path.read_text().replace('"done"', '"failed"'))
    metrics = copied / before[1].name / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1'))  # another number
    shutil.rmtree(copied / before[2].name)
    after = find_jobs(copied)
    assert [job.name for job in after] == [job.name for job in before if job.name != before[2].name]
    assert after[0].status == "failed"
    assert after[1].metrics["val/loss"] != before[1].metrics["val/loss"]
    assert after[2:] == before[3:]


def test_numbers_are_in_order(copied: Path) -> None:
    (copied / "5").rename(copied / "10")
    assert [job.name for job in find_jobs(copied)] == ["0", "1", "2", "3", "4", "10"]


def test_what_is_the_same_in_every_job_was_not_swept(sweep: Path) -> None:
    assert swept_keys(find_jobs(sweep)) == ["train.optimizer.lr", "seed"]


def test_the_command_on_the_page_makes_the_sweep_again(sweep: Path, page) -> None:
    words = shlex.split(page(sweep).command)
    assert words[:4] == ["python", "-m", "hookrun", "--multirun"]
    assert main([*words[3:], "hydra.sweep.dir=again"]) == 0
    again = table(sweep.parent / "again")
    for one, other in zip(table(sweep), again, strict=True):
        assert one["val/accuracy"] == other["val/accuracy"]


def test_names_in_a_sweep_are_text(copied: Path, page) -> None:
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


def test_a_job_that_was_killed_is_not_said_to_run(copied: Path, page) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = json.loads((copied / "5/status.json").read_text())
    status |= {"status": "running", "ended": None, "exit_code": None, "pid": int(gone.stdout)}
    (copied / "5/status.json").write_text(json.dumps(status))
    write_report(copied)
    text = page(copied).text
    assert "cut off 1" in text and "1 job did not end well" in text and "not finished" not in text
    assert table(copied)[5]["status"] == "cut off"


def test_a_job_whose_metric_is_not_a_number_is_counted_and_the_curve_goes_on(copied: Path, page) -> None:
    for line in (copied / "0/metrics.jsonl", copied / "1/metrics.jsonl"):
        with line.open("a") as file:
            file.write('{"split": "val", "epoch": 9, "step": 99, "loss": "NaN", "accuracy": 0.1}\n')
    write_report(copied)
    section = (
        page(copied).source.split("<span>val/loss against train.optimizer.lr</span>")[1].split("</figure>")[0]
    )
    assert "left out: 2 jobs whose value is not finite" in section
    assert re.search(r'class="line c0" d="M[\d.]+ [\d.]+L', section)
    assert [row["val/loss"] for row in table(copied)][:2] == ["nan", "nan"]


def test_a_half_written_file_of_one_job_does_not_cost_the_page(copied: Path, page) -> None:
    (copied / "3/.hydra/overrides.yaml").write_text('- "train.optimizer.lr=0.0')
    (copied / "4/status.json").write_text("[1, 2]")
    (copied / "5/metrics.jsonl").write_text("[1, 2]\n3\n")
    write_report(copied)
    rows = table(copied)
    assert (len(rows), rows[3]["train.optimizer.lr"], rows[5]["val/loss"]) == (6, "", "")


def test_a_sweep_that_has_just_begun_knows_its_keys_and_how_many_jobs_will_follow(copied: Path, page) -> None:
    for job in range(1, 6):
        shutil.rmtree(copied / str(job))
    write_report(copied)
    text = page(copied).text
    assert "not started 5" in text and "5 jobs not finished" in text
    assert [(row["train.optimizer.lr"], row["seed"]) for row in table(copied)] == [("0.001", "0")]
    (copied / "sweep.json").unlink()  # as of an earlier version
    write_report(copied)
    assert "not started 5" in page(copied).text
    (copied / "multirun.yaml").write_text("hydra: [half")
    write_report(copied)
    assert "not finished" not in page(copied).text


def test_baselines_stand_first_and_each_job_is_compared_with_its_own(folder: Path, page) -> None:
    """One sweep: its title, its order, its differences, and how much of it is over while it runs."""
    keys = (*SHORT, "+hooks.loud={select: fc, hook: forward, action: scale, factor: -1}")
    assert main([*keys, "baseline=true", "seed=0,1", "hydra.sweep.dir=compared"]) == 0
    path = folder / "compared"
    rows = {row["job"]: row for row in table(path)}
    assert list(rows) == ["0", "1", "2", "3"]
    for job, baseline in (("2", "0"), ("3", "1")):
        expected = float(rows[job]["objective"]) - float(rows[baseline]["objective"])
        assert float(rows[job]["val/accuracy - baseline"]) == expected
        assert rows[baseline]["val/accuracy - baseline"] == ""
    found = page(path)
    assert "<h1>train mlp over seed</h1>" in found.source
    first = [link for link in found.links if link.startswith("./")][:2]
    assert first == ["./0/report.html", "./1/report.html"] and found.text.count(" baseline ") >= 2
    assert 'id="best"' in found.source and "without hooks: " in found.text
    shutil.rmtree(path / "3")
    write_report(path)
    assert "3 of 4 jobs finished" in page(path).text


def test_metrics_that_only_the_baselines_have_are_not_drawn(folder: Path, page) -> None:
    hook = "+hooks.c={select: fc, hook: forward, action: check, max: 1e-4}"
    keys = ["-m", "task=evaluate", *SHORT[1:4], hook, "seed=0,1", "baseline=true", "hydra.sweep.dir=ends"]
    assert main(keys) == 3
    assert "failed 2" in page(folder / "ends").text or "stopped 2" in page(folder / "ends").text
