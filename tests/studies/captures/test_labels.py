"""The labels of probed rows: targets at a row's position, answers, columns of a file; what a probe says beside them."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import normal
from rich.console import Console
from safetensors import safe_open

from hookrun.errors import HookrunError, SpecError
from hookrun.run.tasks.captured.features import Features
from hookrun.run.tasks.captured.input import show_table
from hookrun.studies.captures.probing import fit, labels_of_data, labels_of_file, wilson

PROMPTS = [("ab", "x"), ("abcd", "y"), ("abc", "x"), ("a", "y")] * 5


def prompts(shared: Any, *more: str, tokens: str = "tokens: all, ") -> Any:
    """A run of a tiny decoder on prompts of different lengths that captured at their tokens.

    The tests share it; its data is read again from the folder of each test.
    """
    lines = [f'{{"prompt": "{text}", "answer": "{answer}"}}' for text, answer in PROMPTS]
    Path("prompts.jsonl").write_text("\n".join(lines))
    model = ("model=decoder", "model.args={layers: 1, heads: 1, width: 8, length: 8}")
    hook = f"+hooks.seen={{select: blocks.0, hook: forward, {tokens}action: capture}}"
    return shared(*model, "data=prompts", "data.args.file=prompts.jsonl", "task=predict", hook, *more)


@pytest.mark.parametrize("padding", [[], ["data.args.padding=left"]])
def test_a_row_of_a_token_has_the_target_at_its_position(shared: Any, padding: list[str]) -> None:
    found = prompts(shared, *padding)
    rows = found.captures["seen"]["blocks.0"]
    expected = list[int]()
    for text, answer in PROMPTS:
        expected += [-100] * (len(text) - 1)
        expected.append(ord(answer))
    assert labels_of_data(found, rows, answer=False).values.tolist() == expected
    answers = [ord(answer) for text, answer in PROMPTS for _ in text]
    assert labels_of_data(found, rows, answer=True).values.tolist() == answers


def test_a_probe_of_tokens_leaves_out_rows_without_a_label(executed: Any, shared: Any, capsys: Any) -> None:
    found = prompts(shared)
    (line,) = executed("task=probe", f"task.run={found.path}").metrics
    assert (line["samples"], line["rows"]) == (20, 20), "only the last token has a target"
    low, high = wilson(line["accuracy"], 5)
    assert (line["accuracy_low"], line["accuracy_high"]) == pytest.approx((low, high))
    assert low <= line["accuracy"] <= high
    assert 0 <= line["control"] <= 1
    assert line["majority"] == pytest.approx(0.5, abs=0.11)
    (every,) = executed("task=probe", f"task.run={found.path}", "task.labels=answer").metrics
    assert every["samples"] == 20
    assert every["rows"] == 50
    assert "control" in capsys.readouterr().out


def test_a_row_of_a_whole_sequence_has_the_answer(shared: Any) -> None:
    found = prompts(shared, tokens="")
    rows = found.captures["seen"]["blocks.0"]
    assert labels_of_data(found, rows, answer=False).values.tolist() == [ord(answer) for _, answer in PROMPTS]


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("mood", "{mood}"),
        ("sample,mood", "{number},{mood}"),
        ("split,sample,note,mood", 'val,{number},"a, b",{mood}'),
        ("mood,file", "{mood},prompts.jsonl:{line}"),
    ],
)
def test_labels_of_a_file_go_to_the_samples_that_it_names(shared: Any, header: str, line: str) -> None:
    found = prompts(shared)
    moods = ("bad", "good", '""')  # csv.reader skips lines that are empty
    lines = [line.format(mood=moods[n % 3], number=n, line=n + 1) for n in range(len(PROMPTS))]
    Path("labels.csv").write_text("\n".join([header, *(lines if header == "mood" else lines[::-1])]) + "\n")
    rows = found.captures["seen"]["blocks.0"]
    labels = labels_of_file("labels.csv", "mood", rows)
    assert labels.names == ["bad", "good"]
    assert labels.values.tolist() == [(0, 1, -100)[n % 3] for n in rows.sample_ids.tolist()]


def test_a_probe_of_named_classes_leaves_out_samples_without_one(executed: Any, shared: Any) -> None:
    found = prompts(shared)
    Path("labels.csv").write_text(
        "sample,mood\n" + "".join(f"{n},{('bad', 'good', '')[n % 3]}\n" for n in range(20))
    )
    probe = executed("task=probe", f"task.run={found.path}", "task.labels={file: labels.csv, column: mood}")
    assert [line["samples"] for line in probe.metrics] == [14]
    with safe_open(probe.path / "probes.safetensors", "pt") as file:
        assert file.metadata() == {"classes": '["bad", "good"]'}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sample,mood\n0,a\n", "has no line for 19 of 20: the first is sample 1"),
        ("sample,mode\n0,a\n", "has no column 'mood'"),
        (
            "mood\na\nb\n",
            "has 2 lines and no column `sample` or `file`, and the capture has 20 samples of val",
        ),
        ("sample,mood\n0\n", "record 2 does not have 2 cells"),
        ("sample,mood\n0,a\n0,b\n", "several lines for the same sample"),
        ("", "has no column 'mood'"),
    ],
)
def test_a_file_of_labels_that_leaves_a_doubt_is_refused(shared: Any, text: str, said: str) -> None:
    rows = prompts(shared).captures["seen"]["blocks.0"]
    Path("labels.csv").write_text(text)
    with pytest.raises(SpecError, match=said):
        labels_of_file("labels.csv", "mood", rows)


def test_numbers_of_a_file_are_classes_if_they_are_whole(shared: Any) -> None:
    rows = prompts(shared, tokens="").captures["seen"]["blocks.0"]
    for value, dtype in (("3", torch.int64), ("0.5", torch.float32)):
        Path("labels.csv").write_text("mood\n" + "\n".join(["1"] * 19 + [value]))
        assert labels_of_file("labels.csv", "mood", rows).values.dtype == dtype


def test_rows_of_a_sample_are_never_in_both_parts() -> None:
    samples = torch.arange(40).repeat_interleave(5)
    x = normal(40, 60)[samples]
    labels = (torch.arange(40) % 2)[samples]  # a probe could know each sample
    line, _ = fit(Features("x", x, block_bytes=2**20), labels, samples, seed=0)
    assert line["train_accuracy"] == 1
    assert line["samples"] == 40
    assert line["rows"] == 200
    assert line["accuracy"] < 0.9
    assert (line["accuracy_low"], line["accuracy_high"]) == wilson(line["accuracy"], 10)


def test_a_frame_has_a_line_for_each_row(shared: Any) -> None:
    pandas = pytest.importorskip("pandas")
    rows = prompts(shared).captures["seen"]["blocks.0"]
    frame = rows.frame()
    assert list(frame) == ["sample", "split", "file", "class", "position", "text", "vector"]
    assert set(frame["split"]) == {"val"} == set(rows.splits)
    assert frame["text"].tolist()[:6] == list("ababcd")
    assert frame["file"][2] == "prompts.jsonl:2"
    assert frame["position"].tolist()[:6] == [0, 1, 0, 1, 2, 3]
    assert torch.equal(torch.stack([*map(torch.from_numpy, frame["vector"])]), rows[:])
    whole = prompts(shared, tokens="").captures["seen"]["blocks.0"].frame()
    assert pandas.isna(whole["position"]).all()
    assert whole["vector"][0].shape == (4, 8)


def test_a_missing_table_is_told_with_those_there_are(shared: Any) -> None:
    with pytest.raises(HookrunError, match="no table 'wrong'; there are: metrics, stats, faults, samples"):
        prompts(shared).table("wrong")


def test_numbers_on_80_columns_are_never_cut() -> None:
    console = Console(file=StringIO(), width=80)
    names = [f"transformer.encoder.blocks.{n}.attention.output" for n in range(5)]
    show_table(console, ["module", "train", "test", *"abcd"], [[name, *["0.123"] * 6] for name in names])
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    for number in range(5):
        (line,) = (line for line in lines if f"{number}.attention.output" in line)
        assert line.split()[1:] == ["0.123"] * 6


def test_many_classes_with_few_rows_are_probed_without_a_warning() -> None:
    labels = torch.tensor([0, *range(39)])
    line, _ = fit(Features("x", normal(40, 3), block_bytes=2**20), labels, torch.arange(40), seed=0)
    assert line["accuracy"] <= 0.2
    assert line["accuracy_low"] == 0
