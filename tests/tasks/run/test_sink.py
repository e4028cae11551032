"""Where a run's captures and records go: with their samples, once over all ranks; the text of each token once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

import hookrun
from hookrun.ranks import ALONE, Ranks
from hookrun.runtime import Installation
from hookrun.store.run_dir import RunDir
from hookrun.tasks.run.sink import RunSink

SEEN = {"select": "fc", "hook": "forward", "action": "capture"}
PARAMETER = {"select": "fc.weight", "hook": "grad"}
WEIGHT = {**PARAMETER, "action": "capture"}
STATS = {"select": "fc", "hook": "forward", "action": "stats", "of": ["sum", "bytes"]}


class Of(Ranks):
    """Rank `rank` of two; the other one has the same."""

    size, several = 2, True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gathered(self, plain: Any) -> list[Any]:
        return [plain, plain]


class Directory:
    """Notes what is written to the run directory."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks, self.captures = ranks, self
        self.rows, self.lines, self.tokens = list[Any](), list[dict[str, Any]](), list[tuple[int, str]]()

    def add(
        self, hook: str, module: str, value: Any, *, sample_ids: Any, split: Any, step: int, **_: Any
    ) -> None:
        self.rows.append(
            (hook, value.tolist(), None if sample_ids is None else sample_ids.tolist(), split, step)
        )

    def append(self, stream: str, records: list[dict[str, Any]]) -> None:
        if stream == "stats.jsonl":
            self.lines += records
        else:
            self.tokens += [(record["token"], record["text"]) for record in records]


class Run:
    """A model whose ReLU writes over what `fc` returned, under hooks."""

    def __init__(self, ranks: Ranks = ALONE, of_rows: tuple[str, ...] = ()) -> None:
        self.directory, self.said = Directory(ranks), list[str]()
        self.sink = RunSink(cast(RunDir, self.directory), self.said.append)
        self.sink.of_rows = of_rows
        self.model = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2, bias=False), relu=nn.ReLU(inplace=True)))
        self.model.fc.weight.data = torch.eye(2)

    @contextmanager
    def under(self, **spec: dict[str, Any]) -> Iterator[Installation]:
        plan = hookrun.compile({"hooks": spec}, self.model)
        with Installation(plan, self.model, sink=self.sink) as hooks:
            yield hooks
            self.sink.settle()

    def batch(self, hooks: Installation, x: list[list[float]]) -> None:
        self.model(torch.tensor(x)).sum().backward()
        hooks.step()


def test_a_capture_has_the_samples_of_the_batch_and_one_of_a_parameter_has_none() -> None:
    """A weight of two rows is no batch of two samples."""
    run = Run()
    with run.under(seen=SEEN, weight=WEIGHT) as hooks:
        run.sink.split, hooks.samples = "val", torch.tensor([7, 3])
        run.batch(hooks, [[-1.0, 2.0], [3.0, 4.0]])
        hooks.samples, run.sink.counted = None, torch.tensor([5, 6])
        run.batch(hooks, [[1.0, 1.0], [1.0, 1.0]])
        run.sink.counted = None
        run.batch(hooks, [[1.0, 1.0], [1.0, 1.0]])
    seen = [row for row in run.directory.rows if row[0] == "seen"]
    assert seen[0] == ("seen", [[-1.0, 2.0], [3.0, 4.0]], [7, 3], "val", 0), (
        "as it was before ReLU wrote over it"
    )
    assert [(ids, step) for _, _, ids, _, step in seen] == [([7, 3], 0), ([5, 6], 1), (None, 2)]
    assert {ids for hook, _, ids, _, _ in run.directory.rows if hook == "weight"} == {None}


def test_captures_and_records_are_written_once_over_all_ranks() -> None:
    found = {}
    for rank in (0, 1):
        run = Run(Of(rank), of_rows=("seen", "rows"))
        with run.under(seen=SEEN, weight=WEIGHT, rows=STATS, norm=STATS | PARAMETER) as hooks:
            run.batch(hooks, [[1.0, 2.0]])
        written = [row[0] for row in run.directory.rows]
        found[rank] = (
            written,
            [(line["hook"], line.get("of_rank")) for line in run.directory.lines],
            run.sink.bytes,
        )
    assert found[0] == (["seen", "weight"], [("rows", 0), ("norm", None)], {"rows": 8, "norm": 16})
    assert found[1] == (["seen"], [("rows", 1)], {"rows": 8})


def test_the_text_of_each_token_is_asked_for_and_written_once() -> None:
    run, asked = Run(), list[int]()

    def decode(token: int) -> str | None:
        asked.append(token)
        return None if token == 9 else f"<{token}>"

    run.sink.log_texts(decode, [4, -1, 9, 4, 2])
    again = Run()
    again.sink.load_state_dict(run.sink.state_dict())
    for sink in (run.sink, again.sink):
        sink.log_texts(decode, [9, 2, 5, 4])
    assert run.directory.tokens == [(2, "<2>"), (4, "<4>"), (5, "<5>")] and again.directory.tokens == [
        (5, "<5>")
    ]
    assert asked == [2, 4, 9, 5, 5]
