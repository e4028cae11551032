"""Lightning's or transformers' Trainer alone and as each of two gloo ranks: writes the trained weights of each.

The library takes seconds to import: one process does that and forks a child for each of the three trainings.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookrun

SPEC = {
    "clamp": {"select": "net.2", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
    "norm": {"select": "net.0", "hook": "optimizer_step_pre", "action": "clip_norm", "max_norm": 0.05},
}
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(16, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (16,), generator=GENERATOR)
BATCH = 4
"""Rows over all ranks."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def lightning(rank: int, size: int) -> nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, number: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = "ddp" if size > 1 else "auto"
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=size, strategy=strategy,
        callbacks=[hookrun.integrations.lightning.Callback(SPEC)], enable_model_summary=False,
        use_distributed_sampler=False, **quiet,
    )  # fmt: skip
    own = TensorDataset(INPUTS[rank::size], TARGETS[rank::size])
    trainer.fit(module, DataLoader(own, batch_size=BATCH // size))
    return module.net


def transformers(rank: int, size: int) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.net(x)
            return {"loss": nn.functional.cross_entropy(output, labels), "logits": output}

    class Plain(Trainer):  # type: ignore[misc]
        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def _get_train_sampler(self, *_: Any) -> None:
            return None  # no shuffling

    model = Model()
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=BATCH // size, use_cpu=True,
        report_to=[], save_strategy="no", lr_scheduler_type="constant", max_grad_norm=0, disable_tqdm=True,
        ddp_backend="gloo" if size > 1 else None,
    )  # fmt: skip
    data = [{"x": x, "labels": label} for x, label in zip(INPUTS, TARGETS, strict=True)]
    callback = hookrun.integrations.transformers.Callback(SPEC)
    Plain(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    return model.net


def child(library: str, file: str, environment: dict[str, str]) -> int:
    """Fork the process that trains; returns its id."""
    process = os.fork()
    if process:
        return process
    try:
        os.environ.update(environment)
        rank = int(environment.get("RANK", "0"))
        size = int(environment.get("WORLD_SIZE", "1"))
        net = {"lightning": lightning, "transformers": transformers}[library](rank, size)
        with open(file, "w") as written:
            json.dump([each.detach().flatten().tolist() for each in net.parameters()], written)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    library = sys.argv[1]
    importlib.import_module(
        {"lightning": "lightning.pytorch", "transformers": "transformers.trainer"}[library]
    )
    importlib.import_module(f"hookrun.integrations.{library}")
    started = [child(library, file, environment) for file, environment in json.loads(sys.argv[2]).items()]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) != 0 for each in started))
