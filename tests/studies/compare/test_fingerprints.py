"""Two runs that kept fingerprints of rows: the same first difference as NumPy finds on the rows themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import normal
from run_files import written
from torch import Tensor, nn

import hookrun
from hookrun.engine.values.fingerprints import fingerprints
from hookrun.errors import SpecError
from hookrun.store.reader import Run

TOLERANCE = 1e-5
K = 64


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))


def outputs(model: nn.Sequential, *batches: Tensor) -> list[dict[str, Tensor]]:
    """What each layer returns for each batch."""
    found = list[dict[str, Tensor]]()
    for x in batches:
        found.append({})
        for name, layer in model.named_children():
            x = layer(x)
            found[-1][name] = x
    return found


def kept(path: Path, batches: list[dict[str, Tensor]], reduce: Mapping[str, Any] | None) -> Run:
    """A run whose hook kept the rows, or a number of projections of them."""
    if reduce is not None and "fingerprint" in reduce:
        count = reduce["fingerprint"]
        batches = [{name: fingerprints(x, count) for name, x in batch.items()} for batch in batches]
    run = written(path, *batches)
    hook = {"name": "seen", "params": {"reduce": reduce}}
    (path / "plan.json").write_text(json.dumps({"hooks": [hook]}))
    return run


def first_of_numpy(rows: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Any] | None:
    for name in rows:
        left, right = rows[name].numpy(), others[name].numpy()
        apart = np.linalg.norm(left - right, axis=1) > TOLERANCE * np.linalg.norm(left, axis=1)
        if apart.any():
            return {"module": name, "sample": int(apart.argmax()), "token": None}
    return None


@torch.no_grad()
def test_the_first_of_100_changes_is_that_of_numpy(tmp_path: Path) -> None:
    model = layers()
    x = normal(6, 12)
    (rows,) = outputs(model, x)
    run = kept(tmp_path / "run", [rows], {"fingerprint": K})
    draw = np.random.default_rng(0)
    for number in range(100):
        weight = model.get_parameter(f"{draw.integers(3)}.0.weight")
        row, column = (int(each) for each in draw.integers(12, size=2))
        before = weight[row, column].item()
        weight[row, column] += float(draw.uniform(0.05, 1))
        (changed,) = outputs(model, x)
        weight[row, column] = before
        found = run.compare(kept(tmp_path / f"{number}", [changed], {"fingerprint": K}), tolerance=TOLERANCE)
        assert found.first is not None
        assert found.first == first_of_numpy(rows, changed)
        apart = rows[found.first["module"]] - changed[found.first["module"]]
        exact = float(apart.norm() / rows[found.first["module"]].norm())
        place = f"{found.first['module']}, sample {found.first['sample']}"
        (reason,) = found.reasons
        said, _, about = reason.partition(", relative L2 about ")
        assert said == f"fingerprints: first difference at {place}"
        assert float(about) == pytest.approx(exact, rel=0.5)


@torch.no_grad()
def test_of_100_equal_pairs_none_is_reported(tmp_path: Path) -> None:
    model = layers()
    x = normal(6, 12)
    run = kept(tmp_path / "run", outputs(model, x), {"fingerprint": K})
    for number in range(100):
        batches = outputs(model, *x.split(1 + number % 5))
        found = run.compare(kept(tmp_path / f"{number}", batches, {"fingerprint": K}), tolerance=TOLERANCE)
        assert found.reasons == []


@torch.no_grad()
def test_beside_whole_rows_their_fingerprints_are_taken(tmp_path: Path) -> None:
    model = layers()
    spec = {"seen": {"select": "*", "hook": "forward", "action": "capture"}}
    reduced = {"seen": {**spec["seen"], "reduce": {"fingerprint": K}}}
    x = normal(6, 12)
    runs = list[Run]()
    for name, hooks in (("kept", reduced), ("whole", spec), ("faulty", spec)):
        if name == "faulty":
            model.get_parameter("1.0.weight")[3, 4] += 1
        with hookrun.record(model, hooks, run_dir=tmp_path / name):
            model(x)
        runs.append(hookrun.open_run(tmp_path / name))
    one, whole, faulty = runs
    assert one.captures["seen"]["0"].shape == (6, K + 2)
    assert one.compare(whole, tolerance=TOLERANCE).reasons == []
    exact = whole.compare(faulty).captures
    for found in (one.compare(faulty), faulty.compare(one)):
        assert found.first == whole.compare(faulty).first
        assert found.reasons[0].startswith(
            "fingerprints: first difference at 1, sample 0, relative L2 about "
        )
        for row, of_rows in zip(found.captures, exact, strict=True):
            assert row["relative_l2"] == pytest.approx(of_rows["relative_l2"], rel=0.5)
            assert row["largest"] is None


@pytest.mark.parametrize(
    ("reduce", "other"),
    [
        ({"fingerprint": 64}, {"fingerprint": 32}),
        ({"fingerprint": 64}, {"mean": [1]}),
        ({"topk": 3}, {"fingerprint": 8}),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, reduce: Any, other: Any) -> None:
    rows = [{"a": normal(4, 12)}]
    one = kept(tmp_path / "one", rows, reduce)
    with pytest.raises(SpecError, match="which cannot be compared"):
        one.compare(kept(tmp_path / "other", rows, other))


def test_fingerprints_in_other_directions_are_refused(tmp_path: Path) -> None:
    rows = [{"a": normal(4, 12)}]
    old = kept(tmp_path / "old", rows, {"fingerprint": K})
    (old.path / "env.json").write_text(json.dumps({"hookrun": "0.5.0"}))
    for name, reduce in (("new", {"fingerprint": K}), ("whole", None)):
        with pytest.raises(SpecError, match=r"fingerprints of hookrun 0\.5\.0, which have other directions"):
            kept(tmp_path / name, rows, reduce).compare(old)
    assert old.compare(old).reasons == []


@pytest.mark.parametrize(
    "claimed", [{"fingerprint": "64"}, {"fingerprint": 10**9}, {"fingerprint": [1]}, [64], "64"]
)
def test_a_plan_that_lies_of_fingerprints_harms_nobody(tmp_path: Path, claimed: Any) -> None:
    rows = [{"a": normal(4, 12)}]
    one = written(tmp_path / "one", *rows)
    hook = {"name": "seen", "params": {"reduce": claimed}}
    (one.path / "plan.json").write_text(json.dumps({"hooks": [hook]}))
    assert one.compare(kept(tmp_path / "other", rows, None)).reasons == []


def test_infinity_and_nan_on_one_side_differ(tmp_path: Path) -> None:
    x = normal(3, 12)
    x[1, 2] = torch.nan
    one = kept(tmp_path / "one", [{"a": x}], {"fingerprint": K})
    assert one.compare(kept(tmp_path / "same", [{"a": x}], {"fingerprint": K})).reasons == []
    y = x.clone()
    y[2, 0] = torch.inf
    found = one.compare(kept(tmp_path / "other", [{"a": y}], {"fingerprint": K}))
    assert found.first == {"module": "a", "sample": 2, "token": None}


def test_fingerprints_of_bfloat16_are_near(tmp_path: Path) -> None:
    x = normal(5, 3, 12)
    one = kept(tmp_path / "one", [{"a": x}], {"fingerprint": K})
    other = kept(tmp_path / "other", [{"a": x.bfloat16()}], {"fingerprint": K})
    apart = float((x - x.bfloat16().float()).norm() / x.norm())
    (row,) = one.compare(other).captures
    assert row["relative_l2"] == pytest.approx(apart, rel=0.5)
    assert one.compare(other, tolerance=0.01).reasons == []
