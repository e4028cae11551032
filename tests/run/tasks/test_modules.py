"""task=modules: the tree of paths, and what a selector matches."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from hookrun.cli import main
from hookrun.run.tasks.modules import _fitting_depth


@pytest.fixture
def shown(capsys) -> Callable[..., str]:
    def shown(*overrides: str) -> str:
        capsys.readouterr()
        assert main(["task=modules", "compute.device=cpu", *overrides]) == 0
        return str(capsys.readouterr().out)

    return shown


def folded(printed: str) -> str:
    """The output with two spaces between the columns."""
    return re.sub(r" {2,}", "  ", printed)


def test_what_a_selector_matches_is_marked(shown) -> None:
    for select, count in (("''", 1), ("type:Conv2d", 2), ("'re:fc\\..*'", 2), ("{leaf: true}", 8)):
        assert f"matches {count}: " in shown(f"task.select={select}")


def test_a_model_that_is_a_single_layer_is_its_root(shown, trusted) -> None:
    trusted(single_layer="from torch import nn\n\n\ndef build():\n    return nn.Flatten()\n")
    printed = shown("model=python", "model.factory=single_layer:build")
    assert "(root)  Flatten  0  [2, 64]" in printed
    assert "1 module, 0 parameters" in printed


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_modules_that_only_a_script_calls_are_marked(shown, executed, refused, trusted, capsys) -> None:
    body = "nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    trusted(
        scripts=f"""
        import torch
        from torch import nn

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.body, self.last = torch.jit.script({body}), nn.Tanh()

            def forward(self, x):
                return self.last(self.body(x))

        def build():
            torch.jit.save(torch.jit.script(Mixed().body), "model.pt")
            return torch.jit.load("model.pt")
        """
    )
    mixed, whole = (("model=python", f"model.factory=scripts:{name}") for name in ("Mixed", "build"))
    printed = folded(shown(*mixed))
    assert "body  Sequential (TorchScript)  650  [2, 10]" in printed
    assert "last  Tanh  0  [2, 10]" in printed
    inside = "no hooks: body: Sequential (TorchScript) calls its modules without Python hooks"
    assert f"1  Linear (TorchScript)  650  {inside}" in printed
    assert "(root)  Sequential (TorchScript)  650  [2, 10]" in folded(shown(*whole))
    scale = "hook: forward, action: scale, factor: 0"
    losses = [
        executed("task=evaluate", *whole, "train.limit_batches=1", *hooks).metrics[-1]["loss"]
        for hooks in ((), (f"+hooks.h={{select: '', {scale}}}",))
    ]
    assert losses[0] != losses[1] == pytest.approx(2.302585)
    assert "matches 1; Sequential (TorchScript)" in refused(*whole, f"+hooks.h={{select: '1', {scale}}}")


def test_a_module_with_two_names_is_shown_once_with_both(shown, own_model) -> None:
    body = """
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(64, 64))
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x.flatten(1)))
    """
    printed = folded(shown(*own_model(body), "task.select=b.0"))
    assert "a  Sequential  4,160  [2, 64]  (also b)" in printed
    assert "* 0  Linear  4,160  [2, 64]  (also b.0)" in printed
    assert "'b.0' matches 1: a.0" in printed


def test_modules_that_are_not_called_or_checked_have_no_shapes(shown, own_model) -> None:
    idle = """
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))
    """
    assert "idle  Linear  12  -" in folded(shown(*own_model(idle)))


def test_a_model_that_branches_is_shown_without_shapes(shown, own_model) -> None:
    branching = """
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))
    """
    printed = folded(shown(*own_model(branching)))
    assert "fc  Linear  650  -" in printed
    assert "shapes unknown: " in printed


def test_weights_are_accepted_without_their_hooks(executed, shown, hook) -> None:
    bias = hook(select="fc", hook="forward", action="add_bias", value=0, trainable="true")
    trained = executed("train.steps=1", "train.limit_batches=1", bias)
    file = f"model.weights={trained.path}/checkpoints/last.safetensors"
    assert shown(file) == shown(bias, file)


def test_columns_are_aligned_at_any_width(shown, monkeypatch) -> None:
    lines = shown("model=mlp").splitlines()
    starts = [re.match(r"\W*\S+\s+", line).end() for line in lines[:-1]]
    assert len(set(starts)) == 1, "classes stand below each other"
    top = shown("model=mlp", "task.depth=1")
    assert "layers.0" not in top
    assert "(+4 below)" in top
    assert "4 modules further down: task.depth=2 shows one more level" in top
    deep = shown("model=mlp", "task.depth=1", "task.select=layers.0")
    assert "* 0" in deep
    assert "matches 1: layers.0" in deep, "what is asked for is shown"
    monkeypatch.setenv("COLUMNS", "30")
    narrow = shown("model=mlp").splitlines()
    assert max(map(len, narrow[:6])) == 30
    assert narrow[1].endswith("…")
    assert shown("model=mlp", "task.full=true").splitlines()[:-1] == lines[:-1]


def test_numbered_modules_are_in_the_order_of_their_numbers(shown) -> None:
    printed = shown("model=mlp", "model.args.hidden=[8,8,8,8,8,8]", "task.select='layers.*'")
    assert f"matches 12: {', '.join(f'layers.{number}' for number in range(12))}" in printed


def test_the_tree_has_lines_of_ascii_where_there_are_no_others(shown, monkeypatch) -> None:
    starts = [line.split()[:2] for line in shown("model=mlp").splitlines()[2:8]]
    assert starts == [["├──", "layers"], *[["│", "├──"]] * 3, ["│", "└──"], ["└──", "fc"]]
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    monkeypatch.setenv("COLUMNS", "24")
    assert shown("model=mlp").isascii()


def test_the_deepest_level_that_fits_into_the_terminal_is_shown() -> None:
    paths = ["", "a", "a.0", "a.0.x", "a.1", "b"]
    assert [_fitting_depth(paths, height) for height in (1, 3, 5, 6)] == [1, 1, 2, 3]


def test_data_of_one_split_has_its_shapes(shown, tmp_path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab", "answer": "c"}')
    printed = shown("model=decoder", "data=prompts", f"data.args.file={tmp_path}/prompts.jsonl")
    assert "[2, 2, 256]" in printed
    assert "shapes unknown" not in printed
