"""`hookrun.modules`: what task=modules shows, as a table for Python."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hookrun


class Shared(nn.Module):
    """A layer that is reached under two names, and one that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.unused = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x))


EXAMPLE = ((torch.ones(2, 3),), {})


def test_rows_are_named_modules_with_parameters() -> None:
    model = Shared()
    table = hookrun.modules(model)
    expected = [(path, type(module).__name__) for path, module in model.named_modules()]
    assert [(row.path, row.type) for row in table] == expected
    counts = [sum(each.numel() for each in module.parameters()) for _, module in model.named_modules()]
    assert [row.parameters for row in table] == counts
    assert len(table) == len(expected)


def test_shapes_are_those_of_the_example() -> None:
    table = hookrun.modules(Shared(), EXAMPLE)
    assert (table["first"].input, table["first"].output) == ("[2, 3]", "[2, 3]")
    assert (table["unused"].input, table["unused"].output) == (None, None)
    assert {row.output for row in hookrun.modules(Shared())} == {None}


def test_keyword_arguments_are_inputs() -> None:
    table = hookrun.modules(Shared(), ((), {"x": torch.ones(4, 3)}))
    assert table[""].input is not None and "[4, 3]" in table[""].input


def test_a_module_is_found_by_any_of_its_names() -> None:
    table = hookrun.modules(Shared())
    assert table["again"] == table["first"]
    with pytest.raises(KeyError, match="did you mean 'first'"):
        table["frist"]


@pytest.mark.parametrize(
    "select", ["unused", "type:Linear", ["first", "unused"], {"type": "Linear", "leaf": True}]
)
def test_a_selector_of_any_form_marks_its_matches(select: object) -> None:
    expected = {"unused"} if select == "unused" else {"first", "unused"}
    table = hookrun.modules(Shared(), select=select)
    assert {row.path for row in table if row.selected} == set(table.picked) == expected
    assert f"matches {len(expected)}" in repr(table)


def test_a_selector_of_parameters_names_them() -> None:
    table = hookrun.modules(Shared(), select="first.weight")
    assert table.picked == ("first.weight",)
    assert not any(row.selected for row in table)


def test_the_table_is_a_frame_of_pandas() -> None:
    pytest.importorskip("pandas")
    table = hookrun.modules(Shared(), EXAMPLE, "first")
    frame = table.table()
    assert list(frame) == ["path", "class", "parameters", "input", "output", "selected"]
    assert frame.to_dict("list")["path"] == [row.path for row in table]
    assert frame["selected"].tolist() == [False, True, False]


def test_print_shows_the_tree_of_the_task() -> None:
    lines = str(hookrun.modules(Shared(), EXAMPLE, "unused")).splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"├── first +Linear +12  \[2, 3\]  \(also again\)", lines[1])
    assert re.fullmatch(r"└── \* unused +Linear +20  -", lines[2])


def test_an_example_that_fails_is_told() -> None:
    table = hookrun.modules(Shared(), ((torch.ones(2, 7),), {}))
    assert table.unchecked is not None
    assert "shapes unknown: RuntimeError" in table._repr_html_()
    assert "shapes unknown: RuntimeError" in repr(table)


def test_without_a_selector_nothing_is_selected() -> None:
    assert "selected" not in hookrun.modules(Shared())._repr_html_()
    assert "selected" in hookrun.modules(Shared(), select="first")._repr_html_()


def test_the_model_is_not_changed() -> None:
    model = Shared().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hookrun.modules(model, EXAMPLE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training and not model.first._forward_hooks and not model.first._forward_pre_hooks


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        (3, {}, hookrun.HookrunError, "model: found 3, expected a torch.nn.Module"),
        (
            Shared(),
            {"select": "frist"},
            hookrun.CompileError,
            "select: 'frist' matches no module and no parameter",
        ),
        (Shared(), {"select": 1.5}, hookrun.SpecError, "select: found the number 1.5: quote it"),
        (Shared(), {"example": torch.ones(2)}, hookrun.HookrunError, r"example: expected \(args, kwargs\)"),
    ],
)
def test_a_mistake_is_told_with_its_place(model: nn.Module, options: dict, error: type, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=says):
        hookrun.modules(model, **options)
