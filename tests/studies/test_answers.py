"""What the page of a run shows first, as data: `answer_of` of each study, and of a run without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from report_pages import write_lines
from safetensors.torch import save_file

from hookrun.errors import HookrunError
from hookrun.store.reader import open_run
from hookrun.store.studies import answer_of
from hookrun.studies.effects.records import Effects, write_effects


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a run that is done."""
    (tmp_path / "status.json").write_text(json.dumps({"status": "done"}))
    return tmp_path


def answer(folder: Path) -> Any:
    return answer_of(open_run(folder))


def test_a_run_without_results_has_no_answer(folder: Path) -> None:
    assert answer(folder) is None


def test_means_of_a_pass_go_before_single_batches(folder: Path) -> None:
    lines = [
        {"split": "train", "of": "epoch", "epoch": 0, "step": 3, "loss": 2.0},
        {"split": "val", "of": "epoch", "epoch": 0, "step": 3, "loss": 1.5},
        {"split": "train", "of": "batch", "epoch": 1, "step": 4, "loss": 9.0, "lr": 0.1},
        {"split": "val", "of": "epoch", "epoch": 1, "step": 6, "loss": 1.0},
    ]
    write_lines(folder / "metrics.jsonl", lines)
    assert answer(folder) == {"what": "metrics", "metrics": {"train/loss": 2.0, "val/loss": 1.0}}


def test_ties_of_the_largest_effect_are_counted(folder: Path) -> None:
    exact = torch.tensor([[0.5, 0.25], [0.75, 0.5]], dtype=torch.float64)
    tensors = {"exact": exact, "unedited": torch.tensor(0.5)}
    axes = {"module": ["fc", "conv"], "heads": [0, 3]}
    write_effects(folder, Effects(tensors, axes, range(4), {"hook": "cut", "metric": "loss"}))
    assert answer(folder) == {
        "what": "largest_effect",
        "hook": "cut",
        "metric": "loss",
        "site": {"module": "fc", "heads": 3},
        "value": 0.25,
        "unedited": 0.5,
        "change": -0.25,
        "ties": 1,
    }


def test_the_first_difference_names_its_place(folder: Path) -> None:
    first = {"module": "fc", "sample": 3, "token": None}
    record = {"run": "a", "other": "b", "first": first, "reasons": ["first: fc, sample 3"]}
    (folder / "compare.json").write_text(json.dumps(record))
    assert answer(folder) == {"what": "first_difference", "first": first, "reasons": ["first: fc, sample 3"]}


def test_probes_answer_with_the_accuracy_by_layer(folder: Path) -> None:
    about = {"split": "probe", "features": 4, "samples": 8, "train_accuracy": 1.0, "control": 0.5}
    lines = [
        {**about, "module": "conv", "accuracy": 0.5, "majority": 0.25},
        {**about, "module": "fc", "accuracy": 0.75, "majority": 0.25},
    ]
    write_lines(folder / "metrics.jsonl", lines)
    found = answer(folder)
    assert found["what"] == "accuracy_by_layer"
    assert [(layer["module"], layer["accuracy"]) for layer in found["layers"]] == [
        ("conv", 0.5),
        ("fc", 0.75),
    ]


def test_similarities_leave_out_a_module_with_itself(folder: Path) -> None:
    lines = [
        {"split": "similarity", "module": one, "other": other, "cka": 1.0 if one == other else 0.25}
        for one in ("conv", "fc")
        for other in ("conv", "fc")
    ]
    write_lines(folder / "metrics.jsonl", lines)
    pairs = [{"module": "conv", "other": "fc", "cka": 0.25}, {"module": "fc", "other": "conv", "cka": 0.25}]
    assert answer(folder) == {"what": "similarity", "pairs": pairs}


def test_a_lens_answers_at_the_last_position_of_a_sample(folder: Path) -> None:
    lines = [
        {
            "split": "val", "sample": sample, "part": f"blocks.{layer}", "kind": "residual", "layer": layer,
            "position": position, "token": 1, "text": "a", "top": [[10 * layer + position, "b", 0.5]],
        }
        for sample in (4, 5)
        for layer in (0, 1)
        for position in (0, 1, 2)
    ]  # fmt: skip
    write_lines(folder / "lens.jsonl", lines)
    found = answer(folder)
    assert (found["what"], found["sample"], found["position"]) == ("top_tokens", 4, 2)
    assert [(row["layer"], row["top"]) for row in found["layers"]] == [
        (0, [[2, "b", 0.5]]),
        (1, [[12, "b", 0.5]]),
    ]


def test_the_most_changed_continuation_comes_first(folder: Path) -> None:
    about = {"split": "val", "prompt_ids": [1], "reason": "end", "next": [], "reason_without": "end"}
    lines = [
        {**about, "sample": 0, "prompt": "a", "text": "b", "ids": [2], "ids_without": [2], "kl_first": 0.0},
        {**about, "sample": 1, "prompt": "c", "text": "d", "ids": [3], "ids_without": [4], "kl_first": 0.5},
    ]
    write_lines(folder / "generations.jsonl", lines)
    found = answer(folder)
    assert (found["what"], found["changed"]) == ("continuations", 1)
    assert [row["prompt"] for row in found["continuations"]] == ["c", "a"]


def test_an_attribution_is_placed_as_the_page_draws_it(folder: Path) -> None:
    pictures = torch.zeros(2, 3, 4, 5)
    pictures[0, :, 2, 1] = -1.0  # over its channels the largest
    pictures[0, 0, 0, 0] = 2.0
    pictures[1, 1, 3, 4] = float("nan")
    pictures[1, 1, 1, 0] = 0.5
    tensors = {"attributions": pictures, "sample_ids": torch.tensor([7, 9])}
    save_file(tensors, folder / "attributions.safetensors", {"split": "val", "method": "grad_cam"})
    assert answer(folder) == {
        "what": "strongest_attribution",
        "samples": [
            {"input": "attributions", "split": "val", "sample": 7, "place": [2, 1], "value": -3.0},
            {"input": "attributions", "split": "val", "sample": 9, "place": [1, 0], "value": 0.5},
        ],
    }


def test_attributions_without_their_samples_are_an_error(folder: Path) -> None:
    save_file({"attributions": torch.zeros(2, 4)}, folder / "attributions.safetensors")
    with pytest.raises(HookrunError, match="does not have a row for each sample"):
        answer(folder)
