"""The page and the table of a sweep, from its directory alone, with jobs in any state."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import math
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from PIL import Image
from report_pages import change_status, ended_process, read_lines, table, write_lines

import hookrun
from hookrun.report.draw.charts import is_geometric
from hookrun.report.sweep_facts import SweepData, conclusion, find_jobs, read_sweep


def give(job: Path, *overrides: str) -> None:
    """Change the overrides that a job was given."""
    (job / ".hydra/overrides.yaml").write_text(json.dumps(overrides))


def figure(source: str, title: str) -> str:
    """The figure with that title."""
    return source.split(f"<span>{title}</span>")[1].split("</figure>")[0]


def test_the_table_holds_every_job_with_its_keys(sweep: Path) -> None:
    rows = table(sweep)
    assert [row["job"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    keys = [(row["train.optimizer.lr"], row["seed"]) for row in rows]
    assert keys[:3] == [("0.001", "0"), ("0.001", "1"), ("0.01", "0")]
    for row in rows:
        metrics = hookrun.open_run(sweep / row["job"]).metrics
        (mean,) = [line["loss"] for line in metrics if (line["split"], line["of"]) == ("train", "epoch")]
        assert float(row["train/loss"]) == mean, "of the last epoch"
        last = metrics[-1]
        assert float(row["val/accuracy"]) == last["accuracy"]
        assert float(row["val/loss"]) == last["loss"]
        assert row["status"] == "done"
        assert row["exit_code"] == "0"
        assert row["reason"] == ""
        assert float(row["seconds"]) > 0


def test_names_in_a_sweep_are_escaped(copied: Path, remade) -> None:
    evil = "<script>alert(1)</script>"
    give(copied / "0", f"{evil}={evil}")
    change_status(copied / "1", status="failed", reason=evil)
    (copied / "2").rename(copied / '"><img src=x>')
    found = remade(copied)
    assert found.tags.count("script") == 1
    assert evil in found.text
    assert "x" not in found.links


def test_the_note_of_a_job_is_in_the_table(copied: Path, remade) -> None:
    config = copied / "3/.hydra/config.yaml"
    OmegaConf.save({**OmegaConf.load(config), "note": "a longer one"}, config)
    assert "a longer one" in remade(copied).text
    assert [row["note"] for row in table(copied)] == ["", "", "", "a longer one", "", ""]


def test_texts_of_the_table_are_not_formulas(copied: Path, remade) -> None:
    formulas = [" =1", "=cmd|' /C calc'!A0", "\uff0b1+1", "-2+3", "@SUM(A1)", "\t=1"]
    for job, text in enumerate(formulas):
        give(copied / str(job), f"hooks.a.name={text}", "=key=-1.5e-3", f"seed={-job}")
    change_status(copied / "5", status="failed", reason="=1+1")
    remade(copied)
    rows = table(copied)
    assert [row["hooks.a.name"] for row in rows] == [f"'{text}" for text in formulas]
    assert [row["seed"] for row in rows] == ["0", "-1", "-2", "-3", "-4", "-5"]
    assert rows[5]["reason"] == "'=1+1"
    assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in (*row, *row.values()))


def test_a_sweep_that_has_just_begun_has_its_keys(copied: Path, remade) -> None:
    for job in range(1, 6):
        shutil.rmtree(copied / str(job))
    text = remade(copied).text
    assert "not started 5" in text
    assert "5 jobs not finished" in text
    assert [(row["train.optimizer.lr"], row["seed"]) for row in table(copied)] == [("0.001", "0")]
    (copied / "multirun.yaml").write_text("hydra: [half")
    (copied / "sweep.json").unlink()
    text = remade(copied).text
    assert "not finished" not in text
    assert "train.optimizer.lr" not in text, "its start is not known"


# ---- baselines, the objective, the best job


@pytest.fixture(scope="module")
def compared(swept: Callable[..., Path]) -> Path:
    """A sweep over two seeds, with baselines."""
    hook = "+hooks.loud={select: fc, hook: forward, action: scale, factor: -1}"
    small = ("model=mlp", "train.limit_batches=1", "train.epochs=1")
    return swept("compared", *small, hook, "baseline=true", "seed=0,1")


def test_metrics_that_only_the_baselines_have_are_not_drawn(compared: Path, remade, tmp_path: Path) -> None:
    path = Path(shutil.copytree(compared, tmp_path / "moved"))
    for job in ("2", "3"):
        change_status(path / job, status="failed", objective=None)
        (path / job / "metrics.jsonl").unlink()
    found = remade(path)
    assert "failed 2" in found.text
    assert "svg" not in found.tags


def test_each_job_is_compared_with_its_own_baseline(compared, page, remade, tmp_path) -> None:
    """One sweep: its title, its order, its differences, and its progress while it runs."""
    path = Path(shutil.copytree(compared, tmp_path / "compared"))
    rows = {row["job"]: row for row in table(path)}
    assert list(rows) == ["0", "1", "2", "3"]
    for job, baseline in (("2", "0"), ("3", "1")):
        assert rows[job]["baseline"] == "false"
        assert rows[baseline]["baseline"] == "true"
        for metric in ("val/accuracy", "train/loss"):
            expected = float(rows[job][metric]) - float(rows[baseline][metric])
            assert float(rows[job][f"{metric} - baseline"]) == expected
            assert rows[baseline][f"{metric} - baseline"] == ""
    found = page(path)
    assert "<h1>train mlp over seed</h1>" in found.source
    first = [link for link in found.links if link.startswith("./")][:2]
    assert first == ["./0/report.html", "./1/report.html"]
    assert found.text.count(" baseline ") >= 2
    assert 'id="best"' in found.source
    assert "without hooks: " in found.text
    with (path / "sweep_settings.csv").open(newline="", encoding="utf-8") as file:
        assert [(row["baseline"], row["n"]) for row in csv.DictReader(file)] == [
            ("true", "2"),
            ("false", "2"),
        ]
    assert "(2 seeds)" in found.text
    typed = OmegaConf.load(path / "3/.hydra/overrides.yaml")
    give(path / "3", *(text.replace("seed=1", "seed=0") for text in typed))
    assert "(2 jobs)" in remade(path).text, "of one seed"
    shutil.rmtree(path / "3")
    assert "3 of 4 jobs finished" in remade(path).text


def by_setting(sweep: Path, *keys: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """The rows of the table by their values of the keys."""
    settings = defaultdict[tuple[str, ...], list[dict[str, str]]](list)
    for row in table(sweep):
        settings[tuple(row[key] for key in keys)].append(row)
    return settings


def test_the_best_setting_has_the_best_mean_over_the_seeds(sweep: Path, copied: Path, page, remade) -> None:
    settings = by_setting(sweep, "train.optimizer.lr")
    results = {key: [float(row["objective"]) for row in rows] for key, rows in settings.items()}
    (lr,), values = max(results.items(), key=lambda item: statistics.fmean(item[1]))
    said = f"{statistics.fmean(values) * 100:.1f} % ± {statistics.stdev(values) * 100:.1f} (2 seeds)"
    found = page(sweep)
    assert f"best: train.optimizer.lr={lr}, val/accuracy {said}; to maximize val/accuracy" in found.text
    assert found.source.count('<tr id="best">') == 1
    assert found.source.count(">best<") == 2
    for job in map(
        str, range(6)
    ):  # written by an earlier version: no means of training, no result in the status
        metrics = copied / job / "metrics.jsonl"
        kept = [line for line in read_lines(metrics) if line.pop("of") == "batch" or line["split"] == "val"]
        write_lines(metrics, kept)
        change_status(copied / job, objective=None)
    old = remade(copied)
    assert "Single batches, not means train/accuracy, train/loss" in old.text
    assert f"best: train.optimizer.lr={lr}, val/accuracy {said}" in old.text


def test_the_settings_file_has_means_of_the_rows(sweep: Path) -> None:
    with (sweep / "sweep_settings.csv").open(newline="", encoding="utf-8") as file:
        written = {(row["train.optimizer.lr"],): row for row in csv.DictReader(file)}
    settings = by_setting(sweep, "train.optimizer.lr")
    assert written.keys() == settings.keys()
    for key, rows in settings.items():
        losses = [float(row["val/loss"]) for row in rows]
        assert written[key]["n"] == "2"
        assert "seed" not in written[key]
        assert math.isclose(float(written[key]["val/loss mean"]), statistics.fmean(losses))
        assert math.isclose(float(written[key]["val/loss std"]), statistics.stdev(losses))


def test_other_keys_than_the_seed_can_be_repetitions(copied: Path, remade) -> None:
    for job in map(str, range(6)):
        path = copied / job / ".hydra/config.yaml"
        config = OmegaConf.load(path)
        OmegaConf.update(config, "objective.over", ["train.optimizer.lr"], force_add=True)
        OmegaConf.save(config, path)
    assert "best: seed=" in remade(copied).text
    assert {len(setting.jobs) for setting in read_sweep(copied).settings} == {3}


def effects(folder: Path, *, with_baseline: bool) -> SweepData:
    """A sweep over two layers whose metric is a logit difference that the experiment does not optimize."""
    jobs = []
    values = {"vars.layer=0": 0.5, "vars.layer=1": -3.0, "hooked=false": 0.25}
    for number, (given, value) in enumerate(values.items()):
        result = {
            "metric": "val/logit_difference", "direction": "maximize", "of": "best", "value": value,
            "epoch": None,
        }  # fmt: skip
        job = folder / str(number)
        (job / ".hydra").mkdir(parents=True)
        give(job, given)
        (job / ".hydra/config.yaml").write_text("objective: null\n")
        (job / "status.json").write_text(json.dumps({"status": "done", "objective": result}))
        jobs.append(job)
    if not with_baseline:
        shutil.rmtree(jobs[-1])
    return read_sweep(folder)


def test_of_a_diagnostic_metric_the_largest_effect_is_told(tmp_path: Path) -> None:
    facts = effects(tmp_path, with_baseline=True)
    assert conclusion(facts) == "largest effect: layer 1 (-3.25 over 0.25 without hooks) on logit_difference"
    assert [job.name for job in facts.ranked] == ["2", "1", "0"]


def test_of_a_diagnostic_metric_without_baseline_nothing_is_best(tmp_path: Path) -> None:
    assert "baseline=true" in conclusion(effects(tmp_path, with_baseline=False))


def test_a_finished_multirun_has_links_to_its_jobs(sweep: Path, page) -> None:
    found = page(sweep)
    assert "done 6" in found.text
    assert "val/accuracy" in found.text
    links = [link for link in found.links if link.startswith("./")]
    assert sorted(links) == [f"./{row['job']}/report.html" for row in table(sweep)]
    for link in links:
        assert (sweep / link).is_file()


# ---- jobs in any state


def test_jobs_are_in_the_order_of_their_numbers(copied: Path) -> None:
    (copied / "lr=0.1").mkdir()
    (copied / "5").rename(copied / "lr=0.1" / "seed=1")
    (copied / "4").rename(copied / "10")
    assert [job.name for job in find_jobs(copied)] == ["lr=0.1/seed=1", "0", "1", "2", "3", "10"]


def test_a_killed_job_is_not_shown_as_running(copied: Path, remade) -> None:
    change_status(copied / "5", status="running", ended=None, exit_code=None, pid=ended_process())
    text = remade(copied).text
    assert "cut off 1" in text
    assert "1 job did not end well" in text
    assert "not finished" not in text
    assert table(copied)[5]["status"] == "cut off"


def test_a_partly_written_file_does_not_stop_the_page(copied: Path, remade) -> None:
    (copied / "3/.hydra/overrides.yaml").write_text('- "train.optimizer.lr=0.0')
    (copied / "4/status.json").write_text("[1, 2]")
    (copied / "5/metrics.jsonl").write_text("[1, 2]\n3\n")
    remade(copied)
    rows = table(copied)
    assert len(rows) == 6
    assert rows[3]["train.optimizer.lr"] == ""
    assert rows[5]["val/loss"] == ""


def test_a_failed_job_is_listed_with_its_reason(copied: Path, remade) -> None:
    reason = "SparseAdam does not support dense gradients"
    change_status(copied / "0", status="failed", exit_code=1, reason=f"RuntimeError: {reason}")
    give(copied / "0", "seed=7")
    found = remade(copied)
    rows = table(copied)
    assert "done 5" in found.text
    assert "failed 1" in found.text
    assert "1 job did not end well" in found.text
    assert reason in found.text
    keys = re.findall('<td class="mono long">(.*?)</td>', found.source)
    assert [key.strip() for key in keys] == ["seed=7"]
    assert [(row["status"], row["exit_code"]) for row in rows[:2]] == [("failed", "1"), ("done", "0")]
    assert reason in rows[0]["reason"]


def test_it_can_be_made_while_jobs_run(copied: Path, remade) -> None:
    change_status(copied / "5", status="running", ended=None, exit_code=None)
    (copied / "4/status.json").unlink()  # Hydra has created its directory, and nothing more
    (copied / "4/metrics.jsonl").unlink()
    with (copied / "5/metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "accu')
    text = remade(copied).text
    assert "2 jobs not finished" in text
    assert "running 1" in text
    assert "not started 1" in text
    assert [row["status"] for row in table(copied)][4:] == ["not started", "running"]


# ---- metrics by swept key


def test_repetitions_are_one_curve_with_a_band(sweep: Path, page) -> None:
    source = page(sweep).source
    assert "<span>val/accuracy against train.optimizer.lr</span>" in source
    assert 'class="band c0"' in source
    assert "against seed" not in source
    assert '<h2 id="figures">Metrics by swept key</h2>' in source
    assert '<a href="#figures">Metrics by swept key</a>' in source, "the words of the heading"


def test_the_picture_depends_on_the_number_of_keys(copied: Path, remade) -> None:
    def with_keys(*keys: str) -> str:
        for job in range(6):
            values = [f"{key}={(job // 2**place) % 2 + 1}" for place, key in enumerate(keys)]
            give(copied / str(job), *values)
        return str(remade(copied).source)

    assert "val/accuracy against a<" in with_keys("a")
    two = with_keys("a", "b")
    assert "<span>val/accuracy</span>" in two
    assert "across: a; down: b" in two
    three = with_keys("a", "b", "c")
    for key in "abc":
        assert f"val/accuracy against {key}<" in three


def test_the_cells_of_a_map_are_means(copied: Path, remade) -> None:
    for job in range(6):
        give(copied / str(job), f"a={job % 2}", f"b={job % 2}", f"seed={job}")
    cells = re.findall(r'class="on-\w+">([\w.]*)<', figure(remade(copied).source, "val/accuracy"))
    values = [float(row["val/accuracy"]) for row in table(copied)]
    first, second = (f"{sum(values[start::2]) / 3:.4g}" for start in (0, 1))
    assert cells == [first, "", "", second]


def test_the_curve_continues_past_a_nan(copied: Path, remade) -> None:
    for job in "01":
        with (copied / job / "metrics.jsonl").open("a") as file:
            file.write('{"split": "val", "epoch": 9, "step": 99, "loss": "NaN", "accuracy": 0.1}\n')
    drawn = figure(remade(copied).source, "val/loss against train.optimizer.lr")
    assert "left out: 2 jobs whose value is not finite" in drawn
    assert re.search(r'class="line c0" d="M[\d.]+ [\d.]+L', drawn)
    assert [row["val/loss"] for row in table(copied)][:2] == ["nan", "nan"]


# ---- maps


def test_a_map_has_layer_0_at_the_bottom(patched: Path, page) -> None:
    drawn = figure(page(patched).source, "val/loss")
    assert "across: vars.position; up: vars.layer" in drawn
    value = drawn.split('class="heat ')[1]
    assert re.findall(r'grid-row:\d" title="(\d)"', value) == ["1", "0"]
    tokens = read_lines(patched / "0/samples.jsonl")[0]["tokens"]
    texts = {line["token"]: line["text"] for line in read_lines(patched / "0/tokens.jsonl")}
    heads = re.findall(r"<span>([^<]*)</span>", value.split('class="heat-columns')[1].split("heat-x")[0])
    assert heads == [f"{at} {texts[tokens[at]]}" for at in (1, -1)]


def test_the_cells_of_a_map_are_links_to_their_jobs(patched: Path, page) -> None:
    value, difference = figure(page(patched).source, "val/loss").split('class="heat ')[1:]
    rows = table(patched)
    for drawn, column in ((value, "val/loss"), (difference, "val/loss - baseline")):
        cells = re.findall(r'<a href="\./(\d+)/report.html"[^>]*><span class="on-\w+">([^<]*)<', drawn)
        assert len(cells) == 4
        for job, shown in cells:
            assert rows[int(job)]["baseline"] == "false"
            assert shown == f"{float(rows[int(job)][column]):.4g}"


def test_the_middle_colour_is_that_of_the_baseline(patched: Path, page) -> None:
    source = figure(page(patched).source, "val/loss")
    base = float(next(row["val/loss"] for row in table(patched) if row["baseline"] == "true"))
    pictures = re.findall(r'class="cells" alt="[^"]*" src="data:image/png;base64,([^"]+)"', source)
    for address in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(address))).convert("RGB")
        pixels = [image.getpixel((x, y)) for y in range(2) for x in range(2)]
        cells = re.findall(r'class="on-\w+">([^<]*)<', source)[:4]
        for (red, green, blue), value in zip(pixels, map(float, cells), strict=True):
            assert green <= max(red, blue), "an increase of a loss is never green"
            if abs(value - base) > 0.01 * base:
                assert (red > blue) == (value > base)


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ((0.001, 0.003, 0.01), True), ((0.1, 1), True), ((16, 32, 64), True), ((1, 2, 3), False), ((0, 1, 10), False),
        ((0, 1), False), ((5,), False), ((1, 2), False), ((1, 1), False), ((1e-300, 1, 1e300), True),
    ],
)  # fmt: skip
def test_a_geometric_sweep_has_a_logarithmic_axis(values: tuple[float, ...], log: bool) -> None:
    assert is_geometric(values) == log


def test_0_in_a_geometric_sweep_is_at_the_same_distance(copied: Path, remade) -> None:
    for job, value in enumerate((0, 0.01, 0.1, 1, 10, 100)):
        give(copied / str(job), f"strength={value}")
    drawn = figure(remade(copied).source, "val/loss against strength")
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn)]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert len(places) == 6
    assert max(gaps) - min(gaps) < 0.3
