"""The content of a run directory for its page, with any of its files damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

from hookrun.report import write_report
from hookrun.report.facts import Facts
from hookrun.store.records import ModelRecord


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
