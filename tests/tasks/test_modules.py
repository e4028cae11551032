"""task=modules: the tree of paths, and what a selector matches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hookrun.cli import main


@pytest.fixture
def shown(capsys) -> Callable[..., str]:
    def shown(*overrides: str) -> str:
        capsys.readouterr()
        assert main(["task=modules", "compute.device=cpu", *overrides]) == 0
        return str(capsys.readouterr().out)

    return shown


def test_each_module_has_its_class_parameters_and_output_shape(shown) -> None:
    lines = shown("model=mlp").splitlines()
    assert any(line.startswith("(root)  MLP") for line in lines)
    assert "modules," in lines[-1] and "parameters" in lines[-1]


@pytest.mark.parametrize(
    ("select", "count"),
    [
        ("''", 1),
        ("'conv?'", 2),
        ("type:Conv2d", 2),
        ("'re:fc\\..*'", 2),
        ("'re:fc.*'", 1),
        ("fc", 1),
        ("{leaf: true}", 8),
        ("'**.bias'", 3),
    ],
)
def test_what_a_selector_matches_is_marked(shown, select: str, count: int) -> None:
    printed = shown(f"task.select={select}")
    assert f"matches {count}: " in printed


def test_a_model_that_is_a_single_layer_is_its_root(shown, tmp_path, monkeypatch) -> None:
    (tmp_path / "single_layer.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Flatten()\n"
    )
    printed = shown("model=python", "model.factory=single_layer:build", "+trust=[single_layer]")
    assert "(root)  Flatten  0  [2, 64]" in printed
    assert "1 modules, 0 parameters" in printed


def test_a_module_with_two_names_is_shown_once_with_both(shown, own_model) -> None:
    body = """
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(64, 64))
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x.flatten(1)))
    """
    printed = shown(*own_model(body), "task.select=b.0")
    assert "a  Sequential  4,160  [2, 64]  (also b)" in printed
    assert "* 0  Linear  4,160  [2, 64]  (also b.0)" in printed
    assert "'b.0' matches 1: a.0" in printed


def test_a_module_that_is_not_called_and_a_model_that_cannot_be_checked_have_no_shapes(
    shown, own_model
) -> None:
    idle = """
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))
    """
    assert "idle  Linear  12  -" in shown(*own_model(idle))


def test_a_model_that_branches_on_its_values_is_shown_without_shapes(shown, own_model) -> None:
    branching = """
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(-x.flatten(1))
    """
    printed = shown(*own_model(branching))
    assert "fc  Linear  650  -" in printed
    assert "shapes unknown: " in printed


def test_weights_of_a_trained_run_may_be_looked_at_with_or_without_its_hooks(run, shown, hook) -> None:
    bias = hook(select="fc", hook="forward", action="add_bias", value=0, trainable="true")
    trained = run("train.steps=1", "train.limit_batches=1", bias)
    file = f"model.weights={trained.path}/checkpoints/last.safetensors"
    assert shown(file) == shown(bias, file)
