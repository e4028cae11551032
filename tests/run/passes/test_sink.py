"""Where a run's captures go: with the samples of their batch, as they were when the hook saw them."""

from __future__ import annotations

import json

import torch
from hooking import one_hook
from torch import nn

import hookrun
from hookrun.engine.runtime import Installation
from hookrun.run.passes.batches import Batches
from hookrun.run.passes.sink import RunSink
from hookrun.store.reader import open_run
from hookrun.store.run_dir import RunDir

IN_PLACE = """
def __init__(self):
    super().__init__()
    self.fc, self.relu = nn.Linear(64, 10), nn.ReLU(inplace=True)

def forward(self, x):
    return self.relu(self.fc(x.flatten(1)))
"""


def test_a_capture_of_a_parameter_has_no_samples(executed, ready, own_model) -> None:
    """A weight of ten rows is no batch of ten samples. ReLU writes over what `fc` returned, after the capture."""
    argv = (*own_model(IN_PLACE), "task=predict", "data.batch_size=10", "train.limit_batches=2")
    seen = "+hooks.seen={select: fc, hook: forward, action: capture}"
    weight = "+hooks.weight={select: fc.weight, hook: grad, action: capture}"
    captures = executed(*argv, "task.backward={score: top}", seen, weight).captures
    prepared = ready(*argv)
    images = torch.cat([batch.inputs for batch in Batches(prepared, "val").epoch(0)])
    torch.testing.assert_close(captures["seen"]["fc"][:], prepared.model.fc(images.flatten(1)).detach())
    assert captures["seen"]["fc"].sample_ids.tolist() == list(range(20))
    assert captures["seen"]["fc"].steps.tolist() == [0] * 10 + [1] * 10
    assert captures["weight"]["fc.weight"].sample_ids.tolist() == [-1, -1]


def test_rows_of_samples_that_are_not_known_are_numbered_on(tmp_path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    model = nn.Linear(2, 2)
    sink = RunSink(run_dir, print)
    plan = hookrun.compile(one_hook(), model, example=((torch.ones(2, 2),), {}))
    with Installation(plan, model, sink=sink):
        for count in (2, 3):
            sink.number(count)
            model(torch.ones(count, 2))
    run_dir.close()
    run_dir.set_status("done")
    assert open_run(run_dir.path).captures["h"][""].sample_ids.tolist() == [0, 1, 2, 3, 4]


def test_the_text_of_each_token_that_is_known_is_written_once(tmp_path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    texts = {2: "b", 4: "d", 9: None}
    sink = RunSink(run_dir, print)
    for tokens in ([4, -1, 9, 4], [4, 2]):
        sink.log_texts(texts.__getitem__, tokens)
    run_dir.close()
    lines = [json.loads(line) for line in (run_dir.path / "tokens.jsonl").read_text().splitlines()]
    assert lines == [{"token": 4, "text": "d"}, {"token": 2, "text": "b"}]
