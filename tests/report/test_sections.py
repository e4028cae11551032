"""The sections of a run's page: the plan, the model, the metrics, what tasks found, and the command that repeats it."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from report_pages import read_lines, table_rows, write_lines

import hookrun
from hookrun.cli import main
from hookrun.report.facts import RunData
from hookrun.report.lines import SampledLines
from hookrun.report.sections import metrics, model, repeat, summary
from hookrun.report.sections.metrics import latest
from hookrun.run.passes import progress
from hookrun.store.records import ModelRecord, PlanRecord

# ---- summary

STATUS = {
    "status": "done",
    "started": "2026-01-01T00:00:00+00:00",
    "ended": "2026-01-01T00:03:20+00:00",
    "exit_code": 0,
}


def test_an_analysis_names_its_run() -> None:
    config = {"task": {"name": "probe", "run": "/runs/b"}, "seed": "x"}
    assert dict(summary.build(RunData(Path("a"), {"status": "running"}, config=config)) or []) == {
        "task": "probe", "of the run": "/runs/b", "started": "–", "directory": "a",
    }  # fmt: skip
    resnet = {"plan": PlanRecord(model="ResNet"), "config": {"model": {"name": "resnet18"}}}
    cut_off = dict(summary.build(RunData(Path("a"), STATUS, cut_off="its process is gone", **resnet)) or [])
    assert cut_off["model"] == "resnet18 (ResNet)"
    assert "duration" not in cut_off


def test_tags_and_note_are_in_the_summary() -> None:
    config = {"tags": ["a", "b"], "note": "one \x1b try"}
    rows = dict(summary.build(RunData(Path("a"), STATUS, config=config)) or [])
    assert (rows["tags"], rows["note"]) == ("a, b", "one \\x1b try")
    assert "note" not in dict(summary.build(RunData(Path("a"), STATUS, config={"note": ["x"]})) or [])


# ---- plan and model


def test_the_plan_counts_what_fired(observed: Path, page) -> None:
    rows = {cells[1]: cells for cells in table_rows(page(observed).source, "plan")}
    assert list(rows) == ["norms", "spread", "seen", "gradient", "halved", "said", "late", "few"]
    assert rows["halved"][3:7] == ["Linear", "forward", "scale", "factor=0.5"]
    assert rows["halved"][-2:] == ["36", "100.0 %"]
    assert rows["norms"][-2] == str(6 * 18)
    assert "and 2 more" in rows["norms"][2]
    assert rows["late"][-2] == "0"
    assert rows["late"][7] == "epoch 99:"


def test_the_tree_marks_hooked_modules_with_their_counts(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    lines = [
        re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", line)).strip()
        for line in re.findall(r"<li><div>(.*?)</div>", tree, re.S)
    ]
    assert lines[0] == "(root) MLP 8,970"
    [fc] = [line for line in lines if line.startswith("fc ")]
    assert fc.startswith("fc Linear 650 [2, 10]")
    assert "halved ×36" in fc
    assert "norms weight ×18, bias ×18" in fc
    [flatten] = [line for line in lines if "flatten" in line]
    assert "×" not in flatten
    assert '<span class="mark silent" title="never fired">late ×0</span>' in tree


def test_the_tree_is_nested_as_the_model_is(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    depth = 0
    found = dict[str, int]()
    for closes, opens, name in re.findall(r"(</ul>)|(<ul>)|<li><div><span[^>]*>([^<]*)<", tree):
        depth += bool(opens) - bool(closes)
        if name:
            found[name] = depth
    assert found == {"(root)": 0, "flatten": 1, "layers": 1, "0": 2, "1": 2, "2": 2, "3": 2, "fc": 1}


def tree_of(*paths: str) -> dict[str, Any]:
    """What the page shows of a model with these modules."""
    modules = [{"path": path, "names": [path], "class": "M", "parameters": 0} for path in paths]
    shown = model.build(RunData(Path(), {}, model=ModelRecord.model_validate({"modules": modules})))
    assert shown is not None
    return dict(shown)


def test_a_tree_as_deep_as_allowed_may_have_gaps() -> None:
    """Modules below the deepest level are shown on it; one whose parent is missing is shown under the next ancestor."""
    paths = ["", *(".".join(["m"] * level) for level in range(1, 301)), "gone.child"]
    root = tree_of(*paths)["root"]
    assert [child["name"] for child in root["children"]] == ["m", "child"]
    depth = 0
    count = 0
    level = [root]
    while level:
        depth = depth + 1
        count = count + len(level)
        level = [child for node in level for child in node["children"]]
    assert depth == model.DEEPEST + 2
    assert count == len(paths)


def test_a_large_tree_is_folded_to_forty_rows() -> None:
    def rows(node: Any) -> int:
        return 1 + (sum(map(rows, node["children"])) if node["opened"] else 0)

    shown = tree_of("", "h", *(path for n in range(30) for path in (f"h.{n}", f"h.{n}.mlp")))
    assert shown["folds"]
    assert rows(shown["root"]) <= 40 < shown["modules"]


# ---- metrics


def facts(*lines: dict[str, Any]) -> RunData:
    return RunData(Path(), {}, metrics=SampledLines(list(lines)))


def line(step: int, of: str = "epoch", split: str = "val", **values: float) -> dict[str, Any]:
    return {"split": split, "of": of, "step": step, **values}


def test_each_metric_is_one_chart() -> None:
    found = metrics.build(
        facts(
            *(line(step, "batch", "train", loss=1.0 / step, lr=0.1) for step in (1, 2)),
            *(line(step, split=split, loss=0.5) for step in (2, 4) for split in ("train", "val")),
            line(4, accuracy=0.5),
        )
    )
    assert found is not None
    assert [figure.title for figure in found] == ["loss"], "a constant lr and a single value are not drawn"
    assert found[0].legend == ("train, single batches", "train", "val")


def test_means_come_before_values_of_batches() -> None:
    lines = [line(1, loss=0.5, accuracy=0.9), line(2, loss=0.7, accuracy=0.8)]
    lines += [line(3, "batch", loss=0.1), line(3, "batch", "train", loss=0.2, lr=0.1)]
    assert [tuple(value.values())[:5] for value in latest(facts(*lines))] == [
        ("val", "loss", 0.7, 0.5, False),
        ("val", "accuracy", 0.8, 0.9, False),
        ("train", "loss", 0.2, 0.2, True),
    ]


def test_a_nan_is_never_the_best_value() -> None:
    (found,) = latest(facts(line(1, loss=0.5), line(2, loss=math.nan)))
    assert math.isnan(found["last"])
    assert found["best"] == 0.5


def test_lines_without_a_step_are_of_analyses() -> None:
    assert metrics.build(facts({"module": "fc", "accuracy": 0.5})) is None


def test_only_whole_numbers_from_0_are_positions() -> None:
    values = (0, 1, True, -1, 2**60)
    lines = [
        {"split": "val", "of": of, of: value, "loss": 1.0}
        for of in ("position", "sample")
        for value in values
    ]
    parts = metrics.parts_of_passes(facts(*lines))
    assert parts is not None
    ((_, rows),) = parts["tables"]
    assert [sample for sample, *_ in rows] == [0, 1, 2**60]
    assert len(parts["figures"]) == 1


# ---- what tasks found


def test_the_worst_samples_equal_the_files(shared, page, remade, tmp_path) -> None:
    path = shared("task=evaluate")
    lines = read_lines(path / "samples.jsonl")
    right = sum(line["class"] == line["predicted_class"] for line in lines)
    measured = hookrun.open_run(path).metrics[-1]
    assert right / len(lines) == measured["accuracy"]
    assert sum(line["loss"] for line in lines) / len(lines) == pytest.approx(measured["loss"], rel=1e-5)
    found = page(path)
    said = f"val: {right} of {len(lines)} samples classified correctly, {len(lines) - right} misclassified"
    assert said in found.text
    matrix = found.source.split("<span>confusion matrix", 1)[1].split("</figure>")[0]
    assert sum(map(int, re.findall(r'class="on-\w+">([\w.]*)<', matrix))) == len(lines)
    worst = max(lines, key=lambda line: line["loss"])
    first = found.source.split('class="worst"')[1].split("</li>")[0]
    assert f"val sample {worst['sample']}" in first
    assert "data:image/png;base64," in first
    (tmp_path / "status.json").write_text((path / "status.json").read_text())
    write_lines(tmp_path / "pictures.jsonl", [{"split": "val", "sample": 0, "png": 'x" onerror="alert(1)'}])
    evil = {**lines[0], "class": "<script>1</script>", "predicted_class": "\u202e", "file": "<b>"}
    write_lines(tmp_path / "samples.jsonl", [evil])
    hostile = remade(tmp_path)
    assert hostile.tags.count("script") == 1
    assert 'onerror="' not in hostile.source


@pytest.mark.parametrize("task", ["probe", "similarity"])
def test_analyses_have_their_table_with_a_picture(analysed, page, task: str) -> None:
    path = analysed(task)
    found = page(path)
    lines = hookrun.open_run(path).metrics
    if task == "probe":
        rows = {cells[0]: cells[-4] for cells in table_rows(found.source, "analysis")}
        assert rows == {line["module"]: f"{line['accuracy']:.4g}" for line in lines}
        assert "majority" in found.text
        assert found.tags.count("svg") == 1
    else:
        assert "linear CKA" in found.text
        assert found.tags.count("img") == 1
        cells = re.findall(r'class="on-\w+">([\d.e-]+)<', found.source)
        assert [float(cell) for cell in cells] == [float(f"{line['cka']:.4g}") for line in lines]


def test_a_comparison_has_its_tables_with_bounds(run, predictions, page, remade, tmp_path) -> None:
    seen = "{select: [layers.1, fc], hook: forward, action: capture}"
    path = run(
        "task=compare", f"task.run={predictions}", f"task.other={run('task=predict', 'seed=1', seen=seen)}"
    )
    found = page(path)
    assert "first: layers.1, sample 0" in found.text
    assert found.tags.count("svg") == 1
    first = json.loads((path / "compare.json").read_text())["captures"][0]
    assert table_rows(found.source, "comparison")[0][:2] == ["layers.1", f"{first['relative_l2']:.4g}"]
    evil = {"module": "<script>1</script>", "relative_l2": 1e300, "token": 10**12, "path": ["x"]}
    hostile = {"captures": [evil, 3], "predictions": {"changes": 5}, "reasons": ["<b>"]}
    for name, content in (("status.json", {"status": "done"}), ("compare.json", hostile)):
        (tmp_path / name).write_text(json.dumps(content))
    assert remade(tmp_path).tags.count("script") == 1
    (tmp_path / "compare.json").write_text("{")
    assert "is not JSON" in remade(tmp_path).text


def test_classes_of_random_weights_are_folded(shared, observed: Path, page) -> None:
    random = page(shared("task=evaluate"))
    trained = page(observed)
    assert "The weights are random" in random.text
    assert "The weights are random" not in trained.text
    assert ["<summary>confusion matrix" in each.source for each in (random, trained)] == [True, False]


def test_only_misclassified_samples_have_the_highest_loss(observed: Path, page) -> None:
    lines = read_lines(observed / "samples.jsonl")
    wrong = [line for line in lines if line["class"] != line["predicted_class"]]
    assert 0 < len(wrong) < len(lines)
    shown = page(observed).source.split('class="worst"')[1].split("</ol>")[0].count("<li>")
    assert shown == min(len(wrong), 16)


def test_a_rate_says_of_how_many_samples() -> None:
    values = {each["name"]: each for each in latest(facts(line(1, samples=12, changed=0.75)))}
    assert values["changed"]["last"] == 0.75
    assert values["changed"]["total"] == 12
    assert progress.numbers({"samples": 12, "changed": 0.75}) == "samples 12  changed 9 of 12"


# ---- again


def test_the_command_on_the_page_repeats_the_results(observed: Path, page) -> None:
    words = shlex.split(page(observed).command)
    assert words[:3] == ["python", "-m", "hookrun"]
    for word in words:
        assert not word.startswith("hydra.run.dir")
    assert main([*words[3:], "hydra.run.dir=repeated"]) == 0
    assert hookrun.open_run("repeated").metrics == hookrun.open_run(observed).metrics


@pytest.mark.parametrize("path", ["/runs/1", "/of a day/1", "/it's/1", r"/back\slash/1", "/a,b=c/1"])
def test_the_command_names_a_run_as_hydra_reads_it(tmp_path: Path, path: str) -> None:
    (tmp_path / ".hydra").mkdir()
    written = {"mode": "RUN", "overrides": {"task": ["task=probe"]}, "runtime": {"cwd": "/"}}
    (tmp_path / ".hydra/hydra.yaml").write_text(json.dumps({"hydra": written}))
    used = PlanRecord.model_validate({"runs": [{"where": "task.run", "run": "latest", "path": path}]})
    again = repeat.of_a_run(RunData(tmp_path, STATUS, plan=used))
    assert again is not None
    [override] = OverridesParser.create().parse_overrides(shlex.split(again["command"])[-1:])
    assert override.key_or_group == "task.run"
    assert override.value() == path


def test_the_command_on_the_page_is_that_of_the_sweep(sweep: Path, page) -> None:
    words = shlex.split(page(sweep).command)
    assert words[:4] == ["python", "-m", "hookrun", "--multirun"]
    small = {
        "compute.device=cpu", "compute.threads=1", "model=mlp", "train.epochs=1", "train.limit_batches=4",
    }  # fmt: skip
    assert {*words[4:]} == {*small, "train.optimizer.lr=0.001,0.01,0.1", "seed=0,1"}
