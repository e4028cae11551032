"""The page of a run: made from the run's directory alone, whole, damaged or of a stranger, however the run ended."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import tracemalloc
from pathlib import Path

import pytest
import torch
from report_pages import change_status, ended_process, write_lines

import hookrun
from hookrun.cli import main
from hookrun.engine.actions.base import RECORD_KEYS
from hookrun.report import lines
from hookrun.report.__main__ import main as report_main
from hookrun.report.facts import RunData, TokenSequence
from hookrun.report.sections import OF_A_RUN, ReportSection
from hookrun.store.files import StoreError
from hookrun.store.records import MetricsLine, ModelRecord
from hookrun.studies.effects.records import Effects, write_effects


def test_it_names_the_packages_that_were_trusted(run, page, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOOKRUN_TRUST", "one, two")
    bound = "{select: fc, hook: forward, action: check, max: 0.1, policy: warn}"
    path = run("task=evaluate", "train.limit_batches=1", bound=bound)
    assert f"report: {path}/report.html" in capsys.readouterr().out
    found = page(path)
    assert "evaluate" in found.text
    assert 'class="stamp s-done">done<' in found.source
    assert "Failed checks: first bound at fc (Linear), epoch 0, step 0" in found.text
    assert shlex.split(found.command)[:2] == ["HOOKRUN_TRUST=one,two", "python"]


def test_it_shows_the_versions(observed: Path, page) -> None:
    text = page(observed).text
    found = hookrun.open_run(observed)
    said = ["task train", "model mlp ", "data digits", "seed 0", "exit code 0", f"directory {observed}"]
    said += [f"torch {found.env['torch']}", ", python 3.", "started 20"]
    said.append(f"device cpu, 1 thread of {found.env['cpu_count']} core")
    assert [each for each in said if each not in text] == []
    assert re.search(r"duration [\d.]+ s ", text)
    assert found.plan["hash"][:12] in text
    last = found.metrics[-1]
    assert f"val accuracy {last['accuracy']:.4g}" in text
    assert f"val loss {last['loss']:.4g}" in text


def test_the_title_says_what_was_done(run, page) -> None:
    entry = "{select: fc, hook: grad, action: clamp, max: 0.001}"
    found = page(run("train.epochs=1", "train.limit_batches=1", clip=entry))
    said = "train · mlp · grad clamp fc.weight, fc.bias · "
    title = re.search(r"<title>(.*) · hookrun</title>", found.source)[1]
    assert title.startswith(said)
    assert " train.epochs=1 " in title
    assert f"<h1>{title}</h1>" in found.source


def test_the_title_of_hostile_names_is_bounded(observed: Path, remade, tmp_path: Path) -> None:
    status = json.loads((observed / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps({"status": status["status"]}))
    plan = json.loads((observed / "plan.json").read_text())
    for hook in plan["hooks"]:
        hook["action"] = "</title><script>\x1b[2J" + 400 * "w"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = remade(tmp_path)
    title = re.search(r"<title>(.*) · hookrun</title>", found.source)[1]
    assert "&lt;script&gt;" in title
    assert "\x1b" not in found.source
    assert len(html.unescape(title)) <= 500
    assert found.tags.count("script") == 1


def test_every_record_begins_with_the_same_keys(observed: Path) -> None:
    records = hookrun.open_run(observed).stats
    assert {tuple(record)[: len(RECORD_KEYS)] for record in records} == {RECORD_KEYS}


def test_every_figure_has_a_caption_with_its_numbers(observed: Path, page) -> None:
    figures = re.findall(r"<figure.*?</figure>", page(observed).source, re.S)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(r'role="img"[^>]* aria-label="[^"]{20,}"', figure)
        assert "data-save=" in figure
        assert "<details><summary>the numbers" in figure
    accuracy = next(figure for figure in figures if "<span>accuracy</span>" in figure)
    last = hookrun.open_run(observed).metrics[-1]["accuracy"]
    assert "val: " in accuracy
    assert f'<td class="token">{last:.4g}</td>' in accuracy


def test_a_section_is_one_entry_of_the_list(copied_run: Path, remade, monkeypatch) -> None:
    """The page and its navigation name no section."""
    added = ReportSection("mine", "My section", lambda facts: [f"seed {facts.config['seed']}"], "notes.html")
    missing = ReportSection("none", "Nothing to say", lambda facts: None, "notes.html")
    monkeypatch.setattr("hookrun.report.pages.OF_A_RUN", (missing, *OF_A_RUN, added))
    found = remade(copied_run)
    assert '<a href="#mine">My section</a>' in found.source
    assert "<li>seed 0</li>" in found.source
    assert "Nothing to say" not in found.text
    hooks, mine, plan = map(found.source.index, ('id="hooks"', "<li>seed 0</li>", 'id="plan"'))
    assert hooks < mine < plan  # the last of the answers


def test_the_module_writes_pages_of_any_directory(copied_run: Path, tmp_path: Path, capsys) -> None:
    page = copied_run / "report.html"
    page.unlink()
    assert report_main([str(copied_run)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert page.is_file()
    assert report_main([str(tmp_path / "nowhere")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert report_main([str(tmp_path / "empty")]) == 2
    assert "holds no run" in capsys.readouterr().err


# ---- how runs end


def test_the_page_of_a_failed_run_says_why(run, page, capsys) -> None:
    path = run("model=mlp", "train.limit_batches=1", "train.optimizer.name=SparseAdam", code=1)
    assert f"report: {path}/report.html" in capsys.readouterr().out
    found = page(path)
    assert "It failed RuntimeError: SparseAdam does not support dense gradients" in found.text
    assert "Traceback (most recent call last)" in found.text


def test_the_page_of_a_run_that_was_cut_off_says_so(copied_run: Path, remade) -> None:
    change_status(copied_run, status="running", ended=None, exit_code=None, pid=ended_process())
    with (copied_run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "lo')  # a partly written line
    assert "cut off" in remade(copied_run).text


def test_a_run_that_is_still_running_has_a_page(tmp_path: Path, remade) -> None:
    status = {"status": "running", "reason": "", "started": "2026-01-01T00:00:00+00:00", "ended": None}
    (tmp_path / "status.json").write_text(json.dumps({**status, "pid": os.getpid(), "exit_code": None}))
    assert "The run is not finished" in remade(tmp_path).text


def test_a_page_that_cannot_be_written_does_not_fail_the_run(run, monkeypatch, capsys) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("cannot write report.html: No space left on device")

    monkeypatch.setattr("hookrun.report.pages.write_page", refuse)
    path = run("task=evaluate", "train.limit_batches=1")
    said = capsys.readouterr().err
    assert "report: not made: cannot write report.html: No space left on device" in said
    assert f"python -m hookrun.report {path}" in said
    assert hookrun.open_run(path).status["status"] == "done"


def test_a_refused_directory_keeps_the_page_it_has(observed: Path) -> None:
    before = (observed / "report.html").stat().st_mtime_ns
    assert main(["model=mlp", f"hydra.run.dir={observed}"]) == 2
    assert (observed / "report.html").stat().st_mtime_ns == before


# ---- damaged files


def test_an_empty_status_is_an_error_that_names_the_file(copied_run: Path, capsys) -> None:
    (copied_run / "status.json").write_text("[]")
    assert report_main([str(copied_run)]) == 1
    assert f"{copied_run}/status.json says no status" in capsys.readouterr().err


def test_damaged_files_leave_a_page_with_notes(copied_run: Path, remade) -> None:
    (copied_run / "plan.json").write_text("{")
    (copied_run / "model.json").unlink()
    shard = sorted((copied_run / "captures").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    metrics = (copied_run / "metrics.jsonl").read_text()
    (copied_run / "metrics.jsonl").write_text(metrics.replace('{"split": "val"', "{split", 1))
    text = remade(copied_run).text
    assert "the plan can't be read" in text
    assert "1 lines are not JSON" in text
    assert "Not drawn" in text
    assert "val accuracy" in text


def test_effects_that_do_not_fit_their_axes_are_a_note(copied_run: Path, remade) -> None:
    tensors = {"exact": torch.zeros(2), "exact_samples": torch.zeros(2, 3), "unedited": torch.tensor(0.0)}
    write_effects(copied_run, Effects(tensors, {"module": ["a", "b"]}, [0], {}))
    text = remade(copied_run).text
    assert "the effects can't be read: " in text
    assert "exact_samples has shape [2, 3]" in text


def test_a_plan_that_was_removed_after_the_run_is_missed(copied_run: Path, remade) -> None:
    (copied_run / "plan.json").unlink()
    assert "the plan can't be read: " in remade(copied_run).text
    with pytest.raises(StoreError, match=r"plan\.json is missing"):
        hookrun.open_run(copied_run).plan  # noqa: B018 - reading it raises


def test_records_of_another_shape_are_counted(copied_run: Path, remade) -> None:
    with (copied_run / "stats.jsonl").open("a") as file:
        file.write('[1, 2]\n{"hook": "norms"}\n{"hook": 3, "module": {}, "action": "stats"}\n')
    (copied_run / "hooks.json").write_text('{"sites": [3]}')
    text = remade(copied_run).text
    assert "stats.jsonl: 3 lines are not valid records" in text
    assert "the hooks' counts can't be read: " in text
    assert "hooks.json: found an int, expected a mapping" in text


@pytest.mark.parametrize(
    ("from_start", "note"),
    [(False, "1,000 lines: 86 of them, drawn at random, are shown"), (True, "only its first 2,000 bytes")],
)
def test_of_a_long_file_a_sample_or_the_beginning_is_read(tmp_path, from_start: bool, note: str) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "of": "epoch"} for step in range(1000)])
    size = (tmp_path / "metrics.jsonl").stat().st_size
    read = lines.sampled(tmp_path / "metrics.jsonl", MetricsLine, limit=2_000, from_start=from_start)
    steps = [record["step"] for record in read.records]
    assert steps == (list(range(len(steps))) if from_start else sorted(steps))
    assert abs(len(steps) / 1000 - 2_000 / size) < 0.05
    assert read.is_sample
    assert note in read.notes[0]


def test_long_lines_that_are_not_json_take_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    size = lines.MOST_LINE - 1
    with file.open("wb") as opened:
        for _ in range(24):
            opened.write(b"x" * size + b"\n")
    tracemalloc.start()
    try:
        found = lines.sampled(file, MetricsLine, always=lines.is_kept, limit=4 * lines.MOST_LINE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * lines.MOST_LINE
    assert found.records == []
    assert "24 lines are not JSON and left out" in found.notes[-1]


# ---- files of a stranger


def test_it_makes_no_network_request(observed: Path, page) -> None:
    found = page(observed)
    assert found.links
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert not re.search(r"@import|url\(|<link|\bsrc=[\"']?http", found.source)


def test_names_are_escaped(copied_run: Path, remade) -> None:
    for name in ("plan.json", "model.json", "hooks.json", "stats.jsonl", "status.json", "env.json"):
        file = copied_run / name
        text = file.read_text().replace("layers.1", r"<img src=x onerror=alert(1)>\u202e</script>\n&amp;")
        file.write_text(text.replace('"done"', r'"</b><script>alert(1)</script>"'))
    found = remade(copied_run)
    assert "<script>alert" not in found.source
    assert "onerror" not in found.links
    assert found.tags.count("script") == 1
    assert "\u202e" not in found.source
    assert "<img src=x onerror=alert(1)>" in found.text


# ---- tokens of samples


def test_a_decoder_after_an_encoder_has_other_tokens() -> None:
    def facts(*paths: str) -> RunData:
        modules = [{"path": path, "names": [path], "class": "Stack", "parameters": 0} for path in paths]
        return RunData(Path(), {}, model=ModelRecord.model_validate({"modules": modules}))

    both = facts("encoder", "decoder", "decoder.attn")
    assert both.reads_inputs("encoder.attn")
    assert not both.reads_inputs("decoder.attn")
    assert not both.reads_inputs("lm_head")
    assert facts("decoder", "decoder.attn").reads_inputs("decoder.attn")


def test_unknown_tokens_are_numbers() -> None:
    found = TokenSequence.of({"tokens": [5, 6], "padding": [3, 1], "targets": [6, None]}, {5: "a"})
    assert (found.before, found.width, found.targets, found.names) == (3, 6, (6, None), ["a", "#6"])


def test_targets_of_another_length_are_left_out() -> None:
    assert TokenSequence.of({"tokens": [5, 6], "targets": [6]}, {}).targets == (None, None)
    assert TokenSequence.of({"tokens": [5, 6]}, {}).width == 2
