"""Random and mutated specs give a spec or a SpecError with key paths, and no other error.

HOOKRUN_FUZZ=20000 tries as many instead of those of an ordinary run.
"""

# ruff: noqa: E501  # a table: one input a line
from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import hookrun
from hookrun.errors import HookrunError, SpecError

TRIES = int(os.environ.get("HOOKRUN_FUZZ", "3000"))
CONF = Path(__file__).resolve().parents[2] / "conf"
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**400, -(2**70), 0.5, float("nan"), float("inf"), "", " ", "*", "**", "[", "{", "}",
    "{a,b}", "[0]", "..., 0:8", "0:8:0", "re:(", "re:a*", "type:Linear", "fc", "a.b.c", ".", "\x00", "é" * 50, "x" * 2_000, "9" * 400,
    "${a}", "__class__", "forward", "backward", "capture", "clamp", "apply", ">=1", "0..2", [], {}, [[]], [1, "a", None], {"a": 1},
    {"run": "x"}, {"file": "x"}, {"start": 5, "end": 1}, {"every": 0}, b"bytes", {1, 2}, object, (1, 2), 1j,
]  # fmt: skip
KEYS = [
    "select", "hook", "action", "when", "target", "index", "expect", "value", "min", "shape", "name", "steps", "", 1, None,
]  # fmt: skip


def specs() -> list[dict[str, Any]]:
    """The hooks of the config folders."""
    files = sorted([*CONF.glob("hooks/*.yaml"), *CONF.glob("experiment/**/*.yaml")])
    loaded = [yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in files]
    hooks = [each.get("hooks", each) for each in loaded]
    return [each for each in hooks if each and all(isinstance(hook, dict) for hook in each.values())]


def mutated(spec: dict[Any, Any], draw: random.Random) -> Any:
    """The spec with up to four changes: a value replaced, removed, nested, copied from elsewhere, or a key added."""
    changed: Any = copy.deepcopy(spec)
    for _ in range(draw.randint(1, 4)):
        node: Any = changed
        while isinstance(node, dict | list) and node:
            key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            if not isinstance(node[key], dict | list) or draw.random() < 0.4:
                break
            node = node[key]
        if not isinstance(node, dict | list) or not node:
            continue
        match draw.randrange(5):
            case 0:
                node[key] = copy.deepcopy(draw.choice(ODD))
            case 1:
                del node[key]
            case 2:
                for _ in range(draw.choice([1, 3, 100])):
                    node[key] = [node[key]] if draw.random() < 0.5 else {"a": node[key]}
            case 3 if isinstance(node, dict):
                node[draw.choice(KEYS)] = copy.deepcopy(draw.choice(ODD))
            case _:
                if isinstance(node[key], str) and node[key]:
                    text, at = node[key], draw.randrange(len(node[key]))
                    node[key] = (
                        text[:at] + draw.choice("[]{}*.:,'\"\\$0 \x00é") * draw.choice([1, 2, 50]) + text[at:]
                    )
    return changed


@pytest.fixture(scope="module")
def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_a_mutated_spec_gives_a_plan_or_errors_with_key_paths(model: Any) -> None:
    draw, originals = random.Random(7), specs()
    accepted = refused = 0
    for _ in range(TRIES):
        spec = mutated(draw.choice(originals), draw)
        try:
            parsed = hookrun.load_spec(spec if isinstance(spec, dict) else {"a": spec})
            accepted += 1
            if accepted % 10 == 0:
                hookrun.compile(parsed, model)
        except SpecError as error:
            refused += 1
            assert all(problem.where for problem in error.errors), spec
        except HookrunError:
            continue
    assert accepted > TRIES / 50
    assert refused > TRIES / 4
