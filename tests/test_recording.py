"""`hookrun.record`: hooks in a user's own loop write a run directory, with the guarantees of the command line."""

from __future__ import annotations

import copy
import gc
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookrun
from hookrun.store.lock import LockedError, sole_writer
from hookrun.store.run_dir import cut_off
from hookrun.store.verify import verify

SPEC: dict[str, Any] = {
    "clip": {"select": "2", "hook": "grad", "action": "clamp", "min": -0.01, "max": 0.01},
    "features": {"select": "0", "hook": "forward", "action": "capture"},
    "norms": {"select": "2", "hook": "grad", "action": "stats", "of": ["norm"]},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, hooks: Any = None, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(5, 4, generator=generator)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if hooks is not None:
            hooks.log(loss=loss)
        optimizer.step()


def test_it_is_hooked_with_a_run_directory(tmp_path: Path) -> None:
    recorded = network()
    hooked = network()
    before = copy.deepcopy([module._forward_hooks for module in recorded.modules()])
    with hookrun.record(recorded, SPEC, run_dir=tmp_path / "mine") as hooks:
        train(recorded, hooks)
        assert len(hooks.captures["features"]["0"]) == 15
        assert len(hooks.records) == 6
        train(recorded, steps=1)
    with hookrun.hooked(hooked, SPEC) as memory:
        train(hooked)
        train(hooked, steps=1)
    assert all(map(torch.equal, recorded.parameters(), hooked.parameters()))
    assert [module._forward_hooks for module in recorded.modules()] == before
    run = hookrun.open_run(tmp_path / "mine")
    assert run.status["status"] == "done"
    assert run.status["exit_code"] == 0
    assert torch.equal(run.captures["features"]["0"][:], torch.cat(memory.captures["features"]["0"]))
    assert torch.equal(hooks.captures["features"]["0"][:], run.captures["features"]["0"][:])
    assert run.captures["features"]["0"].sample_ids.tolist() == list(range(20)), "rows are numbered"
    assert [line["norm"] for line in run.stats] == [line["norm"] for line in memory.records]
    assert hooks.fired
    assert [(line["step"], line["split"]) for line in run.metrics] == [(n, "train") for n in range(3)]
    assert run.plan["hash"] == hooks.plan.to_dict()["hash"]
    assert run.model["class"] == "Sequential"
    assert {site["fired"] for site in run.hooks["sites"]} == {4}
    assert run.env["torch"] == torch.__version__
    found = verify(run.path)
    assert found.bad == found.notes == []
    assert not (run.path / ".lock").exists()
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "features" in page
    assert "Run it again" not in page
    (run.path / "plan.json").write_text("{}")
    assert "plan.json" in verify(run.path).bad[0]


def test_samples_name_the_rows(tmp_path: Path) -> None:
    model = network()
    with hookrun.record(model, {"features": SPEC["features"]}, run_dir=tmp_path / "mine") as hooks:
        for ids in ([7, 3], [9, 1]):
            hooks.samples, hooks.split = ids, "val"
            model(torch.tensor(ids, dtype=torch.float32).unsqueeze(1).expand(2, 4))
        with pytest.raises(hookrun.HookrunError, match="split: found 'test'"):
            hooks.split = "test"
    rows = hookrun.open_run(tmp_path / "mine").captures["features"]["0"]
    assert rows.sample_ids.tolist() == [1, 3, 7, 9]
    assert set(rows.splits) == {"val"}
    torch.testing.assert_close(rows[0], model[0](torch.ones(4)).detach())


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with hookrun.record(network(), {}, run_dir=tmp_path / "mine") as hooks:
        tensor = torch.tensor(2.0, requires_grad=True)
        hooks.log(a=1, b=np.float32(0.5), c=tensor, d=math.nan, e=-math.inf, f=True)
        hooks.log(a=1, step=0)
        hooks.log(a=1, step=0)  # a loop may log the same step twice
        hooks.log(step=torch.tensor(7), epoch=2, split="test", **{"val/loss": torch.tensor(3)})
        wrong = {
            "a str": "x",
            "a NoneType": None,
            "a list": [1.0],
            "a dict": {},
            "a complex": 1j,
            "a object": object(),
        }
        arrays = {r"a Tensor of shape \[1\]": torch.ones(1), r"a ndarray of shape \[3\]": np.ones(3)}
        for found, value in {**wrong, **arrays}.items():
            with pytest.raises(hookrun.HookrunError, match=f"log: loss: found {found}, expected a number"):
                hooks.log(loss=value)
        with pytest.raises(hookrun.HookrunError, match=r"log: loss: .* beyond 2\*\*53 is not kept exactly"):
            hooks.log(loss=2**53 + 1)
        long = "v" * 1001
        with pytest.raises(hookrun.HookrunError, match="a name of 1,001 characters"):
            hooks.log(**{long: 1})
        places = ({"step": -1}, {"step": 0.5}, {"epoch": True}, {"split": 3}, {"split": long}, {"step": "1"})
        for place in places:
            with pytest.raises(hookrun.HookrunError, match=f"log: {next(iter(place))}"):
                hooks.log(**place, loss=1.0)
        with pytest.raises(hookrun.HookrunError, match="found 0 metrics"):
            hooks.log()
        with pytest.raises(hookrun.HookrunError, match="cannot be read"):
            hooks.log(loss=torch.ones((), device="meta"))
    with pytest.raises(hookrun.HookrunError, match="has not begun or has ended"):
        hooks.log(loss=1.0)
    first, second, third, last = hookrun.open_run(tmp_path / "mine").metrics
    assert (first["a"], first["b"], first["c"], first["e"], first["f"]) == (1, 0.5, 2.0, -math.inf, True)
    assert math.isnan(first["d"])
    assert second == third
    assert verify(tmp_path / "mine").bad == []
    assert last == {"split": "test", "epoch": 2, "step": 7, "val/loss": 3}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("boom"), "failed", "ValueError: boom"),
        (KeyboardInterrupt(), "interrupted", "interrupted from the keyboard"),
        (SystemExit(0), "failed", "SystemExit: 0"),
    ],
)
def test_the_reason_of_its_end_is_in_the_status(tmp_path, error: Any, status: str, reason: str) -> None:
    model = network()
    recording = hookrun.record(model, SPEC, run_dir=tmp_path / "mine")
    with pytest.raises(type(error)) as caught, recording as hooks:
        train(model, hooks)
        running = hookrun.open_run(tmp_path / "mine").status
        assert running["status"] == "running"
        assert not cut_off(running)
        assert cut_off({**running, "pid": 2**31 - 1})
        raise error
    assert caught.value is error
    for module in model.modules():
        assert not module._forward_hooks
    run = hookrun.open_run(tmp_path / "mine")
    assert run.status["status"] == status
    assert run.status["reason"] == reason
    assert len(run.captures["features"]["0"]) == 15
    assert len(run.metrics) == 3
    assert len(run.stats) == 6
    assert run.hooks["sites"]
    assert (run.path / "report.html").exists()
    assert not (run.path / ".lock").exists()


def test_checks_stop_a_run(tmp_path: Path) -> None:
    spec = {"small": {"select": "2", "hook": "forward", "action": "check", "max": 0.0, "policy": "stop"}}
    model = network()
    with hookrun.record(model, spec, run_dir=tmp_path / "stopped") as hooks:
        model(torch.ones(2, 4))
        assert hooks.stopped
    assert hookrun.open_run(tmp_path / "stopped").status["status"] == "stopped"
    spec["small"]["policy"] = "error"
    with pytest.raises(hookrun.CheckFailed), hookrun.record(model, spec, run_dir=tmp_path / "failed"):
        model(torch.ones(2, 4))
    assert hookrun.open_run(tmp_path / "failed").status["exit_code"] == 3


def test_a_directory_has_one_run(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    model = network()
    with hookrun.record(model, {}, run_dir=tmp_path / "empty") as hooks:
        others = {"full": "it has notes.txt", "empty": "is being written by", "file": "cannot make"}
        for name, said in others.items():
            other = hookrun.record(model, {}, run_dir=tmp_path / name)
            with pytest.raises(hookrun.HookrunError, match=said), other:
                raise AssertionError("it was entered")
        hooks.log(a=1)
    for again in (hookrun.record(model, {}, run_dir=tmp_path / "empty"), hooks):
        with pytest.raises(hookrun.HookrunError, match="is not empty"), again:
            raise AssertionError("it was entered")
    assert hookrun.open_run(tmp_path / "empty").status["status"] == "done"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "~nobody-of-this-name/x", 7, b"x"])
def test_what_cannot_be_a_path_is_an_error_in_words(path: Any) -> None:
    with pytest.raises(hookrun.HookrunError, match=r"run_dir: .* cannot be a directory"):
        hookrun.record(network(), SPEC, path).__enter__()


def test_a_refused_recording_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hookrun.CompileError):
        hookrun.record(network(), {"a": {**SPEC["features"], "select": "9"}}, run_dir=tmp_path / "mine")
    hookrun.record(network(), SPEC, run_dir=tmp_path / "mine")
    assert not list(tmp_path.iterdir())
    model = network()
    plan = hookrun.record(model, SPEC, run_dir=tmp_path / "mine")
    model[2] = nn.Identity()  # the plan no longer fits when the block is entered
    with pytest.raises(hookrun.CompileError), plan:
        raise AssertionError("it was entered")
    assert hookrun.open_run(tmp_path / "mine").status["status"] == "failed"
    for module in model.modules():
        assert not module._forward_pre_hooks
    monkeypatch.chdir(tmp_path)
    with hookrun.record(model, {}) as hooks:
        pass
    assert hooks.path.parent == tmp_path / "outputs"
    assert (tmp_path / "outputs/latest").resolve() == hooks.path


def test_hooks_that_did_nothing_are_a_warning(tmp_path: Path) -> None:
    model = network()
    recording = hookrun.record(model, {"clip": SPEC["clip"]}, run_dir=tmp_path / "told")
    with pytest.warns(hookrun.HookrunWarning, match="clip never fired on 2.weight") as told, recording:
        model(torch.ones(1, 4))
    assert told[0].filename == __file__
    assert hookrun.open_run(tmp_path / "told").status["status"] == "done"
    strict = hookrun.record(model, {"clip": SPEC["clip"]}, run_dir=tmp_path / "strict", strict=True)
    with pytest.raises(hookrun.HookrunError, match="strict"), strict:
        model(torch.ones(1, 4))
    assert hookrun.open_run(tmp_path / "strict").status["status"] == "failed"


@pytest.mark.parametrize("error", [None, ValueError("of the child"), SystemExit(3)], ids=repr)
def test_a_forked_child_that_leaves_the_block_writes_nothing(tmp_path: Path, error: Any) -> None:
    model = network()
    with hookrun.record(model, SPEC, run_dir=tmp_path / "run") as hooks:
        train(model, hooks)
        assert len(hooks.captures["features"]["0"]) == 15, "the thread that writes has started"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model(torch.ones(2, 4))
                hooks.log(loss=9.0)
                hooks.captures, hooks.records  # noqa: B018
                hooks.__exit__(None if error is None else type(error), error, None)
                del hooks
                gc.collect()
                code = len(model[0]._forward_hooks)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(LockedError), sole_writer(tmp_path / "run"):
            pass
        train(model, steps=1)
    run = hookrun.open_run(tmp_path / "run")
    assert verify(tmp_path / "run").bad == []
    assert run.status["status"] == "done"
    assert len(run.captures["features"]["0"]) == 20
    assert len(run.metrics) == 3


def test_hooks_that_are_dropped_without_being_left_are_removed(tmp_path: Path) -> None:
    for install in (hookrun.hooked, lambda *given: hookrun.record(*given, tmp_path / "run")):
        model = network()
        before = copy.deepcopy([module._forward_hooks for module in model.modules()])
        hooks = install(model, SPEC).__enter__()
        model(torch.ones(2, 4))
        with pytest.warns(ResourceWarning, match="dropped without being left"):
            del hooks
        assert [module._forward_hooks for module in model.modules()] == before
        for module in model.modules():
            assert not module._forward_pre_hooks
    run = hookrun.open_run(tmp_path / "run")
    assert run.status["status"] == "failed"
    assert "dropped" in run.status["reason"]
    assert len(run.captures["features"]["0"]) == 2


def test_a_class_name_of_any_length_is_stored_shortened(tmp_path: Path) -> None:
    model = nn.Sequential(type("A" * 8_000 + "Z", (nn.Linear,), {})(4, 4))
    with hookrun.record(
        model, {"c": {"select": "0", "hook": "forward", "action": "capture"}}, tmp_path / "run"
    ):
        model(torch.ones(2, 4))
    (hook,) = hookrun.open_run(tmp_path / "run").plan["hooks"]
    assert len(hook["targets"][0]["class"]) == 201
    assert hook["targets"][0]["class"].endswith("Z")


@pytest.mark.parametrize("by_hand", [False, True])
def test_lines_after_the_step_belong_to_its_batch(tmp_path: Path, by_hand: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.record(model, {}, run_dir=tmp_path / "mine") as hooks:
        hooks.log(begins=1)
        for _ in range(2):
            loss = model(torch.ones(5, 4)).mean()
            loss.backward()
            hooks.log(before=loss)
            optimizer.step()
            if by_hand:
                hooks.step()
            hooks.log(after=loss)
        hooks.log(step=7, ends=1)
    assert [line["step"] for line in hookrun.open_run(tmp_path / "mine").metrics] == [0, 0, 0, 1, 1, 7]


SEEN: dict[str, Any] = {"s": {"select": "", "hook": "forward", "action": "stats", "of": ["mean"]}}
X = torch.ones(2, 4)


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in hookrun.open_run(path).stats]


@pytest.mark.parametrize("mode", ["eval", "no_grad", "train"])
def test_a_loop_without_an_optimizer_counts_its_batches(tmp_path: Path, mode: str) -> None:
    model = network().train(mode != "eval")
    rare = {"c": {"select": "0", "hook": "forward", "action": "capture", "when": {"step": {"every": 2}}}}
    with (
        hookrun.record(model, {**SEEN, **rare}, tmp_path / "mine") as hooks,
        torch.set_grad_enabled(mode != "no_grad"),
    ):
        for number in range(5):
            out = model(X)
            if mode == "train":
                out.sum().backward()  # gradients may be read without a training
            hooks.log(number=number)
    run = hookrun.open_run(tmp_path / "mine")
    assert steps_of(tmp_path / "mine") == [line["step"] for line in run.metrics] == [0, 1, 2, 3, 4]
    assert run.captures["c"]["0"].steps.tolist() == [0, 0, 2, 2, 4, 4]


def test_parts_that_a_loop_calls_for_one_batch_are_of_one_step(tmp_path: Path) -> None:
    pair = nn.ModuleDict({"image": nn.Linear(4, 2), "text": nn.Linear(4, 2)}).eval()
    seen = {"s": {"select": ["image", "text"], "hook": "forward", "action": "stats", "of": ["mean"]}}
    with hookrun.record(pair, seen, tmp_path / "mine"):
        for _ in range(3):
            pair["image"](X)
            pair["text"](X)
    assert steps_of(tmp_path / "mine") == [0, 0, 1, 1, 2, 2]


def test_a_loop_that_calls_step_counts_by_itself(tmp_path: Path) -> None:
    model = network().eval()
    with hookrun.record(model, SEEN, tmp_path / "mine") as hooks:
        for _ in range(3):
            model(X)
            hooks.step()
            hooks.step()
    assert steps_of(tmp_path / "mine") == [0, 2, 4]


def test_micro_batches_before_the_first_step_are_of_step_0(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.record(model, SEEN, tmp_path / "mine"):
        for _ in range(2):
            for _ in range(3):
                model(X).sum().backward()
            optimizer.step()
    assert steps_of(tmp_path / "mine") == [0, 0, 0, 1, 1, 1]


def test_a_training_after_an_evaluation_begins_at_step_0(tmp_path: Path) -> None:
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookrun.record(model, SEEN, tmp_path / "mine"):
        for _ in range(3):
            model(X)
        model.train()
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
    assert steps_of(tmp_path / "mine") == [0, 1, 2, 0, 1]


def test_a_loop_that_goes_on_counts_on(tmp_path: Path) -> None:
    model = network().eval()
    with hookrun.record(model, SEEN, tmp_path / "first") as hooks:
        for _ in range(3):
            model(X)
        state = hooks.state_dict()
    with hookrun.record(model, SEEN, tmp_path / "second") as hooks:
        hooks.load_state_dict(state)
        for _ in range(2):
            model(X)
    assert steps_of(tmp_path / "second") == [3, 4]


class Reusing(nn.Module):
    """Calls one module twice under one name, and one in a part that is called alone as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.act(self.inner(self.act(x))))


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "output_grad", "backward"])
def test_calls_of_a_reused_module_are_numbered_alike(hook: str, tmp_path: Path) -> None:
    seen = {"select": ["act", "inner", "inner.0"], "hook": hook, "action": "stats", "of": ["mean"]}
    model = Reusing()
    x = torch.randn(2, 3, requires_grad=True)

    def calls(hooks: Any) -> list[Any]:
        for _ in range(2):
            model(x).sum().backward()
            hooks.step()
        model.inner(x).sum().backward()
        return [(record["module"], record["step"], record["call"]) for record in hooks.records]

    with hookrun.hooked(model, {"seen": seen}) as hooks:
        found = calls(hooks)
    with hookrun.record(model, {"seen": seen}, run_dir=tmp_path / "run") as recording:
        assert calls(recording) == found
    assert {call for module, _, call in found if module == "act"} == {0, 1}
    assert {call for _, step, call in found if step == 2} == {0}
