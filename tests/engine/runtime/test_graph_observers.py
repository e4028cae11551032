"""Observers inside compiled graphs: the records of a compiled model are those of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.lowering  # where the decomposition of max_pool2d looks
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import hookrun

STATS: dict[str, Any] = {"select": "**", "hook": "forward", "action": "stats"}
CHECK: dict[str, Any] = {"select": "**", "hook": "forward", "action": "check", "max": 0.3, "policy": "warn"}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Calls a block twice, and returns two tensors."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x), x


def batch(number: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0].square().mean() + output[1].mean()


def trained(model: nn.Module, call: Callable[..., Any], steps: int = 3) -> None:
    """Each step has two micro-batches, whose backward passes follow both forwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        losses = [loss_of(call(batch(2 * step + part))) for part in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run(
    hooks_of: dict[str, Any],
    backend: str | None,
    *,
    model: nn.Module | None = None,
    loop: Callable[[nn.Module, Callable[..., Any]], None] = trained,
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], int]]:
    """Records and firings of a training; backend: None: not compiled."""
    model = Net() if model is None else model
    with hookrun.hooked(model, {"hooks": hooks_of}) as hooks:
        call = model if backend is None else hooks.compile(backend=backend, fullgraph=True)
        loop(model, call)
    return [dict(record) for record in hooks.records], dict(hooks.fired)


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, ordered: bool = True) -> None:
    def place(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(str(record[key]) for key in ("step", "hook", "module", "path", "mode"))

    if not ordered:  # hooks on one tensor, and those of parameters
        found = sorted(found, key=place)
        expected = sorted(expected, key=place)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours) == list(theirs)
        if "histogram" in theirs:
            assert ours["histogram"]["counts"] == theirs["histogram"]["counts"]
            assert ours.pop("histogram")["edges"] == pytest.approx(theirs["histogram"]["edges"], rel=1e-5)
            theirs = {key: value for key, value in theirs.items() if key != "histogram"}
        for key, value in theirs.items():
            wanted = value
            if isinstance(value, float | list) and key != "counts":
                wanted = pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
            assert ours[key] == wanted, (key, theirs)
            assert type(ours[key]) is type(value)


def test_records_and_counts_are_those_of_eager() -> None:
    hooks_of = {
        "outputs": STATS,
        "checked": CHECK,
        "double": {"select": "block.0", "hook": "forward", "action": "scale", "factor": 2},
        "after": {**STATS, "select": "block.0", "of": ["mean", "nans", "numel"]},
        "channels": {**STATS, "select": "head", "dim": 1, "index": "..., 0:2"},
        "bins": {**STATS, "select": "head", "of": [{"histogram": {"bins": 3}}]},
        "arguments": {**STATS, "select": "head", "hook": "forward_pre"},
        "second": {**STATS, "select": "", "target": "[1]", "of": ["abs_max", "zeros"]},
    }
    expected = run(hooks_of, None)
    found = run(hooks_of, "inductor")
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    assert counters["stats"]["unique_graphs"] == 1


class Passing(nn.Module):
    """Passes each tensor through a module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(count))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return [part(x * 1) for part, x in zip(self.parts, tensors, strict=True)]


def test_statistics_of_large_tensors_are_those_of_eager() -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))

    first_is_far, broken, unknown = normal(64, 32), normal(5, 9, 64), normal(2048)
    first_is_far[0, 0] = 1e6
    broken[0, 0, :2] = torch.tensor([-torch.inf, 1])
    unknown[7] = torch.nan
    images = normal(4, 8, 12, 12)
    tensors = [
        normal(64, 33).relu(),
        normal(256, 32) + 1e4,
        normal(1, 4096) * 1e-30,
        normal(2051),
        normal(32, 64).T,
        images,
        images.contiguous(memory_format=torch.channels_last),
        first_is_far,
        broken,
        unknown,
    ]
    leaves = {"select": "parts.*", "hook": "forward"}
    ofs = ["mean", "std", "norm", "min", "max", "abs_mean", "abs_max", "sum", "zeros", "nans", "infs"]
    hooks_of = {
        "all": {**leaves, "action": "stats", "of": ofs},
        "mean": {**leaves, "action": "stats", "of": "mean"},
        "checked": {**leaves, "action": "check", "max": 2.5, "policy": "warn"},
        "zeros": {**leaves, "action": "check", "of": "zeros", "max": 0.3, "policy": "warn"},
    }

    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        call(*tensors)

    expected = run(hooks_of, None, model=Passing(len(tensors)), loop=loop)
    found = run(hooks_of, "aot_eager", model=Passing(len(tensors)), loop=loop)
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]


def test_the_size_of_a_large_tensor_is_exact() -> None:
    count = 2**24 + 1  # float32 has no such number

    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        call(torch.zeros(1).expand(count))

    hooks_of = {"sizes": {"select": "0", "hook": "forward", "action": "stats", "of": ["numel", "bytes"]}}
    (found,), _ = run(hooks_of, "aot_eager", model=nn.Sequential(nn.Identity()), loop=loop)
    assert (found["numel"], found["bytes"]) == (count, 4 * count)


@pytest.mark.parametrize(("backend", "checkpointed"), [("aot_eager", True), ("eager", False)])
def test_gradients_are_those_of_eager(backend: str, checkpointed: bool) -> None:
    hooks_of = {
        "outputs": STATS,
        "gradients": {**STATS, "hook": "output_grad"},
        "checked": {**CHECK, "hook": "output_grad", "max": 0.01},
        "parameters": {**STATS, "hook": "grad"},
    }
    expected = run(hooks_of, None, model=Net(checkpointed=checkpointed))
    found = run(hooks_of, backend, model=Net(checkpointed=checkpointed))
    assert_same(found[0], expected[0], ordered=False)
    assert found[1] == expected[1]


class Images(nn.Module):
    """The first layers of a network for images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


IMAGES = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))


def test_a_check_of_images_has_the_numbers_of_eager() -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        for fill in (0.0, 5.0, float("nan"), float("-inf")):
            images = IMAGES.clone()
            images[1, 2, 3, 4] = fill
            call(images)

    expected = run({"checked": CHECK}, None, model=Images(), loop=loop)
    found = run({"checked": CHECK}, "aot_eager", model=Images(), loop=loop)
    assert_same(found[0], expected[0])


def test_a_check_keeps_nothing_more_for_the_backward_pass() -> None:
    kept: list[list[str]] = []

    def forward(graph: GraphModule, inputs: Any) -> Any:
        values = [node.meta["val"] for node in graph.graph.output_node().args[0]]
        kept.append(sorted(f"{x.dtype} {x.shape}" for x in values if x.numel() > 100))
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(Images(), backend=backend)(IMAGES)
    with hookrun.hooked(Images(), {"hooks": {"checked": CHECK}}) as hooks:
        hooks.compile(backend=backend)(IMAGES)
    bare, checked = kept
    assert checked == bare


def test_gradients_of_a_graph_have_no_last_good() -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        loss_of(call(batch(0))).backward()

    gradients = {**CHECK, "select": "**", "hook": "grad", "max": 0.08}
    expected, _ = run({"gradients": gradients}, None, loop=loop)
    found, _ = run({"gradients": gradients}, "aot_eager", loop=loop)
    assert {record["module"] for record in found} == {record["module"] for record in expected}
    assert any(record["last_good"] for record in expected)
    assert not any(record["last_good"] for record in found), "torch's order is not that of the backward pass"


def test_edits_of_gradients_count_in_backward_passes_that_follow_each_other() -> None:
    hooks_of = {
        "all": {"select": "block.0", "hook": "output_grad", "action": "scale", "factor": 3},
        "some": {
            "select": "head",
            "hook": "output_grad",
            "action": "scale",
            "factor": 2,
            "when": {"step": {"every": 2}},
        },
    }
    eager, compiled = Net(), Net()
    expected = run(hooks_of, None, model=eager)
    assert run(hooks_of, "aot_eager", model=compiled)[1] == expected[1]
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("hook", ["forward", "output_grad"])
def test_on_off_and_on_again_is_one_graph(hook: str) -> None:
    hooks_of = {
        "some": {**STATS, "select": "head", "hook": hook, "when": {"step": {"every": 2}}},
        "all": STATS,
    }
    expected = run(hooks_of, None)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = run(hooks_of, "aot_eager")
    assert {record["step"] for record in found[0] if record["hook"] == "some"} == {0, 2}
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_without_due_observers_runs_the_bare_graph(*, checkpointed: bool) -> None:
    computed: list[list[Any]] = []  # by the graph that was called

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        nodes = [node for part in parts for node in part.graph.nodes if node.op.startswith("call")]
        targets = [node.target for node in nodes if node.target != "detach"]  # which computes nothing

        def call(*values: Any) -> Any:
            computed.append(targets)
            return graph(*values)

        return call

    hooks_of = {
        "s": {**STATS, "when": {"step": {"every": 2}}},
        "c": {"select": "head", "hook": "forward_pre", "action": "capture", "when": {"step": {"every": 3}}},
    }
    with hookrun.hooked(Net(checkpointed=checkpointed), {"hooks": hooks_of}) as hooks:
        call = hooks.compile(backend=backend, fullgraph=True)
        for step in range(6):
            call(batch(step))
            hooks.step()
    torch._dynamo.reset()
    torch.compile(Net(checkpointed=checkpointed), backend=backend, fullgraph=True)(batch(0))
    *of_steps, bare = computed
    assert [targets == bare for targets in of_steps] == [False, True, False, False, False, True]
    assert {record["step"] for record in hooks.records} == {0, 2, 4}
    assert len(hooks.captures["c"]["head"]) == 2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_scheduled_observers_are_in_the_order_of_eager(checkpointed: bool) -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        loss_of(call(batch(0))).backward()

    inside = {**STATS, "select": ["block.0", "block.1", "head"]}
    hooks_of = {
        "all": inside,
        "some": {**inside, "when": {"step": {"every": 2}}},
        "gradients": {**inside, "hook": "output_grad"},
    }
    expected = run(hooks_of, None, model=Net(checkpointed=checkpointed), loop=loop)
    found = run(hooks_of, "aot_eager", model=Net(checkpointed=checkpointed), loop=loop)
    assert_same(found[0], expected[0])
    assert {count for (hook, path), count in found[1].items() if path == "block.1"} == {2}


def test_gradients_in_a_graph_are_without_the_factor_of_the_scaler() -> None:
    def trained_in_half(*, compiles: bool) -> list[dict[str, Any]]:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = {"select": ["block.0", "head"], "hook": "output_grad"}
        hooks_of = {"s": {**STATS, **gradients}, "c": {**CHECK, **gradients}}
        with hookrun.hooked(model, {"hooks": hooks_of}, scaler=scaler) as hooks:
            call = hooks.compile(backend="aot_eager", fullgraph=True) if compiles else model
            for step in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(call(batch(step)))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return [dict(record) for record in hooks.records]

    assert_same(trained_in_half(compiles=True), trained_in_half(compiles=False))


def test_each_mode_and_shape_records_in_its_graph() -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        for rows in (5, 3, 5):
            loss_of(call(batch(rows, rows))).backward()
        model.eval()
        with torch.no_grad():
            call(batch(9))

    hooks_of = {"all": STATS, "train": {**STATS, "select": "head", "when": {"mode": "train"}}}
    expected = run(hooks_of, None, loop=loop)
    found = run(hooks_of, "eager", loop=loop)
    assert [record["mode"] for record in found[0]] == [record["mode"] for record in expected[0]]
    assert_same(found[0], expected[0])
    assert found[1] == expected[1]


def test_a_graph_of_torch_compile_records_too() -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        trained(model, compiled)

    inside = {**STATS, "select": ["block", "head"]}
    hooks_of = {"outputs": inside, "gradients": {**inside, "hook": "output_grad"}}
    assert_same(run(hooks_of, None, loop=loop)[0], run(hooks_of, None)[0])


class Odd(nn.Module):
    """Returns tensors of many kinds, one of them empty."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "complex": torch.complex(x, -x),
            "float8": x.to(torch.float8_e4m3fn),
            "bfloat16": x.to(torch.bfloat16),
            "integers": (x * 4).long(),
            "empty": x[:0],
            "one": x[:1, :1],
            "nan": x / 0 * 0,
            "none": None,
        }


def test_tensors_of_every_kind_have_the_numbers_of_eager() -> None:
    def loop(model: nn.Module, call: Callable[..., Any]) -> None:
        call(batch(0))

    hooks_of = {
        "all": {**STATS, "select": "", "of": ["mean", "std", "min", "max", "nans", "bytes", "underflows"]},
        "integers": {
            **STATS,
            "select": "",
            "target": "integers",
            "of": ["min", "max", "mean", {"counts": 4}],
        },
        "rows": {**STATS, "select": "", "target": "integers", "of": ["max"], "dim": 0},
        "checked": {**CHECK, "select": ""},
    }
    expected = run(hooks_of, None, model=Odd(), loop=loop)
    assert_same(run(hooks_of, "aot_eager", model=Odd(), loop=loop)[0], expected[0])


def test_a_failed_check_raises_at_the_end_of_the_step() -> None:
    model = Net()
    with hookrun.hooked(model, {"hooks": {"c": {**CHECK, "policy": "error"}}}) as hooks:
        call = hooks.compile(backend="eager")
        hooks.step()
        loss_of(call(batch(0))).backward()
        with pytest.raises(
            hookrun.CheckFailed,
            match=r"'c' \(forward, check\) on block\.0 \(Linear\), epoch 0, step 1: expected",
        ):
            hooks.step()
    assert [record["module"] for record in hooks.records][:2] == ["block.0", "block.1"]


def test_a_failed_check_stops_the_run_as_in_eager() -> None:
    stopped = []
    for compiles in (False, True):
        model = Net()
        with hookrun.hooked(model, {"hooks": {"c": {**CHECK, "policy": "stop"}}}) as hooks:
            call = hooks.compile(backend="eager") if compiles else model
            call(batch(0))
            stopped.append(hooks.stopped)
    assert stopped[0] == stopped[1] is not None


def test_nothing_is_lost_when_an_exception_leaves_the_block() -> None:
    model = Net()
    hooks_of = {"c": {**CHECK, "policy": "error"}, "s": {**STATS, "select": "head"}}
    with pytest.raises(KeyError), hookrun.hooked(model, {"hooks": hooks_of}) as hooks:
        hooks.compile(backend="eager")(batch(0))
        raise KeyError
    assert {record["hook"] for record in hooks.records} == {"c", "s"}


def test_outputs_are_those_of_the_compiled_model() -> None:
    bare = Net()
    expected = torch.compile(bare, backend="aot_eager")(batch(0))
    loss_of(expected).backward()
    model = Net()
    with hookrun.hooked(
        model, {"hooks": {"s": STATS, "g": {**STATS, "select": "head", "hook": "output_grad"}}}
    ) as hooks:
        found = hooks.compile(backend="aot_eager")(batch(0))
        loss_of(found).backward()
    assert all(map(torch.equal, found, expected))
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "reduce-overhead"}, "reduce-overhead"),
        ({"options": {"triton.cudagraphs": True}}, "cudagraphs"),
        ({"backend": "cudagraphs"}, "cudagraphs"),
    ],
    ids=["mode", "option", "backend"],
)
def test_cuda_graphs_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with (
        hookrun.hooked(Net(), {"hooks": {"s": STATS}}) as hooks,
        pytest.raises(hookrun.CompileError, match=f"{named} uses CUDA graphs"),
    ):
        hooks.compile(**options)


def test_an_exported_program_refuses_observers() -> None:
    model = Net()
    with (
        hookrun.hooked(model, {"hooks": {"s": STATS}}),
        pytest.raises(hookrun.CompileError, match="an exported program does not have"),
    ):
        torch.export.export(model, (batch(0),), strict=True)
