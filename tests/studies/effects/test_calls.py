"""task=effects over the calls of a module: each cell equals a plain forward pass with a hook at that call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookrun
from hookrun.report import write_report
from hookrun.studies.effects.records import Effects

DIGITS = ("data.batch_size=5", "train.limit_batches=3")
TASK = ("task=effects", "task.hook=h", "task.metric=loss", *DIGITS)


@pytest.fixture
def net(trusted: Any) -> Callable[[str], tuple[str, ...]]:
    """The overrides of one of the models."""
    trusted(nets=NETS)
    return lambda name: ("model=python", f"model.factory=nets:{name}")


def test_each_call_of_a_shared_block_is_a_cell(executed, net) -> None:
    moved = "+hooks.h={select: core, hook: forward, action: scale}"
    over = "task.over={call: each, factor: [0.0, 3.0]}"
    made = executed(*TASK, moved, over, *net("Deep"))
    found = made.effects
    assert found.axes["call"] == [0, 1, 2]
    for call, (column, factor) in itertools.product(range(3), enumerate((0, 3))):
        check(found, (call, column), by_hand(net("Deep"), "core", call, factor))
    assert not torch.equal(found["exact"][0], found["exact"][1])
    assert 'id="effects"' in write_report(made.path).read_text()


def test_modules_that_are_called_less_often_have_fewer_cells(executed, net) -> None:
    moved = "+hooks.h={hook: forward, action: scale, factor: 0}"
    over = "task.over={module: [once, core.0], call: each}"
    found = executed(*TASK, moved, over, *net("Deep")).effects
    assert found["exact"].isnan().tolist() == [[False, True, True], [False, False, False]]
    check(found, (0, 0), by_hand(net("Deep"), "once", 0, 0))
    for call in range(3):
        check(found, (1, call), by_hand(net("Deep"), "core.0", call, 0))


def test_the_layers_of_albert_are_calls_of_one(executed, net) -> None:
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output"
    moved = f"+hooks.h={{select: {layer}, hook: forward, action: scale, factor: 0}}"
    over = "task.over={call: [0, 3, [1, 2]]}"
    found = executed(*TASK, moved, over, *net("Albert")).effects
    assert found.axes["call"] == [0, 3, "[1, 2]"]
    for row, call in enumerate((0, 3)):
        check(found, row, by_hand(net("Albert"), layer, call, 0))
    window = executed(*TASK, moved, "task.over={call: {window: 2}}", *net("Albert")).effects
    assert window.axes["call"] == ["0:2", "1:3", "2:4"]
    assert torch.equal(window["exact_samples"][1], found["exact_samples"][2])


def test_the_gradient_is_that_at_the_call(executed, net) -> None:
    moved = "+hooks.h={select: core, hook: forward, action: scale, factor: 0}"
    found = executed(*TASK, moved, "task.over={call: each}", "task.method=gradient", *net("Deep")).effects
    model, data = hookrun.build(overrides=["compute.device=cpu", *net("Deep"), *DIGITS])
    model.eval()
    estimates = []
    for batch in itertools.islice(data.loader("val"), 3):
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(output)
            output.retain_grad()
            return output

        handle = model.get_submodule("core").register_forward_hook(keep)
        losses = F.cross_entropy(model(batch.inputs), batch.target, reduction="none")
        losses.sum().backward()
        handle.remove()
        changes = [-(each * each.grad).sum(1) for each in kept]
        estimates.append(torch.stack([losses + change for change in changes]).detach())
    wanted = torch.cat(estimates, 1).double().mean(1)
    torch.testing.assert_close(found["gradient"], wanted, rtol=1e-5, atol=1e-5)


def test_a_hook_that_fires_at_one_call_is_counted_there_only(executed, net, capsys) -> None:
    moved = "+hooks.h={select: core, hook: forward, action: scale, factor: 0}"
    executed(*TASK, moved, "task.over={call: [1]}", *net("Deep"))
    assert "core x3" in capsys.readouterr().out, "once in each batch"


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("{call: [0, 3]}", "task.over.call: on core called 3 times in a forward: there is no call 3"),
        ("{call: [[2, 5]]}", "there is no call 5"),
        ("{call: [{start: 4}]}", "there is no call 4"),
        ("{call: [-1]}", "task.over.call"),
        ("{call: each, when: [{call: 0}]}", "task.over.call: `when` names calls too"),
        ("{module: [once, core], call: [1]}", "task.over.call: on once called 1 time in a forward"),
    ],
)
def test_calls_that_a_module_lacks_are_refused(over, said, net, refused) -> None:
    moved = "+hooks.h={select: [once, core], hook: forward, action: scale, factor: 0}"
    assert said in refused(*TASK, moved, f"task.over={over}", *net("Deep"))


NETS = """
    import torch
    from torch import nn


    class Deep(nn.Module):
        '''One block that is called `depth` times, each time inside a step of its own.'''

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.start, self.end = nn.Linear(64, 16), nn.Linear(16, 10)
            self.core = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            self.once = nn.Linear(16, 16)
            self.again = self.core

        def forward(self, x):
            x = self.core(self.start(x.flatten(1)))
            x = self.core(self.once(x)) + x
            return self.end(self.again(x))


    class Albert(nn.Module):
        '''The rows of a picture as a sentence.'''

        def __init__(self):
            super().__init__()
            from transformers import AlbertConfig, AlbertModel

            torch.manual_seed(0)
            sizes = dict(vocab_size=5, embedding_size=8, hidden_size=16, intermediate_size=16)
            config = AlbertConfig(**sizes, num_attention_heads=2, num_hidden_layers=4)
            self.albert, self.end = AlbertModel(config), nn.Linear(16, 10)

        def forward(self, x):
            return self.end(self.albert(inputs_embeds=x.flatten(1, 2)).last_hidden_state[:, 0])
"""


@torch.no_grad()
def by_hand(overrides: tuple[str, ...], path: str, call: int, factor: float) -> Tensor:
    """[samples]: the loss if the output of this call of the module is multiplied, one plain pass over the batches."""
    model, data = hookrun.build(overrides=["compute.device=cpu", *overrides, *DIGITS])
    model.eval()
    losses = []
    for batch in itertools.islice(data.loader("val"), 3):
        calls = itertools.count()

        def edit(module: nn.Module, args: Any, output: Any, calls: Any = calls) -> Any:
            if next(calls) != call:
                return None
            return output * factor if isinstance(output, Tensor) else (output[0] * factor, *output[1:])

        handle = model.get_submodule(path).register_forward_hook(edit)
        losses.append(F.cross_entropy(model(batch.inputs), batch.target, reduction="none"))
        handle.remove()
    return torch.cat(losses).double()


def check(found: Effects, row: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(found["exact_samples"][row], wanted, rtol=1e-5, atol=1e-5)
