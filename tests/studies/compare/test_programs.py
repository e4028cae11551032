"""One command compares two programs: of other precision, with other batches, or a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hookrun
from hookrun.compare import main as compare

SMALL = ("compute.device=cpu", "compute.threads=1", "model=mlp", "data=digits")
PREDICT = (*SMALL, "task=predict", "data.batch_size=8", "train.limit_batches=2")
SEEN = {"select": "**", "hook": "forward", "action": "capture"}
RUN = (*PREDICT, "+hooks.seen={select: '**', hook: forward, action: capture}")


def test_float32_and_bfloat16_differ_by_rounding(shared: Any) -> None:
    one = str(shared(*RUN).path)
    half = str(shared(*RUN, "compute.precision=bf16").path)
    assert compare([one, half, "--tolerance", "0.05"]) == 0
    assert compare([one, half, "--tolerance", "1e-5"]) == 3


def test_a_loop_of_ones_own_takes_part(shared: Any, capsys: Any) -> None:
    one = str(shared(*RUN).path)
    model, data = hookrun.build(overrides=RUN)
    x = torch.stack([data["val"][sample][0] for sample in range(16)])
    for name, split in (("mine", "val"), ("unknown", None)):
        with torch.no_grad(), hookrun.record(model.eval(), {"seen": SEEN}, run_dir=name) as hooks:
            hooks.split = split
            model(x[:5])
            model(x[5:])
    assert compare([one, "mine", "--tolerance", "1e-5"]) == 0
    capsys.readouterr()
    assert compare([one, "unknown", "--tolerance", "1e-5"]) == 3
    assert "only one of the runs knows its split" in capsys.readouterr().out
    fc = hookrun.open_run("mine").captures["seen"]["fc"]
    torch.testing.assert_close(hookrun.open_run(Path(one)).captures["seen"]["fc"][:], fc[:])
