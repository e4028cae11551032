"""task=compare: the same numbers as NumPy, where two runs differ first, and in words what cannot be compared."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from draws import normal
from run_files import written
from safetensors.torch import save_file

import hookrun
from hookrun.cli import main
from hookrun.compare import main as compare
from hookrun.report import write_report
from hookrun.store.format import differences
from hookrun.store.reader import Run
from hookrun.studies.compare.comparison import differing
from hookrun.studies.compare.comparison.rows import measured

SMALL = ("compute.device=cpu", "compute.threads=1")
PREDICT = (*SMALL, "model=mlp", "data=digits", "task=predict", "data.batch_size=8", "train.limit_batches=2")
SEEN = "+hooks.seen={select: '**', hook: forward, action: capture}"
DECODER = ("model=decoder", "data=names", "task=predict", "data.batch_size=4", "train.limit_batches=1")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, shared: Any) -> tuple[Run, Run]:
    return faulty(tmp_path_factory.mktemp("digits"), shared, PREDICT, "layers.2.weight")


def test_the_table_has_numpys_numbers_in_execution_order(shared: Any, digits: tuple[Run, Run]) -> None:
    _, rows = content_of(shared("task=compare", *both(digits), "task.cka=true"))
    assert [row["module"] for row in rows] == [
        *("flatten", "layers.0", "layers.1", "layers.2", "layers.3", "layers", "fc", ""),
    ]
    for row in rows:
        left, right = (each.captures["seen"][row["module"]].numpy().astype(np.float64) for each in digits)
        apart = np.abs(left - right)
        norms = np.linalg.norm(left), np.linalg.norm(right)
        assert float(row["cosine"]) == pytest.approx((left * right).sum() / norms[0] / norms[1])
        assert float(row["relative_l2"]) == pytest.approx(np.linalg.norm(apart) / norms[0])
        assert float(row["largest"]) == apart.max()
        x = left - left.mean(0)
        y = right - right.mean(0)
        norms = np.linalg.norm(x.T @ x), np.linalg.norm(y.T @ y)
        assert float(row["cka"]) == pytest.approx(np.linalg.norm(y.T @ x) ** 2 / norms[0] / norms[1])
        if apart.any():
            place = np.unravel_index(apart.argmax(), apart.shape)
            assert (int(row["largest_sample"]), int(row["largest_index"])) == place


def test_a_fault_in_one_weight_comes_first(shared: Any, digits: tuple[Run, Run]) -> None:
    content, rows = content_of(shared("task=compare", *both(digits), "task.cka=true"))
    left, right = (each.captures["seen"]["layers.2"].numpy() for each in digits)
    differs = np.linalg.norm(left - right, axis=1) > 1e-3 * np.linalg.norm(left, axis=1)
    assert content["first"] == {"module": "layers.2", "sample": int(differs.argmax()), "token": None}
    assert [float(row["largest"]) for row in rows[:3]] == [0.0, 0.0, 0.0]
    assert [row["differs"] for row in rows] == ["False"] * 3 + ["True"] * 5
    assert [row["weight"] for row in content["weights"]] == ["layers.2.weight"]
    assert [row["key"] for row in content["config"]] == ["model.weights"]
    assert content["plan"] == []
    before, now = (each.predictions[:].double().log_softmax(1) for each in digits)
    changed = (before.argmax(1) != now.argmax(1)).nonzero().squeeze(1).tolist()
    found = content["predictions"]
    assert [each["sample"] for each in found["changes"]] == changed
    assert found["changed"] == len(changed)
    assert found["kl"] == pytest.approx(float((before.exp() * (before - now)).sum(1).mean()))
    same = digits[0].compare(digits[1].path)
    assert same.first == content["first"]
    assert len(same.captures) == len(rows)


def test_of_an_empty_mapping_the_keys_of_the_other_one_differ() -> None:
    assert list(differences({"args": {}, "seed": 1}, {"args": {"size": 2}, "seed": 1})) == [
        ("args.size", None, 2)
    ]
    assert list(differences({"args": {}}, {"args": 3})) == [("args", {}, 3)]


def test_lists_of_statistics_differ_by_their_items() -> None:
    bins = {"counts": [1, 2], "edges": [0.0, 0.5, 1.0]}
    before = {"h": {"mean": [1.0, 2.0], "quantiles": [[0.1, math.nan]], "histogram": [bins, bins]}}
    near = {"counts": [1, 2], "edges": [0.0, 0.5, 1.0001]}
    now = {"h": {"mean": [1.0001, 2.0], "quantiles": [[0.1, math.nan]], "histogram": [bins, near]}}
    assert differing(before, now, 1e-3) == []
    exact = [(row["key"], row["run"], row["other"]) for row in differing(before, now)]
    assert exact == [("h.mean[0]", 1.0, 1.0001), ("h.histogram[1].edges[2]", 1.0, 1.0001)]
    (row,) = differing(before, {"h": {**before["h"], "mean": [1.0]}}, 1e-3)
    assert row == {"key": "h.mean", "run": [1.0, 2.0], "other": [1.0]}


def test_whole_sequences_are_compared_token_by_token(executed: Any, tmp_path: Path) -> None:
    whole, other = faulty(tmp_path, executed, DECODER, "blocks.1.mlp.pre.weight")
    comparison = whole.compare(other, by=("module", "tokens"))
    assert whole.compare(other, by="tokens").captures == comparison.captures
    assert comparison.first == {"module": "blocks.1.mlp.pre", "sample": 0, "token": 0}
    left = whole.captures["seen"]["blocks.1"].numpy().astype(np.float64)
    right = other.captures["seen"]["blocks.1"].numpy().astype(np.float64)
    found = [row for row in comparison.captures if row["module"] == "blocks.1"]
    assert [int(row["token"]) for row in found] == list(range(left.shape[1]))
    for token, row in enumerate(found):
        apart = left[:, token] - right[:, token]
        assert float(row["relative_l2"]) == pytest.approx(
            np.linalg.norm(apart) / np.linalg.norm(left[:, token])
        )


def test_batches_pair_by_sample(tmp_path: Path) -> None:
    rows = normal(20, 4)
    one = written(tmp_path / "one", {"fc": rows[:8]}, {"fc": rows[8:16]})
    other = written(tmp_path / "other", *({"fc": part.bfloat16()} for part in rows.split(5)))
    found = one.compare(other, tolerance=0.02)
    assert found.first is None
    assert {row["rows"] for row in found.captures} == {16}
    (reason,) = found.reasons
    assert "0 of 16 rows are only here, 4 of 20 only in the other run" in reason


@pytest.mark.parametrize(
    ("other", "split", "said"),
    [
        (
            {"flatten": torch.ones(3, 4)},
            "train",
            "no sample in common: 3 rows from val 0 to val 2, other 3 rows from train 0 to train 2",
        ),
        ({"fc": torch.ones(3, 2)}, "val", "has seen at flatten"),
        ({}, "val", "has seen at flatten"),
        ({"flatten": torch.ones(3, 2)}, "val", "3 rows have shape [4], other [2]"),
    ],
)
def test_what_cannot_be_compared_is_told(
    tmp_path: Path, other: dict[str, torch.Tensor], split: Any, said: str
) -> None:
    one = written(tmp_path / "one", {"flatten": torch.ones(3, 4)})
    found = one.compare(written(tmp_path / "other", *([other] if other else []), split=split))
    assert said in " ".join(found.reasons)


def test_the_command_compares_two_directories(executed: Any, digits: tuple[Run, Run], capsys: Any) -> None:
    paths = [str(each.path) for each in digits]
    assert compare([*paths]) == 0
    assert "first: layers.2" in capsys.readouterr().out
    assert compare([*paths, "task.on_difference=stop"]) == 3
    assert capsys.readouterr().err.startswith("stopped: first: layers.2, sample ")
    stopped = hookrun.open_run("outputs/latest")
    assert stopped.status["status"] == "stopped"
    assert "<b>It was stopped</b>" in write_report(stopped.path).read_text()
    same = (f"task.run={paths[0]}", f"task.other={paths[0]}")
    executed("task=compare", *same, "task.on_difference=stop", "task.tolerance=0")
    assert "no difference" in capsys.readouterr().out
    assert compare(paths[:1]) == 2


@pytest.mark.parametrize("keys", [{"by": ["modul"]}, {"tolerance": -1}, {"tolerance": math.nan}])
def test_other_arguments_of_python_are_refused(digits: tuple[Run, Run], keys: dict[str, Any]) -> None:
    with pytest.raises(
        hookrun.HookrunError, match="expected module and tokens, and a tolerance of at least 0"
    ):
        digits[0].compare(digits[1], **keys)


def test_training_differs_first_at_its_first_step(executed: Any) -> None:
    train = ("model=mlp", "task=train", "train.epochs=1", "train.limit_batches=3", SEEN)
    fault = "+hooks.x={select: layers.2, hook: forward, action: scale, factor: 1.1, when: {step: {start: 1}}}"
    found = executed(*train).compare(executed(*train, fault, "+hooks.x.priority=-1"))
    assert found.first is not None
    assert found.first["module"] == "layers.2"


def test_two_sweeps_are_compared_job_by_job(executed: Any, refused: Any, capsys: Any) -> None:
    assert main(["-m", *PREDICT, SEEN, "seed=0,1", "hydra.sweep.dir=a"]) == 0
    for job, other in ((0, 1), (1, 0), (1, 2)):  # as if its seeds were 1, 0 and 2
        shutil.copytree(f"a/{job}", f"b/{other}")
    typed = Path("b/2/.hydra/overrides.yaml")
    typed.write_text(typed.read_text().replace("seed=1", "seed=2"))
    shutil.copy("a/multirun.yaml", "b")
    content, rows = content_of(executed("task=compare", "task.run=a", "task.other=b"))
    assert list(content["jobs"]) == ["seed=0", "seed=1"]
    assert content["unpaired"] == ["seed=2"]
    assert content["first"] is None
    assert {row["job"] for row in rows} == {"seed=0", "seed=1"}
    assert "a is a sweep, and b/0 is not" in refused("task=compare", "task.run=a", "task.other=b/0")
    for config in Path("b").glob("*/.hydra/config.yaml"):  # as if it had no hooks
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "hooks": None}))
        shutil.rmtree(config.parents[1] / "captures")
    capsys.readouterr()
    executed("task=compare", "task.run=a", "task.other=b")
    printed = capsys.readouterr().out
    assert printed.count("no module was captured by both runs") == 1
    assert "other null" in printed
    assert "None" not in printed


def test_values_not_finite_on_both_sides_do_not_differ() -> None:
    nan = math.nan
    inf = math.inf
    low = torch.finfo(torch.float32).min
    left = torch.tensor([[nan, 1.0], [nan, 1.0], [inf, 1.0], [inf, 1.0], [low, 1.0], [low, 1.0]])
    right = torch.tensor([[nan, 1.0], [0.0, 1.0], [inf, 1.0], [-inf, 1.0], [low, 1.0], [low, 1.1]])
    sums, apart, differs = measured(left, right, 1e-3)
    assert differs.tolist() == [False, True, False, True, False, True]
    assert apart[3, 0] == inf
    assert not sums[:, :2].isnan().any()


def faulty(folder: Path, run: Any, overrides: tuple[str, ...], weight: str) -> tuple[Run, Run]:
    """Two runs of the same model; in the second one an element of a weight is larger by 1."""
    model, _ = hookrun.build(overrides=[*SMALL, *overrides])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runs = list[Run]()
    for name in ("whole", "faulty"):
        save_file(state, folder / f"{name}.safetensors")
        runs.append(run(*overrides, SEEN, f"model.weights={folder / name}.safetensors"))
        state[weight][3, 7] += 1
    return runs[0], runs[1]


def both(digits: tuple[Run, Run]) -> tuple[str, str]:
    return f"task.run={digits[0].path}", f"task.other={digits[1].path}"


def content_of(run: Run) -> tuple[dict[str, Any], list[dict[str, str]]]:
    content = json.loads((run.path / "compare.json").read_text())
    return content, list(csv.DictReader((run.path / "compare.csv").read_text().splitlines()))
