"""Values of a file or of another run: one tensor or one row for each sample, their parts, differences and multiples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hookrun
from hookrun.engine import compile_plan, parse_spec
from hookrun.engine.actions.values import FileValue, RunValue
from hookrun.engine.values.index import parse_index
from hookrun.errors import HookrunError
from hookrun.run.experiment.run_values import (
    CaptureRows,
    PendingRun,
    computable,
    difference,
    digest_of,
    form,
    is_by_token,
    multiple,
    part,
    read_value,
)
from hookrun.run.experiment.run_values.runs import RunReferences
from hookrun.run.experiment.settings import Settings
from hookrun.store.captures.read import StoredCapture
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir

PLACES = {"fc": ("fc", "head")}


def value(run: Path | str, **keys: Any) -> RunValue:
    return RunValue.model_validate({"run": str(run), "capture": "seen", **keys})


def refused(asked: FileValue | RunValue, runs: RunReferences | None = None, places: Any = PLACES) -> str:
    with pytest.raises(HookrunError) as refusal:
        read_value(asked, places, runs or RunReferences())
    return str(refusal.value)


def test_the_mean_is_over_all_rows_in_float32(run: Path) -> None:
    found = read_value(value(run), PLACES, RunReferences())["fc"]
    assert isinstance(found, Tensor)
    assert found.tolist() == [12.0, 12.0]
    assert found.dtype is torch.float32


def test_a_sample_can_be_indexed_with_a_factor(run: Path) -> None:
    asked = value(
        run, sample=14, index="0", factor=0.5, minus={"run": str(run), "capture": "seen", "index": "0"}
    )
    found = read_value(asked, PLACES, RunReferences())["fc"]
    assert isinstance(found, Tensor)
    assert float(found) == (14 - 12) * 0.5


def test_rows_of_each_sample_are_those_of_the_split(run: Path, settings: Settings) -> None:
    rows = read_value(value(run, sample="same"), PLACES, RunReferences({}, settings, "val"))["fc"]
    assert rows.of(torch.tensor([10, 14]), torch.Generator()).tolist() == [[10, 10], [14, 14]]  # type: ignore[union-attr]
    for split, more in (("val", 0), ("train", 100)):
        asked = value(run, capture="splits", sample="same")
        rows = read_value(asked, PLACES, RunReferences({}, settings, split))["fc"]  # type: ignore[arg-type]
        assert rows.of(torch.tensor([10]), torch.Generator()).tolist() == [[10 + more] * 2]  # type: ignore[union-attr]
    assert "has other samples: its samples are of the split 'val', these of 'train'" in refused(
        value(run, sample="same"), RunReferences({}, settings, "train")
    )
    assert "set task.split" in refused(value(run, sample="same"), RunReferences({}, settings))


def test_a_module_is_found_under_any_of_its_names(run: Path) -> None:
    assert set(read_value(value(run), {"head": ("head", "fc")}, RunReferences())) == {"head"}
    message = refused(value(run), places={"fc": ("fc",), "a": ("a",), "b": ("b",)})
    assert message.startswith("a, b was not captured by 'seen'")
    assert "name one for all with `module`" in message
    named = read_value(value(run, module="fc"), {"a": ("a",), "b": ("b",)}, RunReferences())
    assert named["a"] is named["b"]


def test_captures_without_one_row_for_each_sample_are_refused(run: Path) -> None:
    assert "keeps whole firings" in refused(value(run, capture="firing", sample="same"))
    assert "has no row of sample 11" in refused(value(run, sample=11))
    assert "holds several tensors, name one with `path`" in refused(value(run, capture="both"))
    assert "is one tensor: leave `path` out" in refused(value(run, path="[0]"))
    assert (
        float(read_value(value(run, capture="both", path="[1]", index="0"), PLACES, RunReferences())["fc"])
        == 24
    )  # type: ignore[arg-type]
    assert "index 5 of the value, which has shape [2]" in refused(value(run, index="5"))
    shape = {"run": str(run), "capture": "seen", "index": "0"}
    assert "has shape [], " in refused(value(run, minus=shape))


def test_a_run_of_another_model_is_refused(run: Path, settings: Settings) -> None:
    other = settings.model_copy(update={"model": settings.model.model_copy(update={"name": "mlp"})})
    message = refused(value(run), RunReferences({}, other))
    assert "is of another model: model.name is 'cnn' there and 'mlp' here" in message


def test_a_run_that_runs_first_is_not_read_yet(run: Path) -> None:
    runs = RunReferences({"base": None})
    for asked in (value("base"), value(run, minus={"run": "base", "capture": "seen"})):
        assert isinstance(read_value(asked, PLACES, runs)["fc"], PendingRun)


def test_a_capture_without_rows_is_refused(tmp_path: Path) -> None:
    empty = RunDir.create(tmp_path / "empty")
    empty.set_status("done")
    assert "seen" in refused(value(tmp_path / "empty"))


def test_a_tensor_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def file(**keys: Any) -> FileValue:
        return FileValue.model_validate({"file": str(path), **keys})

    assert "there is no file" in refused(file())
    assert "File name too long" in refused(FileValue(file="x" * 300))
    save_file({"one": torch.ones(2)}, path)
    assert read_value(file(), PLACES, RunReferences())["fc"].tolist() == [1, 1]  # type: ignore[union-attr]
    save_file({"one": torch.ones(2), "two": torch.zeros(2)}, path)
    assert "holds 2 tensors: name one with `key`" in refused(file())
    assert "has no tensor 'tow': did you mean 'two'" in refused(file(key="tow"))
    path.write_bytes(b"x")
    assert "is not a whole safetensors file" in refused(file())


GENERATOR = torch.Generator()


@pytest.fixture
def rows(run: Path) -> CaptureRows:
    capture = open_run(run).captures["seen"]["fc"]
    return CaptureRows(capture, "seen/fc", torch.tensor([2, 0, 1]), resample=False)


def ids(*samples: int) -> torch.Tensor:
    return torch.tensor(samples)


def test_a_sample_without_a_row_is_an_error_that_names_it(rows: CaptureRows) -> None:
    assert rows.lacking(ids(9, 10, 11, 99)).startswith(
        "seen/fc has no row of sample 9, 11, 99: it has 3 samples"
    )
    assert not rows.lacking(ids(10, 14))
    assert rows.of(ids(12, 14, 10, 12), GENERATOR)[:, 0].tolist() == [12, 14, 10, 12]
    with pytest.raises(HookrunError, match="seen/fc has no row of sample 11: it has 3 samples from 10 to 14"):
        rows.of(ids(10, 11), GENERATOR)


def test_resampled_rows_are_always_of_another_sample(run: Path) -> None:
    capture = open_run(run).captures["seen"]["fc"]
    drawn = CaptureRows(capture, "seen/fc", torch.arange(3), resample=True)
    asked = ids(*[10, 12, 14] * 50)
    found = drawn.of(asked, torch.Generator().manual_seed(0))[:, 0].long()
    assert set(found.tolist()) == {10, 12, 14}
    assert not (found == asked).any()
    assert drawn.draws
    assert not drawn.lacking(ids(99))
    again = drawn.of(asked, torch.Generator().manual_seed(0))[:, 0].long()
    assert torch.equal(found, again)


def test_a_multiple_of_rows_equals_that_of_tensors(rows: CaptureRows) -> None:
    tensor = torch.tensor([1.0, 2.0])
    samples = ids(14, 10)
    plain = rows.of(samples, GENERATOR).float()
    for changed, expected in (
        (part(rows, parse_index("[1]").items), plain[:, [1]]),
        (difference(rows, tensor), plain - tensor),
        (difference(tensor, rows), tensor - plain),
        (multiple(rows, -2.0), plain * -2.0),
        (multiple(difference(rows, tensor), 3.0), (plain - tensor) * 3),
    ):
        assert not isinstance(changed, torch.Tensor)
        found = changed.of(samples, GENERATOR)
        assert torch.equal(found, expected)
        assert changed.shape == tuple(expected.shape[1:])
        assert "has no row of sample 11: " in changed.lacking(ids(11, 10))
        assert not changed.lacking(samples)
    assert torch.equal(difference(tensor, tensor * 2), -tensor)  # type: ignore[arg-type]


def test_small_dtypes_are_computed_in_float32() -> None:
    assert computable(torch.ones(1, dtype=torch.bfloat16)).dtype is torch.float32
    assert computable(torch.ones(1, dtype=torch.float64)).dtype is torch.float64
    assert multiple(torch.ones(1, dtype=torch.float16), 2).dtype is torch.float32  # type: ignore[union-attr]


def test_hashes_follow_the_content(rows: CaptureRows) -> None:
    ones = torch.ones(2, 2)
    sources = [
        ones, ones * 2, ones.reshape(4), ones.double(), rows, multiple(rows, 2), multiple(rows, 3),
        difference(rows, ones[0]), difference(ones[0], rows), PendingRun("a"), PendingRun("b"),
    ]  # fmt: skip
    assert len({digest_of(source) for source in sources}) == len(sources)
    assert digest_of(ones) == digest_of(torch.ones(2, 4)[:, :2])


def test_bytes_are_shown_as_text(rows: CaptureRows) -> None:
    assert form(torch.ones(2, 3)) == ("[2, 3]", 24)
    assert form(rows) == ("[2]", 4)
    assert form(PendingRun("a")) == ("not known yet", 0)


def test_a_row_with_a_position_belongs_to_a_token() -> None:
    found = [
        is_by_token(cast(StoredCapture, SimpleNamespace(positions=torch.tensor(positions))))
        for positions in ([-1, -1], [-1, 0], [2, 3])
    ]
    assert found == [False, True, True]


def hooked_by_file(path: Path, factor: Any = 1) -> dict[str, Any]:
    value = {"file": str(path), "factor": factor}
    return {"h": {"select": "0", "hook": "forward", "action": "add_bias", "value": value}}


def test_the_hash_of_a_plan_follows_the_content_of_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    hashes = set[str]()
    for number in (1.0, 2.0):
        save_file({"k": torch.full((2,), number)}, path)
        hashes.add(hookrun.compile(hooked_by_file(path), nn.Sequential(nn.Linear(2, 2))).hash)
    assert len(hashes) == 2


def test_a_missing_file_is_a_problem_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(hookrun.CompileError, match="there is no file") as refusal:
        hookrun.compile(hooked_by_file(tmp_path / "none.safetensors"), nn.Sequential(nn.Linear(2, 2)))
    assert [problem.where for problem in refusal.value.errors] == ["hooks.h.value"]


def test_a_number_of_the_clock_multiplies_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    vector = torch.tensor([1.0, -2.0])
    save_file({"v": vector}, path)
    model = nn.Sequential(nn.Identity())
    plan = hookrun.compile(hooked_by_file(path, {"from": 0.5, "to": -2, "steps": [1, 5]}), model)
    with plan.install(model) as hooks:
        for factor in (0.5, 0.5, -0.125, -0.75, -1.375, -2.0, -2.0):
            torch.testing.assert_close(model(torch.ones(3, 2)), 1 + vector.expand(3, 2) * factor)
            hooks.step()


def test_the_engine_alone_says_who_reads_files(tmp_path: Path) -> None:
    spec = parse_spec(hooked_by_file(tmp_path / "v.safetensors"))
    with pytest.raises(hookrun.CompileError, match=r"is read by hookrun\.compile"):
        compile_plan(spec, nn.Sequential(nn.Identity()))
