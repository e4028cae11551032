"""A callable is identified by its qualified name and by a hash that changes with its code."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hookrun.engine.trust.callables import Code, code_of_given, code_of_name, qualified_name, tensor_digest


def times(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def closing(over: Any) -> Any:
    return lambda x: x * over


class Scales:
    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def digest(target: Any) -> str:
    return code_of_given(target).sha256


def test_the_same_function_has_the_same_hash() -> None:
    for make in (lambda: times, lambda: closing(3), lambda: Scales(torch.ones(2)), lambda: torch.relu):
        assert digest(make()) == digest(make())


def test_any_change_of_its_code_changes_the_hash() -> None:
    pair = (lambda x: x * 2, lambda x: x * 3)  # on one line, so that the source text is the same
    changed = [
        pair,
        (closing(2), closing(3)),
        (closing(torch.zeros(2)), closing(torch.ones(2))),
        (closing({"a": [1]}), closing({"a": [2]})),
        (closing(pair[0]), closing(pair[1])),
        (functools.partial(times, factor=2), functools.partial(times, factor=3)),
        (Scales(2), Scales(3)),
        (Scales(2).__call__, Scales(3).__call__),
        (torch.relu, torch.sigmoid),
        (times, closing(2)),
    ]
    assert [pair for pair in changed if digest(pair[0]) == digest(pair[1])] == []


def test_an_edited_helper_of_the_module_changes_the_hash(tmp_path: Path) -> None:
    digests = list[str]()
    for number, factor in enumerate((2, 30)):
        path = tmp_path / str(number) / "edited.py"
        path.parent.mkdir()
        path.write_text(f"def helper(x):\n    return x * {factor}\n\n\ndef edit(x):\n    return helper(x)\n")
        found = importlib.util.spec_from_file_location("edited", path)
        assert found is not None
        assert found.loader is not None
        module = sys.modules["edited"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        digests.append(digest(module.edit))
    del sys.modules["edited"]
    assert digests[0] != digests[1]


def test_the_hash_is_the_same_in_another_process() -> None:
    program = "f = lambda x: x in {'a', 'b', 'c'}; print(code_of_given(f).sha256)"
    command = [sys.executable, "-c", f"from hookrun.engine.trust.callables import code_of_given\n{program}"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    )
    assert first.stdout == second.stdout != "", first.stderr


def test_recursive_references_are_hashed_once() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert digest(closing(ring)) == digest(closing(ring))


def test_the_hashed_parts_are_listed() -> None:
    assert code_of_name(times, "a:b").hashed == f"the source of the module {__name__}"
    assert code_of_given(times).hashed == "its source and the values that it uses"
    builtin = code_of_given(torch.relu).hashed
    assert "it has no Python source" in builtin
    assert "torch" in builtin


def test_names_are_qualified() -> None:
    assert qualified_name(times) == f"{__name__}:times"
    assert qualified_name(Scales(1)) == f"{__name__}:Scales"
    assert Code("mypkg.hooks:f", "0", "").package == "mypkg"


def test_a_part_of_one_element_has_the_digest_of_its_number() -> None:
    rows = torch.arange(10.0).reshape(1, 10)
    assert tensor_digest(rows[:, 4]) == tensor_digest(torch.tensor([4.0]))
