"""`task=folds`: captured rows are folded as the action `fold` folds those that it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hookrun
from hookrun.engine.values.folded import Folded
from hookrun.errors import SpecError

OF = [{"top": 3}, "mean", "cov", {"quantiles": [0.1, 0.5]}]
ASKED = "task.of=[{top: 3}, mean, cov, {quantiles: [0.1, 0.5]}]"


def rows_of(key: str, each_file: str = "samples") -> str:
    return f'task.rows={{pattern: "*.safetensors", key: "{key}", each_file: {each_file}}}'


def assert_same(fold: Folded, other: Folded) -> None:
    """All is equal but the last bits of covariances, which follow from how many rows are added at a time."""
    assert (fold.labels, fold.places) == (other.labels, other.places)
    assert fold.tensors.keys() == other.tensors.keys()
    for name in fold.tensors:
        if name == "cov":
            torch.testing.assert_close(fold.cov, other.cov, rtol=1e-13, atol=1e-13)
        else:
            assert torch.equal(fold.tensors[name], other.tensors[name]), name


def by_action(rows: Tensor) -> Folded:
    """What the action accumulates of one batch."""
    model = nn.Sequential(nn.Identity())
    hook = {"select": "0", "hook": "forward", "action": "fold", "of": OF}
    with hookrun.hooked(model, {"h": hook}) as hooks:
        model(rows)
        return hooks.folds["h"]["0"]


@pytest.fixture
def folder() -> Path:
    """Two files of an engine, with 3 and 5 rows of each tensor."""
    Path("acts").mkdir()
    draw = torch.Generator().manual_seed(0)
    for number, count in enumerate((3, 5)):
        vectors = torch.randn(count, 4, generator=draw)
        maps = torch.randn(count, 2, 3, generator=draw)
        ids = torch.arange(count)[:, None]
        tensors = {"vectors": vectors, "half": vectors.bfloat16(), "maps": maps, "ids": ids}
        save_file(tensors, f"acts/{number}.safetensors")
    return Path("acts")


def test_rows_of_a_folder_fold_as_by_the_action(executed: Any, folder: Path) -> None:
    run = executed("task=folds", f"task.run={folder}", rows_of("{vectors,half}"), ASKED)
    for name in ("vectors", "half"):
        rows = torch.cat([load_file(folder / f"{number}.safetensors")[name] for number in range(2)])
        fold = run.folds["acts"][name]
        assert_same(fold, by_action(rows))
        torch.testing.assert_close(fold.cov, torch.cov(rows.double().T))


def test_tokens_of_a_file_have_their_positions(executed: Any, folder: Path) -> None:
    tokens = rows_of("vectors", "tokens")
    run = executed("task=folds", f"task.run={folder}", tokens, "task.of=[{top: 2}]")
    top = run.folds["acts"]["vectors"].top
    for sample in range(2):
        rows = load_file(folder / f"{sample}.safetensors")["vectors"]
        of_sample = top.samples == sample
        assert torch.equal(top.positions[of_sample], rows.argmax(0))
        assert torch.equal(top.values[of_sample], rows.amax(0))


def test_a_capture_folds_as_beside_it_in_the_run(executed: Any) -> None:
    captured = executed(
        "task=predict",
        "train.limit_batches=2",
        "+hooks.seen={select: relu1, hook: forward, action: capture}",
        f"+hooks.beside={{select: relu1, hook: forward, action: fold, by: label, {ASKED[5:].replace('=', ': ')}}}",
    )
    fold = executed("task=folds", f"task.run={captured.path}", "task.dim=1", "task.by=label", ASKED)
    assert_same(fold.folds["seen"]["relu1"], captured.folds["beside"]["relu1"])


@pytest.mark.parametrize(
    ("key", "override", "says"),
    [
        ("maps", "task.per=channel", r"of a capture \[rows, 2, 3\] may be 1 or 2"),
        ("vectors", "task.dim=2", r"of a capture \[rows, 4\] may be 1$"),
        ("ids", "task.dim=1", r"1 rows of int64 \[1\]> has no floating-point numbers"),
        ("vectors", "task.by=label", r"task\.by: .* do not belong to a sample of the data"),
        ("vectors", "task.of=[cov, mean, cov]", "`of` names the same twice"),
        ("vectors", "task.of=[meen]", "did you mean 'mean'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(
    executed: Any, folder: Path, key: str, override: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        executed("task=folds", f"task.run={folder}", rows_of(key), override)
