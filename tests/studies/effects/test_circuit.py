"""task=effects with `circuit`: each set of kept cells equals a plain forward pass in which all others are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookrun
from hookrun.cli import main
from hookrun.report import write_report
from hookrun.store.studies import answer_of
from hookrun.studies.effects import cells
from hookrun.studies.effects.records import Effects

NAMES = ("model=decoder", "model.args={layers: 2, heads: 4, width: 16}", "data=names", "data.args.val_size=6")
SWAPPED = "data.args.form=swapped"
SEEN = "+hooks.seen={select: 'blocks.*.attn.z', hook: forward, action: capture}"
HEADS = (
    "task=effects", "task.hook=h", "task.over={module: each, heads: each}", "task.metric=loss",
    "+hooks.h={select: 'blocks.*.attn.z', hook: forward, action: replace, value: 0}",
    "+hooks.louder={select: 'blocks.*.attn.z', hook: forward, action: scale, factor: 50, priority: 1}",
)  # fmt: skip
DIGITS = ("model=mlp", "data.batch_size=5", "train.limit_batches=3")
CHANNELS = (
    "task=effects", "task.hook=h", "task.over={module: [layers.1, fc], index: [':, 0:4', ':, 3:6', ':, 7']}",
    "task.metric=loss", "+hooks.h={hook: forward, action: scale, factor: 0.5}", *DIGITS,
)  # fmt: skip


@pytest.fixture
def corrupt(executed: Any) -> str:
    """The run whose values replace the cells."""
    return str(executed("task=predict", *NAMES, SWAPPED, SEEN, "data.batch_size=3").path)


def test_kept_heads_equal_path_patching_by_hand(executed: Any, corrupt: str) -> None:
    circuit = f"task.circuit={{sizes: [8, 3, 1, 0], rest: {{run: {corrupt}}}, chance: 5}}"
    made = executed(*HEADS, *NAMES, circuit, "task.method=gradient", "data.batch_size=4")
    found = made.effects
    assert found.sizes == [8, 3, 1, 0]
    order = (found["gradient"] - found["unedited"]).abs().flatten().argsort(descending=True).tolist()
    by_hand = PatchedHeads()
    for place, size in enumerate(found.sizes):
        assert float(losses(found)[place]) == pytest.approx(by_hand.loss(order[:size]), abs=1e-5)
    assert found["circuit"][[0, 3]].tolist() == [1, 0]
    assert found["circuit_chance"].shape == (5, 4)
    for place, size in ((1, 3), (2, 1)):
        possible = [by_hand.loss(kept) for kept in itertools.combinations(range(8), size)]
        for value in losses(found, "circuit_chance")[:, place].tolist():
            assert min(abs(value - each) for each in possible) < 1e-5
    assert len(found["circuit_chance"][:, 2].unique()) > 1, "random sets differ"
    again = executed(*HEADS, *NAMES, circuit, "task.method=gradient", "data.batch_size=1").effects
    for name in ("circuit", "circuit_chance"):
        torch.testing.assert_close(losses(again, name), losses(found, name), rtol=0, atol=1e-5)


def test_exact_values_rank_where_they_stand_alone(executed: Any) -> None:
    circuit = "task.circuit={sizes: [2, 4], rest: 0.25}"
    made = executed(*CHANNELS, circuit)
    found = made.effects
    told = answer_of(made)["circuit"]
    assert told == [
        {"size": size, "faithfulness": value}
        for size, value in zip((2, 4), found["circuit"].tolist(), strict=True)
    ]
    assert "circuit_chance" not in found
    order = (found["exact"] - found["unedited"]).abs().flatten().argsort(descending=True).tolist()
    for place, size in enumerate((2, 4)):
        wanted = channels_by_hand(order[:size], lambda value: torch.full_like(value, 0.25))
        assert float(found["circuit"][place]) == pytest.approx(wanted, abs=1e-5)


def test_the_rest_may_be_a_mean_over_samples(executed: Any) -> None:
    seen = "+hooks.seen={select: [layers.1, fc], hook: forward, action: capture}"
    other = executed("task=predict", seen, *DIGITS)
    circuit = f"task.circuit={{sizes: 3, rest: {{run: {other.path}, sample: mean}}}}"
    found = executed(*CHANNELS, circuit).effects
    order = (found["exact"] - found["unedited"]).abs().flatten().argsort(descending=True).tolist()
    means = {path: other.captures["seen"][path][:].mean(0) for path in ("layers.1", "fc")}
    wanted = channels_by_hand(
        order[:3], lambda value: means["fc" if value.shape[1] == 10 else "layers.1"].expand_as(value)
    )
    assert float(found["circuit"][0]) == pytest.approx(wanted, abs=1e-5)


def test_whole_modules_are_replaced_from_a_run(executed: Any, ready: Any) -> None:
    """Of a module and one inside it, the outer one silences the inner one, which the plan says."""
    seen = "+hooks.seen={select: [layers, layers.1], hook: forward, action: capture}"
    louder = "+hooks.louder={select: layers.0, hook: forward, action: scale, factor: 3}"
    other = executed("task=predict", seen, louder, *DIGITS)
    task = (*CHANNELS, "task.over={module: [layers, layers.1]}", "~task.over.index")
    circuit = f"task.circuit={{sizes: [0, 1, 2], rest: {{run: {other.path}}}}}"
    found = executed(*task, circuit).effects
    kept = ("layers", "layers.1")[int((found["exact"] - found["unedited"]).abs().argmax())]
    model, data = hookrun.build(overrides=["compute.device=cpu", *DIGITS])
    (replaced,) = {"layers", "layers.1"} - {kept}
    rows = iter(other.captures["seen"][replaced][:].split(5))
    model.get_submodule(replaced).register_forward_hook(lambda m, a, out: next(rows))
    batches = itertools.islice(data.loader("val"), 3)
    with torch.no_grad():
        values = [F.cross_entropy(model(batch.inputs), batch.target, reduction="none") for batch in batches]
    assert float(losses(found)[1]) == pytest.approx(float(torch.cat(values).double().mean()), abs=1e-5)
    assert "other modules of the grid are inside layers, " in "\n".join(ready(*task, circuit).lines)


def test_a_rest_that_is_padded_otherwise_is_refused(executed: Any, refused: Any) -> None:
    tokens = ("model=decoder", "model.args={layers: 1, heads: 2, width: 8}", "data=repeated_tokens")
    small = (*tokens, "data.args={half: [2, 3], val_size: 2}")
    other = executed("task=predict", *small, SEEN)
    circuit = f"task.circuit={{sizes: 1, rest: {{run: {other.path}}}}}"
    said = refused(*HEADS, *small, "data.args.padding=left", circuit)
    assert "task.circuit.rest: " in said
    assert "data.args.padding is 'right' there and 'left' here" in said


def test_the_calls_of_a_block_are_kept_one_by_one(executed: Any, trusted: Any) -> None:
    trusted(nets=TWICE)
    net = ("model=python", "model.factory=nets:Twice", *DIGITS[1:])
    other = executed("task=predict", "+hooks.seen={select: '', hook: forward, action: capture}", *net)
    moved = "+hooks.h={select: core, hook: forward, action: scale, factor: 0}"
    task = ("task=effects", "task.hook=h", "task.over={call: each}", "task.metric=loss", moved)
    found = executed(*task, *net, "task.circuit={sizes: [1], rest: -0.5}").effects
    strongest = int((found["exact"] - found["unedited"]).abs().argmax())
    model, data = hookrun.build(overrides=["compute.device=cpu", *net])
    calls = itertools.count()
    model.core.register_forward_hook(
        lambda m, a, out: out if next(calls) % 2 == strongest else torch.full_like(out, -0.5)
    )
    batches = itertools.islice(data.loader("val"), 3)
    with torch.no_grad():
        values = [F.cross_entropy(model(batch.inputs), batch.target, reduction="none") for batch in batches]
    assert float(losses(found)[0]) == pytest.approx(float(torch.cat(values).double().mean()), abs=1e-6)
    with pytest.raises(hookrun.HookrunError, match="core was not captured by 'seen'"):
        executed(*task, *net, f"task.circuit={{sizes: [1], rest: {{run: {other.path}}}}}")


@pytest.mark.parametrize("kind", ["calls b again", "branches on values", "depends on the batch"])
def test_sets_are_right_on_a_model_that(kind: str, executed: Any, trusted: Any) -> None:
    trusted(nets=NET)
    net = ("model=python", "model.factory=nets:Net", f"+model.args={{kind: {kind}}}", *DIGITS[1:])
    circuit = "task.circuit={sizes: [1, 5], rest: 0.25, chance: 5}"
    task = (*CHANNELS[:-3], *net, "task.over.module=[a, b]", "task.method=gradient")
    found = executed(*task, circuit).effects

    rest = lambda value: torch.full_like(value, 0.25)  # noqa: E731
    strongest = found.by_strength()
    for place, size in enumerate((1, 5)):
        values = dict[tuple[int, ...], float]()
        for kept in itertools.combinations(range(6), size):
            values[kept] = channels_by_hand(kept, rest, ("a", "b"), net)
        wanted = values[tuple(sorted(strongest[:size]))]
        assert float(found["circuit"][place]) == pytest.approx(wanted, abs=1e-5)
        distances = found["circuit_chance"][:, place, None] - torch.tensor(list(values.values()))
        assert distances.abs().amin(1).amax() < 1e-5


def test_a_run_cut_off_among_circuits_ends_equal(run: Any, executed: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(cells, "SECONDS", 0.0)
    noise = "+hooks.noise={select: layers.0, hook: forward, action: noise, std: 0.2, priority: -1}"
    arguments = (*CHANNELS, noise, "task.circuit={sizes: [1, 3, 4], rest: 0, chance: 3}")
    whole = executed(*arguments)
    passes = itertools.count()
    compute = cells.Cells._pass

    def killed(self: Any, *given: Any) -> None:
        if self._again and next(passes) == 2:
            raise RuntimeError("the machine is gone")
        compute(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(cells.Cells, "_pass", killed)
        with pytest.raises(AssertionError):
            run(*arguments)
    assert main(["resume=run1"]) == 0
    for name in ("effects.csv", "effects.safetensors"):
        assert ((whole.path.parent / "run1" / name).read_bytes()) == (whole.path / name).read_bytes()


def test_equal_metrics_leave_no_faithfulness(executed: Any, capsys: Any) -> None:
    after = "+hooks.after={select: fc, hook: forward, action: replace, value: 1, priority: 1}"
    made = executed(*CHANNELS, after, "task.circuit={sizes: [1, 2], rest: 0, chance: 2}")
    assert made.effects["circuit"].isnan().all()
    assert made.effects["circuit_chance"].isnan().all()
    said = (
        "circuit: without a value, since loss is 2.30259 without the hook and 2.30259 with all cells replaced"
    )
    assert said in capsys.readouterr().out
    assert said in write_report(made.path).read_text()


def test_the_page_draws_faithfulness_beside_chance(executed: Any) -> None:
    made = executed(*CHANNELS, "task.circuit={sizes: [3, 0, 6], rest: 0, chance: 2}")
    page = write_report(made.path).read_text()
    assert "faithfulness of circuits" in page
    assert "band: from the smallest to the largest value of 2 random sets" in page
    assert "the strongest first: " in page
    assert hookrun.open_run(made.path).effects["circuit"].equal(made.effects["circuit"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("task.circuit={sizes: [7], rest: 0}",),
            "task.circuit.sizes.0: 7 cells cannot be kept: the grid has 6",
        ),
        (("task.circuit={sizes: [1]}",), "task.circuit.rest: is missing"),
        (("task.circuit={sizes: [-1], rest: 0}",), "task.circuit.sizes.0"),
        (("task.circuit={sizes: [1], rest: {run: nowhere}}",), "task.circuit.rest.run: there is no"),
        (("task.circuit={sizes: [1], rest: [1.0, 2.0]}",), "task.circuit.rest: on layers.1"),
        (
            ("task.circuit={sizes: [1], rest: {from: 0, to: 1, steps: [0, 3]}}",),
            "is not the same in each pass",
        ),
        (("task.circuit={size: [1], rest: 0}",), "did you mean 'sizes'?"),
        (
            ("task.circuit={sizes: [1], rest: 0}", "+task.over.factor=[0.0, 2.0]"),
            "task.over.factor: a circuit replaces places, and cells that differ in factor only are at the same place",
        ),
        (("task.circuit={sizes: [1], rest: 0}", "+hooks.h.when={probability: 0.5}"), "hooks.h.when"),
    ],
)
def test_a_circuit_that_cannot_be_computed_is_refused(
    words: tuple[str, ...], said: str, refused: Any
) -> None:
    assert said in refused(*CHANNELS, *words)


TWICE = """
    import torch
    from torch import nn


    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.start, self.core, self.end = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

        def forward(self, x):
            return self.end(self.core(torch.tanh(self.core(self.start(x.flatten(1))))))
"""


NET = """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self, kind):
            super().__init__()
            torch.manual_seed(0)
            self.kind = kind
            self.a, self.b, self.c = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

        def forward(self, x):
            first = torch.tanh(self.a(x.flatten(1)))
            value = self.b(first)
            if self.kind == "calls b again":
                value = self.b(value) + first
            if self.kind == "branches on values" and value.sum() > 0:
                value = self.b(value)
            if self.kind == "depends on the batch":
                value = value - value.mean(0)
            return self.c(value)
"""


class PatchedHeads:
    """The logit difference with some heads, and those of the swapped sentences in place of the others."""

    def __init__(self) -> None:
        self.model, clean = hookrun.build(overrides=["compute.device=cpu", *NAMES, "data.batch_size=6"])
        _, other = hookrun.build(overrides=["compute.device=cpu", *NAMES, SWAPPED, "data.batch_size=6"])
        (self.batch,) = clean.loader("val")
        (swapped,) = other.loader("val")
        self.model.eval()
        self.kept: Collection[int] = range(8)
        self.rest: list[Tensor] = []
        handles = [
            block.attn.z.register_forward_hook(lambda m, a, out: self.rest.append(out))
            for block in self.model.blocks
        ]
        with torch.no_grad():
            self.model(**swapped.inputs)
        for handle in handles:
            handle.remove()
        for layer, block in enumerate(self.model.blocks):
            block.attn.z.register_forward_hook(lambda m, a, out, layer=layer: self.patched(layer, out))

    def patched(self, layer: int, value: Tensor) -> Tensor:
        value = value.clone()
        for head in range(4):
            if 4 * layer + head not in self.kept:
                value[:, :, head] = self.rest[layer][:, :, head]
        return 50 * value

    @torch.no_grad()
    def loss(self, kept: Collection[int]) -> float:
        self.kept = kept
        losses = F.cross_entropy(
            self.model(**self.batch.inputs).transpose(1, 2), self.batch.target, reduction="none"
        )
        return float((losses.sum(1) / (self.batch.target != -100).sum(1)).double().mean())


def losses(found: Effects, name: str = "circuit") -> Tensor:
    """The metric from which the faithfulness was computed."""
    return found["replaced"] + found[name] * (found["unedited"] - found["replaced"])


@torch.no_grad()
def channels_by_hand(
    kept: Collection[int],
    rest: Callable[[Tensor], Tensor],
    paths: Sequence[str] = ("layers.1", "fc"),
    net: Sequence[str] = DIGITS,
) -> float:
    """The faithfulness of some of the six cells of CHANNELS."""
    model, data = hookrun.build(overrides=["compute.device=cpu", *net])
    model.eval()
    batches = list(itertools.islice(data.loader("val"), 3))

    def loss(kept: Collection[int]) -> float:
        handles = []
        for row, path in enumerate(paths):

            def patched(module: nn.Module, args: Any, value: Tensor, row: int = row) -> Tensor:
                value, other = value.clone(), rest(value)
                for column, channels in enumerate((range(4), range(3, 6), [7])):
                    if 3 * row + column not in kept:
                        value[:, list(channels)] = other[:, list(channels)]
                return value

            handles.append(model.get_submodule(path).register_forward_hook(patched))
        losses = [F.cross_entropy(model(batch.inputs), batch.target, reduction="none") for batch in batches]
        for handle in handles:
            handle.remove()
        return float(torch.cat(losses).double().mean())

    replaced = loss([])
    return (loss(kept) - replaced) / (loss(range(6)) - replaced)
