"""The page shows the samples of the units with the largest values: with the place, or the token, marked."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hookrun.engine.values.folding import Folding, SeenRows, Wanted, keys_of
from hookrun.report import write_report
from hookrun.report.facts import RunData, read_facts
from hookrun.report.sections.folds import build
from hookrun.store.folds import write_folds
from hookrun.store.run_dir import RunDir


def made(folder: Path, *, tokens: bool = False) -> RunData:
    """A run with a fold of 15 units at maps of 2 × 4 places, or at tokens: sample 7 has 99 at place 6 in unit 4."""
    run = RunDir.create(folder)
    run.set_status("running")
    values = torch.rand(3, 15, 8)
    values[2, 4, 6] = 99
    samples = torch.tensor([5, 6, 7])
    positions = None
    if tokens:
        values = values.movedim(2, 1).flatten(0, 1)[:, :, None]
        positions = torch.arange(8).repeat(3)
        samples = samples.repeat_interleave(8)
    folding = Folding(Wanted(top=2))
    folding.add(SeenRows(values, keys_of(samples, "val"), positions), [15], [] if tokens else [2, 4])
    fold = folding.result()
    assert fold is not None
    write_folds(run.path, {"<b>": {"relu": fold}})
    line = {"split": "val", "sample": 7, "file": ""}
    picture = {"split": "val", "sample": 7, "png": "iVBORw0KGgo="}
    if tokens:
        line |= {"tokens": list(range(8)), "padding": [0, 0], "targets": [None] * 8}
    (run.path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    (run.path / "pictures.jsonl").write_text("" if tokens else json.dumps(picture) + "\n")
    (run.path / "tokens.jsonl").write_text(json.dumps({"token": 6, "text": "<i>six"}) + "\n")
    run.set_status("failed", "an error")
    return read_facts(run.path)


def test_the_place_of_the_largest_value_is_marked(tmp_path: Path) -> None:
    data = build(made(tmp_path / "run"))
    assert data is not None
    (module,) = data["modules"]
    assert module["title"] == "<b> at relu"
    first = module["units"][0]
    assert first["name"] == "unit 4"
    assert [first["cells"][0][key] for key in ("sample", "value", "mark")] == [
        "val 7",
        99.0,
        (50.0, 50.0, 25.0, 50.0),
    ]
    assert first["cells"][0]["picture"].startswith("data:image/png;base64,iVBOR")
    assert len(module["units"]) == 12
    assert len(module["rest"]) == 3


def test_the_token_of_the_largest_value_is_marked(tmp_path: Path) -> None:
    data = build(made(tmp_path / "run", tokens=True))
    assert data is not None
    cell = data["modules"][0]["units"][0]["cells"][0]
    assert [text for text, is_marked in cell["tokens"] if is_marked] == ["<i>six"]
    assert len(cell["tokens"]) == 8


def test_names_and_texts_are_escaped_on_the_page(tmp_path: Path) -> None:
    facts = made(tmp_path / "run", tokens=True)
    page = write_report(facts.path).read_text()
    assert "<mark>&lt;i&gt;six</mark>" in page
    assert "&lt;b&gt; at relu" in page
    assert "<b> at" not in page
