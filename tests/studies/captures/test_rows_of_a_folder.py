"""Files that another program wrote are probed and compared as captures are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hookrun.errors import SpecError

ROWS = 'task.rows={pattern: "*.safetensors", key: "layers.*", each_file: tokens}'


@pytest.fixture
def requests() -> Path:
    """A file for each of 24 requests, whose first layer tells whether its number is even."""
    Path("acts").mkdir()
    draw = torch.Generator().manual_seed(0)
    labels = ["file,parity"]
    for number in range(24):
        told = torch.randn(3, 4, generator=draw) + 5 * (number % 2)
        noise = torch.randn(3, 4, generator=draw)
        save_file({"layers.0": told, "layers.1": noise}, f"acts/{number}.safetensors")
        labels.append(f"{number}.safetensors,{number % 2}")
    Path("labels.csv").write_text("\n".join(labels))
    return Path("acts")


def test_a_folder_is_probed_for_labels_of_its_files(executed: Any, requests: Path) -> None:
    labels = "task.labels={file: labels.csv, column: parity}"
    probe = executed("task=probe", f"task.run={requests}", ROWS, labels)
    told, noise = probe.metrics
    assert (told["module"], told["samples"], told["rows"]) == ("layers.0", 24, 72)
    assert told["accuracy"] == 1.0
    assert noise["accuracy"] < 0.9
    assert probe.env["runs"][0]["path"] == str(requests.resolve())


def test_a_folder_without_labels_is_not_probed(executed: Any, requests: Path) -> None:
    with pytest.raises(SpecError, match=r"have no labels to probe for\s+name a file .*task\.labels="):
        executed("task=probe", f"task.run={requests}", ROWS)


def test_a_folder_equals_itself(executed: Any, requests: Path) -> None:
    save = Path("other")
    save.mkdir()
    for path in requests.iterdir():
        save.joinpath(path.name).write_bytes(path.read_bytes())
    compared = executed("task=compare", f"task.run={requests}", f"task.other={save}", ROWS)
    csv = (compared.path / "compare.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in csv[1:]] == [["acts", "layers.0"], ["acts", "layers.1"]]
    assert '"first": null' in (compared.path / "compare.json").read_text()


def test_several_rows_of_a_sample_are_not_similar(executed: Any, requests: Path) -> None:
    with pytest.raises(SpecError, match=r"task\.rows\.each_file: .*\s+say each_file: samples"):
        executed("task=similarity", f"task.run={requests}", ROWS)
    similar = executed("task=similarity", f"task.run={requests}", ROWS, "task.rows.each_file=samples")
    assert [line["module"] for line in similar.metrics[:2]] == ["layers.0", "layers.0"]
    assert similar.metrics[0]["cka"] == pytest.approx(1)


def test_rows_of_a_run_are_not_chosen_again(executed: Any) -> None:
    run = executed(
        "task=predict", "+hooks.seen={select: fc, hook: forward, action: capture}", "train.limit_batches=1"
    )
    with pytest.raises(SpecError, match="is a run, which has captures of its own"):
        executed("task=similarity", f"task.run={run.path}", ROWS)
