"""The joint table of hookrun/run/ranks/README.md: every cell is trained, with the result that the table states."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import joint_table
import pytest
import torch
from joint_table import COLUMNS, DIFFERS, EQUAL, REFUSED, Column, says
from joint_training import trained
from warm_processes import WarmProcesses

from hookrun.engine.actions import actions
from hookrun.engine.hook_types import HOOK_TYPES

ROOT = Path(__file__).resolve().parents[3]
TRAINING = ROOT / "scripts" / "joint_training.py"
ROWS = list(joint_table.rows())
ALONE = COLUMNS[0]
RANKS = [column for column in COLUMNS if column.ranks > 1]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[Found]]:
    """The results of one process, with as many micro-batches as a step has in a column."""
    return {parts: [trained(row, Column("", parts=parts), 0) for row in ROWS] for parts in (1, 2)}


@pytest.fixture(scope="module")
def found(free_port: Any, tmp_path_factory: pytest.TempPathFactory, warm: WarmProcesses) -> list[Found]:
    """The results of each of two ranks, by column and row."""
    port = free_port()
    folder = tmp_path_factory.mktemp("joint")
    files = [folder / f"{rank}.json" for rank in range(2)]
    program = TRAINING.read_text()
    paths = (ROOT / "scripts",)
    pair = [
        warm.start(program, rank, port, file, paths=paths, stdout=2, stderr=2)
        for rank, file in enumerate(files)
    ]
    assert [each.wait() for each in pair] == [0, 0]
    return [json.loads(file.read_text()) for file in files]


def test_the_table_has_a_row_for_every_action() -> None:
    assert {row.action for row in ROWS} == {
        name for name, action in actions().items() if action.does != "stop"
    }
    assert {row.hook for row in ROWS} == set(HOOK_TYPES)
    for row in ROWS:
        assert says(row, ALONE) == (EQUAL, "")


@pytest.mark.parametrize(
    "column", [each for each in RANKS if not each.compiled], ids=lambda column: column.name
)
def test_ranks(column: Column, alone: dict[int, list[Found]], found: list[Found]) -> None:
    wrong = dict[str, list[str]]()
    for number, row in enumerate(ROWS):
        what = says(row, column)[0]
        if what == REFUSED:
            continue
        ranks = [each[column.name][str(number)] for each in found]
        if what == DIFFERS:  # in its records of a rank's rows, not in its results
            ranks = [each | {"records": alone[column.parts][number]["records"]} for each in ranks]
        if unequal := problems(alone[column.parts][number], ranks, of_rows=row.of_rows):
            wrong[f"{row.action} on {row.hook}"] = unequal
    assert wrong == {}


def test_sharded_before_hooks_are_installed(alone: dict[int, list[Found]], found: list[Found]) -> None:
    """Equal, or refused: changes to the model itself come too late."""
    wrong = dict[str, list[str]]()
    refused = set[str]()
    for number, row in ((int(number), ROWS[int(number)]) for number in found[0]["sharded before"]):
        ranks = [each["sharded before"][str(number)] for each in found]
        if "refused" in ranks[0]:
            assert "install the hooks before fully_shard" in ranks[0]["refused"]
            refused.add(row.hook if row.hook == "apply" else row.action)
        elif unequal := problems(alone[1][number], ranks, of_rows=row.of_rows):
            wrong[f"{row.action} on {row.hook}"] = unequal
    assert wrong == {}
    assert refused == {"apply", "add_bias"}


def test_compiled(alone: dict[int, list[Found]]) -> None:
    column = next(each for each in COLUMNS if each.compiled and each.ranks == 1)
    wrong = dict[str, list[str]]()
    for number, row in enumerate(ROWS):
        if says(row, column)[0] != REFUSED and (
            unequal := problems(alone[1][number], [trained(row, column, 0)], of_rows=False)
        ):
            wrong[f"{row.action} on {row.hook}"] = unequal
    assert wrong == {}


def test_all_of_them_is_refused() -> None:
    assert {says(row, COLUMNS[-1])[0] for row in ROWS} == {REFUSED}


def problems(one: Found, ranks: list[Found], *, of_rows: bool) -> list[str]:
    """The differences between the run of one process and those of the ranks."""
    for found in ranks:
        if "error" in found:
            return [found["error"]]
    wrong = list[str]()
    for found in ranks:
        for ours, theirs in zip(one["weights"], found["weights"], strict=True):
            if not torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6):
                wrong.append(f"weights: {ours[:3]} and {theirs[:3]}")
        if one["fired"] != found["fired"]:
            wrong.append(f"fired: {one['fired']} and {found['fired']}")
        if not of_rows and by_text(one["records"]) != by_text(found["records"]):
            wrong.append(f"records: {one['records'][:1]} and {found['records'][:1]}")
    if of_rows and by_text(one["records"]) != by_text(records := verdicts(ranks)):
        wrong.append(f"records: {one['records'][:1]} and {records[:1]}")
    captures = ranks[0]["captures"]
    if of_rows and len(ranks) > 1:  # each rank has its own rows, in the order of the ranks
        alike = zip(*(found["captures"] for found in ranks), strict=True)
        captures = [
            [list(chain.from_iterable(leaf)) for leaf in zip(*leaves, strict=True)] for leaves in alike
        ]
    if len(one["captures"]) != len(captures):
        wrong.append(f"captures: {len(one['captures'])} and {len(captures)}")
    for entry, other in zip(one["captures"], captures, strict=False):
        for ours, theirs in zip(entry, other, strict=True):
            if not torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6):
                wrong.append(f"captures: {ours} and {theirs}")
    return wrong


def verdicts(ranks: list[Found]) -> list[Found]:
    """The results of all rows: each fault of a rank, and that of a check from the results of each rank on its own."""
    if any("bit" in record for each in ranks for record in each["records"]):
        return [record for each in ranks for record in each["records"]]
    found = list[Found]()
    for records in zip(*(each["records"] for each in ranks), strict=True):
        found.append(dict(records[0]))
        if "ok" in records[0]:
            found[-1]["ok"] = all(each["ok"] for each in records)
            found[-1]["least"] = min(each["least"] for each in records)
            found[-1]["largest"] = max(each["largest"] for each in records)
    return found


def by_text(records: list[Found]) -> list[str]:
    """Sorted by text: gradients of parameters may be recorded in another order."""
    return sorted(json.dumps(record, sort_keys=True) for record in records)
