"""The joint table: for every action on every hook type, the result in each way to train, compared with one process.

The rows come from the registries, the cells from hookrun's own checks before a run. tests/run/ranks/test_joint_table.py
trains every cell and checks the table: "equal" is measured, "differs" and "refused" are reported by the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.actions import actions
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.plan.plan import ResolvedPlan, uncompilable
from hookrun.errors import Problem
from hookrun.run.experiment.metrics.losses import load_loss
from hookrun.run.experiment.rank_fit import differences, hook_misfits, settings_misfits
from hookrun.run.experiment.settings import Compute, Settings, Train
from hookrun.run.experiment.sharding import shard_problems

EQUAL, DIFFERS, REFUSED = "equal", "differs", "refused"
EXAMPLES = Path(__file__).resolve().parents[1] / "conf" / "hooks"

PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "add_bias": [{"value": 0.01}, {"value": [0.01], "trainable": True}],
    "add_parameter": [{"name": "more", "shape": [2]}],
    "check": [{"max": 0.1, "policy": "warn"}],
    "clamp": [{"min": -0.02, "max": 0.02}],
    "clip_norm": [{"max_norm": 0.01}],
    "expert_load": [{}],
    "fill": [{"value": 0.1}],
    "flip_bits": [{"count": 2, "bits": [18, 20]}],
    "linear": [{}],
    "noise": [{"std": 0.1}],
    "project": [{"direction": [1, 2, 0, 0, 0, 0, 0, 0]}],
    "quantize": [{"bits": 4}, {"bits": 4, "per": "group", "group_size": 2}],
    "replace": [{"value": 0.01}],
    "stats": [{}],
}
"""The parameters of actions whose example does not fit the small network, or that have more than one row."""

SELECTED = {
    ("drop_expert", "forward_pre"): "experts",
    ("drop_expert", "forward"): "router",
    ("expert_load", "forward"): "router",
}
"""(action, hook type) -> the module of the network that is hooked, where it is not the block's first layer."""

_FOLD = {"of": ["mean", {"top": 2}], "batch_dim": 0}
ELSEWHERE = {
    ("python", "apply"): {"function": "hookrun.examples:shrink"},
    ("fold", "forward_pre"): _FOLD,
    ("fold", "forward"): _FOLD,
    ("fold", "output_grad"): _FOLD,
}
"""(action, hook type) -> other parameters for this hook type, and keys of the hook."""


@dataclass(frozen=True)
class Column:
    """One way to train.

    ranks:        the number of processes
    sharded:      fully_shard divides the parameters over the ranks; False: each rank has the whole model (DDP)
    parts:        micro-batches per step
    checkpointed: with activation checkpointing of a block
    compiled:     with torch.compile
    """

    name: str
    ranks: int = 1
    sharded: bool = False
    parts: int = 1
    checkpointed: bool = False
    compiled: bool = False

    @property
    def strategy(self) -> str:
        """`compute.strategy`."""
        return "none" if self.ranks == 1 else "fsdp" if self.sharded else "ddp"


COLUMNS = (
    Column("one process"),
    Column("DDP ×2", ranks=2),
    Column("DDP ×2, accumulation", ranks=2, parts=2),
    Column("FSDP2 ×2", ranks=2, sharded=True),
    Column("FSDP2 ×2, activation checkpointing", ranks=2, sharded=True, checkpointed=True),
    Column("torch.compile", compiled=True),
    Column("all of them", ranks=2, sharded=True, parts=2, checkpointed=True, compiled=True),
)


@dataclass(frozen=True)
class Row:
    """One hook on the block's first layer, or on the module that its action is made for."""

    action: str
    hook: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The action as the table shows it."""
        return f"`{self.action}`" + (" (trainable)" if self.parameters.get("trainable") else "")

    @property
    def select(self) -> str:
        """The module of the network that is hooked."""
        return SELECTED.get((self.action, self.hook), "block.0")

    def network(self, *, checkpointed: bool = False) -> Network:
        """The network that is trained."""
        return Network(checkpointed=checkpointed, mixed=self.select != "block.0")

    @property
    def spec(self) -> dict[str, Any]:
        """The `hooks` section of an experiment."""
        return {"h": {"select": self.select, "hook": self.hook, "action": self.action, **self.parameters}}

    @property
    def of_rows(self) -> bool:
        """Whether the hook sees the rank's own rows of the batch."""
        return HOOK_TYPES[self.hook].sees_batch


class Router(nn.Linear):
    """Chooses two of four experts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """[B, 8] -> scores [B, 4], weights [B, 2] and indices [B, 2]."""
        scores = super().forward(x)
        weights, indices = scores.softmax(-1).topk(2)
        return scores, weights, indices


class Experts(nn.Module):
    """Four linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """[B, 8] -> the weighted sum of what the chosen ones return, [B, 8]."""
        of_all = torch.zeros(len(x), 4, device=x.device, dtype=weights.dtype).scatter(1, indices, weights)
        return torch.einsum("bi,eio,be->bo", x, self.weight, of_all)


class Network(nn.Module):
    """A block and a head.

    checkpointed: with activation checkpointing of the block
    mixed:        with a mixture of experts between the two
    """

    def __init__(self, *, checkpointed: bool = False, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.mixed = mixed
        if mixed:
            self.router = Router(8, 4)
            self.experts = Experts()
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """[B, 8] -> [B, 3]."""
        hidden = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        if self.mixed:
            _, weights, indices = self.router(hidden)
            hidden = hidden + self.experts(hidden, indices, weights)
        found: Tensor = self.head(hidden)
        return found


@cache
def _autoencoder_folder() -> TemporaryDirectory[str]:
    """A sparse autoencoder of the block's width, with the same numbers in every process; removed at the end."""
    folder = TemporaryDirectory()
    width, count = 8, 12
    generator = torch.Generator().manual_seed(0)
    shapes = {"W_enc": (width, count), "W_dec": (count, width), "b_enc": (count,), "b_dec": (width,)}
    tensors = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    save_file(tensors, Path(folder.name) / "sae_weights.safetensors")
    config = {"architecture": "standard", "d_in": width, "d_sae": count}
    (Path(folder.name) / "cfg.json").write_text(json.dumps(config))
    return folder


def parameters_of(action: str) -> list[dict[str, Any]]:
    """The action's parameters in each of its rows: those above, or those of the first hook with it in its example."""
    if action in PARAMETERS:
        return PARAMETERS[action]
    if action == "sparse_autoencoder":
        return [{"weights": {"folder": _autoencoder_folder().name}}]
    hooks = yaml.safe_load((EXAMPLES / f"{action}.yaml").read_text())
    of_action = [hook for hook in hooks.values() if hook["action"] == action]
    fields = actions()[action].model_fields
    return [{key: value for key, value in of_action[0].items() if key in fields}]


def rows() -> Iterator[Row]:
    """Every action on every hook type that allows it with its parameters.

    An action that stops the forward is left out: without an output nothing is trained.
    """
    for action, kind in actions().items():
        for parameters in () if kind.does == "stop" else parameters_of(action):
            params = kind.model_validate(parameters)
            for name, hook_type in HOOK_TYPES.items():
                if hook_type in kind.hook_types and params.carried_by(hook_type) is None:
                    yield Row(action, name, ELSEWHERE.get((action, name), parameters))


_PLANS = dict[str, tuple[nn.Module, ResolvedPlan]]()


def _planned(row: Row) -> tuple[nn.Module, ResolvedPlan]:
    if (key := repr(row.spec)) not in _PLANS:
        model = row.network()
        _PLANS[key] = model, hookrun.compile({"hooks": row.spec}, model)
    return _PLANS[key]


def says(row: Row, column: Column) -> tuple[str, str]:
    """hookrun's verdict before a run, equal, differs or refused, and the reason."""
    model, plan = _planned(row)
    compute = Compute(strategy=column.strategy, compile=column.compiled)
    settings = Settings.model_construct(compute=compute, train=Train())
    problems = list[Problem]()
    if column.compiled:
        problems += uncompilable(plan)
    if column.ranks > 1:
        problems += [*hook_misfits(plan), *settings_misfits(settings, scores=True)]
    if column.sharded:
        problems += shard_problems(settings, model, plan)
    if problems:
        what = problems[0].what
        return REFUSED, what.replace(f"{row.action} on {row.hook!r} ", "").removeprefix(f"{row.action} ")
    loss = load_loss(settings.train.loss)
    lines = list(differences(plan, model, loss, trains=True)) if column.ranks > 1 else []
    return (DIFFERS, lines[0].removeprefix(f"h: {row.action} ").removeprefix("h: ")) if lines else (EQUAL, "")


def joint_table() -> str:
    """The table in Markdown, followed by the numbered reasons."""
    reasons = dict[str, int]()

    def cell(row: Row, column: Column) -> str:
        what, why = says(row, column)
        return what if what == EQUAL else f"{what} ({reasons.setdefault(why, len(reasons) + 1)})"

    head = ("action", "hook", *(column.name for column in COLUMNS))
    lines = [head, tuple("---" for _ in head)]
    lines += [(row.name, f"`{row.hook}`", *(cell(row, column) for column in COLUMNS)) for row in rows()]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"{number}. {why}" for why, number in reasons.items())
