"""Captures inside compiled graphs: those of a compiled model are those of the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hookrun
from hookrun.engine.values.containers import leaves


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Output:
    scores: Tensor
    pair: Pair


class Parts(nn.Module):
    """Returns containers of all kinds."""

    def forward(self, x: Tensor, by: Tensor | None = None) -> dict[str, Any]:
        scaled = x if by is None else x * by
        return {"output": Output(scaled, Pair(x.tanh(), None)), "more": (scaled + 1, [x.sum(-1)], "text", 3)}


class Net(nn.Module):
    """Calls a block twice, and writes into a tensor that was captured."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.parts = Parts()
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        found = self.parts(x, by=x)
        return self.head(found["output"].scores + found["more"][0]).relu_()


EVERY: dict[str, Any] = {
    "outputs": {"select": ["block", "parts", "head"], "hook": "forward"},
    "inputs": {"select": ["block", "parts"], "hook": "forward_pre"},
    "prints": {"select": ["block", "head"], "hook": "forward", "reduce": {"fingerprint": 16}, "batch_dim": 0},
    "part": {"select": "block", "hook": "forward", "index": "..., [1, 5]", "dtype": "float16"},
    "member": {"select": "parts", "hook": "forward", "target": "output.pair[0]"},
    "none": {"select": "parts", "hook": "forward", "target": "output.pair.second"},
    "later": {"select": "head", "hook": "forward", "when": {"step": {"start": 1, "every": 2}}},
    "tested": {
        "select": "head",
        "hook": "forward",
        "when": {"mode": "eval"},
        "reduce": "mean",
        "batch_dim": 0,
    },
    "little": {"select": "head", "hook": "forward", "max_bytes": 100, "batch_dim": 0},
}


def captured(
    backend: str | None, names: Iterable[str] = EVERY, *, checkpointed: bool = False
) -> tuple[Any, dict[Any, int]]:
    """Training, and evaluation of a batch of another size. backend: None: not compiled"""
    model = Net(checkpointed=checkpointed)
    spec = {name: {"action": "capture", **EVERY[name]} for name in names}
    with pytest.warns(hookrun.HookrunWarning), hookrun.hooked(model, spec) as hooks:
        call = model if backend is None else hooks.compile(backend=backend, fullgraph=True)
        for step, rows in enumerate((5, 5, 7, 5)):
            model.train(rows == 5)
            output = call(torch.randn(rows, 8, generator=torch.Generator().manual_seed(step)))
            if rows == 5:
                output.sum().backward()
            hooks.step()
    return hooks.captures, dict(hooks.fired)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pairs = zip(leaves(found), leaves(expected), strict=True)
    for (path, one), (path_expected, other) in pairs:
        assert path == path_expected
        assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other)), path


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_model_captures_the_same_values(checkpointed: bool) -> None:
    names = ["outputs", "none"] if checkpointed else list(EVERY)
    found, fired = captured("aot_eager", names, checkpointed=checkpointed)
    assert counters["stats"]["unique_graphs"] == 2  # one for each mode
    assert not counters["graph_break"]
    expected, fired_expected = captured(None, names, checkpointed=checkpointed)
    assert fired == fired_expected
    for name in names:
        assert list(found[name]) == list(expected[name])
        for module, values in expected[name].items():
            assert len(found[name][module]) == len(values), (name, module)
            for one, other in zip(found[name][module], values, strict=True):
                assert_same(one, other)


class Cache:
    """No container that hookrun knows."""


def test_an_unknown_object_is_refused_by_its_class() -> None:
    class Cached(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
            return x + 1, cache

    cache = Cache()
    spec = {"h": {"select": "", "hook": "forward", "action": "capture"}}
    with hookrun.hooked(Cached(), spec) as hooks:
        compiled = hooks.compile(backend="eager")
        with pytest.raises(
            hookrun.CompileError, match=r"hooks\.h: capture sees an object of class Cache, .*\n.*target"
        ):
            compiled(torch.ones(2))


def test_a_value_that_another_hook_takes_is_refused() -> None:
    spec = {
        "seen": {"select": "block.0", "hook": "forward", "action": "capture"},
        "edit": {"select": "head", "hook": "forward_pre", "action": "add_bias"},
    }
    spec["edit"]["value"] = {"hook": "seen", "module": "block.0"}  # type: ignore[assignment]
    with (
        hookrun.hooked(Net(), spec) as hooks,
        pytest.raises(hookrun.CompileError, match=r"hooks\.seen: passes what it sees to hooks\.edit\.value"),
    ):
        hooks.compile()
