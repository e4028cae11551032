"""Which dimension is the batch in a loop of one's own, where no trial run was made before."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from draws import normal
from hooking import one_hook
from small_nets import Net
from torch import Tensor, nn

import hookrun


def steps_first(model: Any, x: Tensor) -> Tensor:
    output, _ = model.rnn(x.transpose(0, 1))
    return model.head(model.act(output)[-1])  # type: ignore[no-any-return]


def net(forward: Any = steps_first) -> Net:
    torch.manual_seed(0)
    return Net(forward, rnn=nn.LSTM(3, 5), act=nn.Tanh(), head=nn.Linear(5, 2))


def activations(model: Net, x: Tensor) -> Tensor:
    """[samples, steps, 5]: what `act` returns, with the batch first."""
    with torch.no_grad():
        return torch.tanh(model.rnn(x.transpose(0, 1))[0]).transpose(0, 1)


X = normal(4, 4, 3)
"""As many steps as samples."""


def test_the_first_call_shows_it(tmp_path: Path) -> None:
    model = net()
    with hookrun.record(model, one_hook("act"), tmp_path / "run") as hooks:
        for number in range(2):
            hooks.samples = [4 * number + place for place in range(4)]
            model(X + number)
    found = hookrun.open_run(tmp_path / "run").captures["h"]["act"]
    torch.testing.assert_close(found[:], torch.cat([activations(model, X), activations(model, X + 1)]))
    assert found.sample_ids.tolist() == [*range(8)]


def test_the_first_call_of_a_part_shows_it(tmp_path: Path) -> None:
    model = Net(lambda model, x: model.inner(x), inner=net(), other=nn.Linear(3, 2))
    spec = {**one_hook("inner.act"), "o": {"select": "other", "hook": "forward", "action": "capture"}}
    with hookrun.record(model, spec, tmp_path / "run"):
        model.inner(X)  # type: ignore[operator]
        model.other(X[:, 0])  # type: ignore[operator]
    captures = hookrun.open_run(tmp_path / "run").captures
    torch.testing.assert_close(captures["h"]["inner.act"][:], activations(model.inner, X))  # type: ignore[arg-type]
    assert captures["o"]["other"].sample_ids.tolist() == [*range(4)]


def by_value(model: Any, x: Tensor) -> Tensor:
    """What it does depends on numbers, which fake tensors do not have."""
    return steps_first(model, x if float(x.sum()) < 1e9 else -x)


def of_four(model: Any, x: Tensor) -> Tensor:
    """It runs with one size of the batch only."""
    return steps_first(model, x.view(4, 4, 3))


def test_the_first_call_shows_dependence_on_numbers(tmp_path: Path) -> None:
    model = net(by_value)
    with hookrun.record(model, one_hook("act"), tmp_path / "run"):
        model(X)
    found = hookrun.open_run(tmp_path / "run").captures["h"]["act"]
    torch.testing.assert_close(found[:], activations(model, X))


def test_where_nothing_shows_it_a_warning_names_the_captures(tmp_path: Path) -> None:
    model = net(of_four)
    with (
        pytest.warns(
            hookrun.HookrunWarning,
            match=r"h has captured a row for each firing on act.*by batch_dim in hooks.h",
        ),
        hookrun.record(model, one_hook("act"), tmp_path / "run"),
    ):
        model(X)
    assert hookrun.open_run(tmp_path / "run").captures["h"]["act"].sample_ids.tolist() == [-1]


def test_batch_dim_says_it(tmp_path: Path) -> None:
    model = net(of_four)
    with hookrun.record(model, one_hook("act", batch_dim=1), tmp_path / "run"):
        model(X)
    found = hookrun.open_run(tmp_path / "run").captures["h"]["act"]
    torch.testing.assert_close(found[:], activations(model, X))
    assert found.sample_ids.tolist() == [*range(4)]


def call_parts(model: Any, x: Tensor) -> None:
    """Call the parts one after the other, as a `training_step` does, which is not the model's forward."""
    model.head(model.act(model.rnn(x.transpose(0, 1))[0])[-1])


def test_parts_of_a_model_with_the_steps_first_may_have_them_too(tmp_path: Path) -> None:
    model = net()
    spec = {**one_hook("act"), "said": one_hook("act", batch_dim=1)["h"], "o": one_hook("head")["h"]}
    with (
        pytest.warns(hookrun.HookrunWarning, match="h has captured a row for each firing on act"),
        hookrun.record(model, spec, tmp_path / "run") as hooks,
    ):
        hooks.samples = [5, 6, 7, 8]
        call_parts(model, X)
    captures = hookrun.open_run(tmp_path / "run").captures
    assert captures["h"]["act"].sample_ids.tolist() == [-1]
    torch.testing.assert_close(captures["said"]["act"][:], activations(model, X))
    for found in (captures["said"]["act"], captures["o"]["head"]):
        assert found.sample_ids.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "keys",
    [
        {"action": "scale", "factor": 0, "when": {"value": {"of": "norm", "above": 0}}},
        {"action": "flip_bits", "bits": [31], "count": 1, "per": "sample"},
    ],
    ids=["when", "per"],
)
def test_edits_by_sample_tell_which_dimension_they_take(keys: dict[str, Any]) -> None:
    model = net(of_four)
    told = pytest.warns(hookrun.HookrunWarning, match=r"first dimension for the batch on act.*batch_dim")
    with told, hookrun.hooked(model, one_hook("act", **keys)):
        model(X)
    with hookrun.hooked(model, one_hook("act", **keys, batch_dim=1)):
        model(X)


@pytest.mark.parametrize("of", ["shown by the call", "said"])
def test_conditions_by_value_are_those_of_samples(of: str) -> None:
    model = net(steps_first if of == "shown by the call" else of_four)
    norms = activations(model, X).flatten(1).norm(dim=1)
    above = float(norms.median())
    when = {"value": {"of": "norm", "above": above}}
    keys: dict[str, Any] = {} if of == "shown by the call" else {"batch_dim": 1}
    with hookrun.hooked(model, one_hook("act", action="scale", factor=0, when=when, **keys)), torch.no_grad():
        found = model(X)
    kept = activations(model, X) * (norms <= above)[:, None, None]
    torch.testing.assert_close(found, model.head(kept[:, -1]).detach())


def test_a_loop_may_have_the_steps_first_too(tmp_path: Path) -> None:
    model = Net(lambda model, x: model.head(model.rnn(x)[0]), rnn=nn.LSTM(3, 5), head=nn.Linear(5, 2))
    with hookrun.record(model, one_hook("head"), tmp_path / "run"):
        model(normal(7, 4, 3))
        model(normal(4, 4, 3))
    found = hookrun.open_run(tmp_path / "run").captures["h"]["head"]
    assert found.sample_ids.tolist() == [*range(8)]
    with hookrun.record(model, one_hook("head"), tmp_path / "other") as hooks:
        hooks.samples = [5, 1, 2, 3]
        model(normal(7, 4, 3))
    assert hookrun.open_run(tmp_path / "other").captures["h"]["head"].sample_ids.tolist() == [1, 2, 3, 5]


def test_an_example_may_have_the_steps_first() -> None:
    model = net(lambda model, x: model.head(model.rnn(x)[0]))
    plan = hookrun.compile(one_hook("head"), model, example=((normal(4, 4, 3),), {}))
    assert "h: batch dimension 1, on head" in str(plan)


@pytest.mark.parametrize("steps", [7, 4])
def test_masks_of_padding_have_the_samples_first(tmp_path: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, 8).eval()
    x = normal(steps, 4, 6)
    mask = torch.arange(steps) >= torch.tensor([[2], [3], [1], [4]])
    with hookrun.record(model, one_hook("norm1"), tmp_path / "run"), torch.no_grad():
        model(x, src_key_padding_mask=mask)
    found = hookrun.open_run(tmp_path / "run").captures["h"]["norm1"]
    with hookrun.hooked(model, one_hook("norm1")) as hooks, torch.no_grad():
        model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[:], hooks.captures["h"]["norm1"][0].transpose(0, 1))
    plan = hookrun.compile(one_hook("norm1"), model, example=((x,), {"src_key_padding_mask": mask}))
    assert "h: batch dimension 1, on norm1" in str(plan)


def timed(model: Any, time: Tensor, x: Tensor) -> Tensor:
    """What has one row for the whole batch is its first argument."""
    return model.time(time) + model.x(x)  # type: ignore[no-any-return]


def timed_net() -> Net:
    return Net(timed, time=nn.Linear(1, 2), x=nn.Linear(3, 2))


def test_the_samples_say_which_arguments_are_batches(tmp_path: Path) -> None:
    model = timed_net()
    x = normal(4, 3)
    spec = one_hook(["x", "time"])
    with hookrun.record(model, spec, tmp_path / "run") as hooks, torch.no_grad():
        hooks.samples = [5, 6, 7, 8]
        model(torch.ones(1), x)
    found = hookrun.open_run(tmp_path / "run").captures["h"]
    torch.testing.assert_close(found["x"][:], model.x(x).detach())  # type: ignore[operator]
    assert found["x"].sample_ids.tolist() == [5, 6, 7, 8]
    assert found["time"].sample_ids.tolist() == [-1]


@pytest.mark.parametrize("keys", [{}, {"batch_dim": 0}], ids=["not said", "said"])
def test_a_first_argument_of_one_row_is_no_batch_of_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    model = timed_net()
    x = normal(4, 3)
    warned = pytest.warns(hookrun.HookrunWarning, match=r"a row for each firing on x.*set hooks\.samples")
    with warned, hookrun.record(model, one_hook("x", **keys), tmp_path / "run"), torch.no_grad():
        model(torch.ones(1), x)
    found = hookrun.open_run(tmp_path / "run").captures["h"]["x"]
    torch.testing.assert_close(found[:], model.x(x).detach()[None])  # type: ignore[operator]
    assert found.sample_ids.tolist() == [-1]


class Words(nn.Module):
    """Blocks that have the sequence first, as those of OpenAI's CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.block(self.embed(input_ids).transpose(0, 1))
        return self.head(hidden.transpose(0, 1))  # type: ignore[no-any-return]


IDS = torch.arange(9).view(3, 3)
MASK = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])


def test_tokens_are_those_of_each_sequence() -> None:
    model = Words()
    with hookrun.hooked(model, one_hook("block", tokens=0)) as hooks, torch.no_grad():
        model(IDS, attention_mask=MASK)
    hidden = model.block(model.embed(IDS)).detach()
    first = hidden[torch.arange(3), torch.tensor([0, 1, 2])]
    torch.testing.assert_close(hooks.captures["h"]["block"][0], first)


def test_an_edit_at_tokens_changes_these_alone() -> None:
    model = Words()
    with hookrun.hooked(model, one_hook("block", action="scale", factor=0, tokens=-1)), torch.no_grad():
        found = model(IDS, attention_mask=MASK)
    with torch.no_grad():
        expected = model(IDS)
        expected[:, -1] = model.head.bias
    torch.testing.assert_close(found, expected)


def test_first_calls_in_several_threads_are_all_seen_by_sample() -> None:
    model = net().eval()
    inputs = [X + number for number in range(6)]
    norms = torch.stack([activations(model, x).flatten(1).norm(dim=1) for x in inputs])
    above = float(norms.median())
    together = Barrier(len(inputs))
    found = dict[int, Tensor]()

    def call(number: int) -> None:
        together.wait()
        with torch.no_grad():
            found[number] = model(inputs[number])

    when = {"value": {"of": "norm", "above": above}}
    with hookrun.hooked(model, one_hook("act", action="scale", factor=0, when=when)):
        threads = [Thread(target=call, args=(number,)) for number in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, x in enumerate(inputs):
        kept = activations(model, x) * (norms[number] <= above)[:, None, None]
        torch.testing.assert_close(found[number], model.head(kept[:, -1]).detach())


def test_the_search_leaves_no_trace() -> None:
    model = net()
    x = X.clone()
    model.train()
    state = torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = one_hook("act", action="scale", factor=1, when={"value": {"of": "norm", "above": 0}})
    with hookrun.hooked(model, spec) as hooks:
        found = model(x)
    assert hooks.fired == {("h", "act"): 1}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for parameter in model.parameters():
        assert parameter.grad is None
    torch.testing.assert_close(found, model(x))
