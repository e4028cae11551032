"""The base of the callbacks: each pass of a loop has hooks, a run directory, and the loop's own steps."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import hookrun
from hookrun.integrations.recording import LoopFollower

HOOKS = {"seen": {"select": "fc", "hook": "forward", "action": "capture"}}


def net() -> nn.Module:
    return nn.Sequential(OrderedDict(fc=nn.Linear(3, 2)))


def test_a_second_run_has_its_own_directory(tmp_path) -> None:
    model = net()
    follower = LoopFollower(HOOKS, tmp_path / "run")
    for number in range(2):
        follower.begin(model)
        follower.epoch(number)
        follower.batch(torch.zeros(4, 3), "train")
        model(torch.full((4, 3), float(number)))
        follower.write("train", {"loss": 0.5, "split": 2, "text": "no number"})
        follower.end()
        assert follower.following is None
        assert not model.fc._forward_hooks
    assert follower.run_dirs == [tmp_path / "run", tmp_path / "run-2"]
    for number, path in enumerate(follower.run_dirs):
        run = hookrun.open_run(path)
        captured = run.captures["seen"]["fc"]
        assert captured.sample_ids.tolist() == [0, 1, 2, 3]
        assert captured.epochs.unique().tolist() == [number]
        assert [line["loss"] for line in run.metrics] == [0.5]
        assert run.metrics[0]["logged_split"] == 2
        assert run.status["status"] == "done"


def test_a_validation_has_its_own_steps(tmp_path) -> None:
    follower = LoopFollower(HOOKS, tmp_path / "run")
    hooks = follower.begin(net())
    hooks.clock.step = 7
    hooks.numbered = 28
    with pytest.raises(RuntimeError, match="in the middle"), follower.evaluating():
        follower.evaluated_batch()
        assert hooks.clock.step == 1
        assert hooks.numbered == 0
        raise RuntimeError("in the middle")
    assert hooks.clock.step == 7
    assert hooks.numbered == 28
    follower.end()


def test_apply_hooks_act_once_on_each_model(tmp_path) -> None:
    hooks = {"ones": {"select": "fc", "hook": "apply", "action": "init", "name": "ones_"}}
    follower = LoopFollower(hooks, tmp_path / "run")
    first = net()
    second = net()
    found = []
    for model in (first, second, first, second):
        follower.begin(model)
        found += model.fc.weight.unique().tolist()
        model.fc.weight.data.fill_(2)
        follower.end()
    assert found == [1, 1, 2, 2]


def test_a_copy_of_a_callback_follows_a_loop_of_its_own(tmp_path) -> None:
    follower = LoopFollower(HOOKS, tmp_path / "run")
    follower.begin(net())
    copied = pickle.loads(pickle.dumps(follower))
    follower.end()
    assert copied.following is None
    copied.begin(net())
    copied.end()
    assert [path.name for path in copied.run_dirs] == ["run", "run-2"]


@pytest.mark.parametrize("library", ["lightning", "transformers", "lm_eval", "inspect_ai"])
def test_without_its_library_an_integration_says_what_to_install(library: str, without) -> None:
    without(library)
    extra = library.removesuffix("_ai")
    with pytest.raises(ImportError, match=rf"pip install 'hookrun\[{extra}\]'") as caught:
        getattr(hookrun.integrations, library)
    assert isinstance(caught.value, hookrun.HookrunError)
