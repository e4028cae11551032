"""The content of a run directory for its page, with any of its files damaged."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

from hookrun.report import lines, write_report
from hookrun.report.facts import Facts, TokenSequence
from hookrun.store.records import MetricsLine, ModelRecord


def test_a_decoder_after_an_encoder_has_other_tokens() -> None:
    modules = [
        {"path": path, "names": [path], "class": "Stack", "parameters": 0}
        for path in ("encoder", "decoder", "decoder.attn")
    ]
    facts = Facts(Path(), {}, model=ModelRecord.model_validate({"modules": modules}))
    assert facts.reads_inputs("encoder.attn") and not facts.reads_inputs("decoder.attn")
    assert not facts.reads_inputs("lm_head")
    assert Facts(Path(), {}, model=ModelRecord.model_validate({"modules": modules[1:]})).reads_inputs(
        "decoder.attn"
    )


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


def test_records_of_another_shape_are_left_out_and_counted(observed: Path, tmp_path: Path, page) -> None:
    path = tmp_path / "run"
    shutil.copytree(observed, path)
    with (path / "stats.jsonl").open("a") as file:
        file.write('[1, 2]\n{"hook": "norms"}\n{"hook": 3, "module": {}, "action": "stats"}\n')
    (path / "hooks.json").write_text('{"sites": [3]}')
    write_report(path)
    text = page(path).text
    assert "stats.jsonl: 3 lines are not valid records" in text
    assert "the hooks' counts can't be read: " in text
    assert "hooks.json: found an int, expected a mapping" in text


def test_padding_is_cut_off_and_unknown_tokens_are_numbers() -> None:
    found = TokenSequence.of({"tokens": [5, 6], "padding": [3, 1], "targets": [6, None]}, {5: "a"})
    assert (found.before, found.width, found.targets, found.names) == (3, 6, (6, None), ["a", "#6"])


def test_targets_of_another_length_are_left_out() -> None:
    assert TokenSequence.of({"tokens": [5, 6], "targets": [6]}, {}).targets == (None, None)
    assert TokenSequence.of({"tokens": [5, 6]}, {}).width == 2


def test_many_long_lines_that_are_not_json_take_the_memory_of_a_few(tmp_path: Path) -> None:
    file, size = tmp_path / "metrics.jsonl", lines.MOST_LINE - 1
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
    assert found.records == [] and "24 lines are not JSON and left out" in found.notes[-1]
