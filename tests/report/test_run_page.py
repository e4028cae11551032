"""The page of a run: everything that the run's directory knows, and nothing from anywhere else."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hookrun
from hookrun.actions.base import RECORD_KEYS
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.report.__main__ import main as report_main
from hookrun.report.facts import Facts
from hookrun.report.section import ReportSection
from hookrun.report.sections import OF_A_RUN, model
from hookrun.store.files import StoreError


def test_it_is_made_at_the_end_of_a_run_and_said(run, page, capsys) -> None:
    path = run("task=evaluate", "train.limit_batches=1")
    assert f"report: {path}/report.html" in capsys.readouterr().out
    assert "evaluate" in page(path).text and "done" in page(path).text


def test_it_says_what_was_run_and_with_what(observed: Path, page) -> None:
    text, found = page(observed).text, hookrun.open_run(observed)
    for said in ["task train", "model mlp ", "data digits", "seed 0", "exit code 0", found.env["torch"]]:
        assert said in text
    assert found.plan["hash"][:12] in text
    last = found.metrics[-1]
    assert f"val accuracy {last['accuracy']:.4g}" in text and f"val loss {last['loss']:.4g}" in text


def test_the_plan_counts_what_fired_and_what_was_changed(observed: Path, page) -> None:
    rows = {cells[1]: cells for cells in table_rows(page(observed).source, "plan")}
    assert list(rows) == ["norms", "spread", "seen", "gradient", "halved", "said", "late"]
    assert (rows["halved"][3:7], rows["halved"][-2:]) == (
        ["Linear", "forward", "scale", "factor=0.5"],
        ["36", "100.0 %"],
    )
    assert rows["norms"][-2] == str(6 * 18) and "and 2 more" in rows["norms"][2]
    assert rows["late"][-2] == "0" and rows["late"][7] == "epoch start 99"


def table_rows(source: str, section: str) -> list[list[str]]:
    body = source.split(f'id="{section}"')[1].split("<tbody>")[1].split("</tbody>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in body.split("</tr>") if "<td" in row]
    return [[re.sub(r"<[^>]+>|\s+", " ", cell).strip() for cell in row] for row in cells]


def test_the_tree_marks_hooked_modules_with_their_counts(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    lines = [
        re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", line)).strip()
        for line in re.findall(r"<li><div>(.*?)</div>", tree, re.S)
    ]
    assert lines[0] == "(root) MLP 8,970"
    [fc] = [line for line in lines if line.startswith("fc ")]
    assert (
        fc.startswith("fc Linear 650 [2, 10]") and "halved ×36" in fc and "norms weight ×18, bias ×18" in fc
    )
    [flatten] = [line for line in lines if "flatten" in line]
    assert "×" not in flatten
    assert '<span class="mark silent" title="never fired">late ×0</span>' in tree


def test_the_tree_is_nested_as_the_model_is(observed: Path, page) -> None:
    tree = page(observed).source.split('id="tree"')[1].split("<h2")[0]
    depth, found = 0, dict[str, int]()
    for closes, opens, name in re.findall(r"(</ul>)|(<ul>)|<li><div><span[^>]*>([^<]*)<", tree):
        depth += bool(opens) - bool(closes)
        if name:
            found[name] = depth
    assert found == {"(root)": 0, "flatten": 1, "layers": 1, "0": 2, "1": 2, "2": 2, "3": 2, "fc": 1}


def test_a_tree_as_deep_as_it_may_be_and_with_gaps() -> None:
    """Modules below the deepest level stand on it; one whose parent is missing stands with the next one above."""
    paths = ["", *(".".join(["m"] * level) for level in range(1, 301)), "gone.child"]
    modules = [{"path": path, "names": [path], "class": "M", "parameters": 0} for path in paths]
    shown = model.SECTION.build(Facts(Path(), {}, model={"modules": modules}))
    assert [child.name for child in shown.root.children] == ["m", "child"]
    depth, count, level = 0, 0, [shown.root]
    while level:
        depth, count = depth + 1, count + len(level)
        level = [child for node in level for child in node.children]
    assert (depth, count) == (model.DEEPEST + 2, len(paths))


def test_a_hook_that_never_fired_stands_at_the_top(observed: Path, page) -> None:
    found = page(observed)
    assert "1 hook matched but did nothing late never fired on fc" in found.text
    assert found.source.index("matched but did nothing") < found.source.index('id="summary"')


def test_every_kind_of_picture(observed: Path, page) -> None:
    found = page(observed)
    for title in [
        "loss", "accuracy", "gradient norm", "gradient norm by layer", "mean, train mode", "std, eval mode",
        "distribution", "mean of 256 rows", "rows", "distribution over steps", "norm of the captured gradient",
    ]:  # fmt: skip
        assert f"<figcaption><span>{title}</span>" in found.source, title
    assert "of 64 units dead" in found.text
    assert found.tags.count("svg") > 15 and "shape=[64, 10]" in found.text


def test_activations_of_convolutions_are_pictures(run, page) -> None:
    path = run("experiment=tutorial/13_visualise_activations", "model=tutorial/activations")
    found = page(path)
    assert found.source.count("<span>activation maps</span>") == 2
    assert "channels 0–9" in found.text and "each 4 × 4" in found.text
    assert found.text.count("sample 358") >= 2
    assert found.source.count('alt="the input"') == 8, "beside each row of maps"


def test_the_confusion_matrix_and_the_worst_samples_equal_the_files(run, page, tmp_path: Path) -> None:
    path = run("task=evaluate")
    lines = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    right = sum(line["class"] == line["predicted_class"] for line in lines)
    metrics = hookrun.open_run(path).metrics[-1]
    assert right / len(lines) == metrics["accuracy"]
    mean = sum(line["loss"] for line in lines) / len(lines)
    assert mean == pytest.approx(metrics["loss"], rel=1e-5)
    found = page(path)
    assert (
        f"val: {right} of {len(lines)} samples classified correctly, {len(lines) - right} mis" in found.text
    )
    cells = re.findall(
        r'class="on-\w+">([\w.]*)<', found.source.split("<span>confusion matrix", 1)[1].split("</figure>")[0]
    )
    assert sum(map(int, cells)) == len(lines)
    worst = max(lines, key=lambda line: line["loss"])
    first = found.source.split('class="worst"')[1].split("</li>")[0]
    assert f"val sample {worst['sample']}" in first and "data:image/png;base64," in first
    evil = {"split": "val", "sample": 0, "png": 'x" onerror="alert(1)'}
    copy = tmp_path / "run"
    shutil.copytree(path, copy)
    (copy / "pictures.jsonl").write_text(json.dumps(evil))
    (copy / "samples.jsonl").write_text(
        json.dumps({**lines[0], "class": "<script>1</script>", "predicted_class": "\u202e", "file": "<b>"})
    )
    write_report(copy)
    assert page(copy).tags.count("script") == 1 and 'onerror="' not in page(copy).source


def test_every_figure_says_what_it_shows_and_has_its_numbers_and_a_button(observed: Path, page) -> None:
    source = page(observed).source
    figures = re.findall(r"<figure.*?</figure>", source, re.S)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(r'role="img"[^>]* aria-label="[^"]{20,}"', figure)
        assert "data-save=" in figure and "<details><summary>the numbers" in figure
    accuracy = next(figure for figure in figures if "<span>accuracy</span>" in figure)
    last = hookrun.open_run(observed).metrics[-1]["accuracy"]
    assert "val: " in accuracy and f'<td class="token">{last:.4g}</td>' in accuracy


def test_a_large_tree_is_folded_to_forty_rows() -> None:
    paths = ["", *(f"h.{n}" for n in range(30)), *(f"h.{n}.mlp" for n in range(30)), "h"]
    modules = [{"path": path, "names": [path], "class": "M", "parameters": 0} for path in sorted(paths)]

    def rows(node: Any) -> int:
        return 1 + (sum(map(rows, node.children)) if node.opened else 0)

    shown = model.SECTION.build(Facts(Path(), {}, model={"modules": modules}))
    assert shown.folds and rows(shown.root) <= 40 < shown.modules


def test_it_asks_nothing_of_the_network(observed: Path, page) -> None:
    found = page(observed)
    assert found.links and all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\(|<link|\bsrc=[\"']?http", found.source)


def test_names_are_text_whatever_they_hold(observed: Path, tmp_path: Path, page) -> None:
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


# ---- how runs end


def test_a_failed_run_has_a_page_that_says_why(run, page, capsys) -> None:
    path = run("model=mlp", "train.limit_batches=1", "train.optimizer.name=SparseAdam", code=1)
    said = capsys.readouterr()
    assert f"report: {path}/report.html" in said.out
    found = page(path)
    assert "It failed RuntimeError: SparseAdam does not support dense gradients" in found.text
    assert "Traceback (most recent call last)" in found.text


@pytest.mark.parametrize(
    ("policy", "code", "ends"), [("error", 3, "failed"), ("stop", 3, "stopped"), ("warn", 0, "done")]
)
def test_a_check_that_tripped_stands_at_the_top_with_module_and_step(
    run, page, policy: str, code: int, ends: str
) -> None:
    entry = "{select: [layers.0, fc], hook: forward, action: check, max: 0.1, when: {step: {start: 3}}}"
    short = ("train.epochs=1", "train.limit_batches=8")
    path = run(*short, f"+hooks.bound.policy={policy}", code=code, bound=entry)
    found = page(path)
    assert f'class="stamp s-{ends}">{ends}<' in found.source
    assert "Failed checks: first bound at layers.0 (Linear), epoch 0, step 3" in found.text


def test_a_run_that_was_cut_off_says_so(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    status = json.loads((path / "status.json").read_text())
    status |= {"status": "running", "ended": None, "exit_code": None, "pid": int(done.stdout)}
    (path / "status.json").write_text(json.dumps(status))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "lo')  # a line that was being written
    write_report(path)
    assert "cut off" in page(path).text


def test_a_run_that_goes_on_has_a_page(tmp_path: Path, page) -> None:
    status = {"status": "running", "reason": "", "started": "2026-01-01T00:00:00+00:00", "ended": None}
    (tmp_path / "status.json").write_text(json.dumps({**status, "pid": os.getpid(), "exit_code": None}))
    write_report(tmp_path)
    assert "The run is not finished" in page(tmp_path).text


def test_damaged_files_leave_a_page_with_notes(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    (path / "plan.json").write_text("{")
    (path / "model.json").unlink()
    shard = sorted((path / "captures").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    lines = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(lines.replace('{"split": "val"', "{split", 1))
    write_report(path)
    text = page(path).text
    assert "the plan can't be read" in text and "1 lines are not JSON" in text and "Not drawn" in text
    assert "val accuracy" in text


def test_a_page_that_cannot_be_made_costs_the_run_nothing(run, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write report.html: No space left on device")

    monkeypatch.setattr("hookrun.report.run.write_page", refuse)
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


def test_the_command_on_the_page_gives_the_same_numbers(observed: Path, page) -> None:
    words = shlex.split(page(observed).command)
    assert words[:3] == ["python", "-m", "hookrun"]
    assert not any(word.startswith("hydra.run.dir") for word in words)
    assert main([*words[3:], "hydra.run.dir=repeated"]) == 0
    assert hookrun.open_run("repeated").metrics == hookrun.open_run(observed).metrics


def test_the_module_makes_pages_of_any_directory(observed: Path, tmp_path: Path, capsys) -> None:
    page = observed / "report.html"
    page.unlink()
    assert report_main([str(observed)]) == 0
    assert capsys.readouterr().out.strip() == str(page) and page.is_file()
    assert report_main([str(tmp_path / "nowhere")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert report_main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["probe", "similarity"])
def test_analyses_have_their_table_and_their_picture(run: Callable[..., Path], page, task: str) -> None:
    entry = "{select: [flatten, layers.1, fc], hook: forward, action: capture}"
    source = run("task=predict", seen=entry)
    path = run(f"task={task}", f"task.run={source}")
    found, lines = page(path), hookrun.open_run(path).metrics
    if task == "probe":
        rows = {cells[0]: cells[-2] for cells in table_rows(found.source, "analysis")}
        assert rows == {line["module"]: f"{line['accuracy']:.4g}" for line in lines}
        assert "chance" in found.text and found.tags.count("svg") == 1
    else:
        assert "linear CKA" in found.text and found.tags.count("img") == 1
        cells = re.findall(r'class="on-\w+">([\d.e-]+)<', found.source)
        assert [float(cell) for cell in cells] == [float(f"{line['cka']:.3g}") for line in lines]


def test_a_budget_that_was_used_up_is_said(run, page) -> None:
    path = run("task=predict", h="{select: fc, hook: forward, action: capture, max_bytes: 6000}")
    assert (
        "h captured nothing after epoch 0, step 2 (eval mode): its max_bytes of 6,000 were used up"
        in page(path).text
    )


def test_records_of_another_shape_are_left_out_and_counted(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    with (path / "stats.jsonl").open("a") as file:
        file.write('[1, 2]\n{"hook": "norms"}\n{"hook": 3, "module": {}, "action": "stats"}\n')
    (path / "hooks.json").write_text('{"sites": [3]}')
    write_report(path)
    text = page(path).text
    assert "stats.jsonl: 3 lines are not valid records" in text
    assert "the hooks' counts can't be read: found a int, expected a mapping" in text


def test_every_record_begins_with_the_same_keys(observed: Path) -> None:
    records = hookrun.open_run(observed).stats
    assert {tuple(record)[: len(RECORD_KEYS)] for record in records} == {RECORD_KEYS}


def test_the_records_of_an_unknown_action_are_shown(observed: Path, tmp_path: Path, page) -> None:
    """Numbers as a chart over steps, everything else as lines; the plan's hook type may be unknown too."""
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    plan = (path / "plan.json").read_text()
    (path / "plan.json").write_text(plan.replace('"optimizer_step_pre"', '"of_the_future"'))
    context = {"hook": "norms", "module": "fc", "path": "", "action": "rank", "mode": "train", "epoch": 0}
    with (path / "stats.jsonl").open("a") as file:
        for step in range(4):
            record = {**context, "step": step, "call": 0}
            file.write(json.dumps({**record, "rank": step}) + "\n")
            file.write(json.dumps({**record, "largest": "fc.weight"}) + "\n")
    write_report(path)
    found = page(path)
    assert "<span>rank</span>" in found.source and "largest=fc.weight" in found.text
    assert "of_the_future, stats on 6 modules" in found.text


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


def test_a_status_that_says_nothing_is_an_error_that_names_it(observed: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    (path / "status.json").write_text("[]")
    assert report_main([str(path)]) == 1
    assert f"{path}/status.json says no status" in capsys.readouterr().err
