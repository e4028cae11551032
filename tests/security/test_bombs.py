"""Files, numbers and random specs: each is read or refused soon with its key, and none hangs or kills the process.

HOOKRUN_FUZZ=20000 tries as many random specs instead of those of an ordinary run.
"""

# ruff: noqa: E501  # tables: one input a line
from __future__ import annotations

import copy
import os
import random
import resource
from pathlib import Path
from time import process_time
from typing import Any

import pytest
import yaml
from torch import nn

import hookrun
from hookrun import load_spec
from hookrun.command.compose.compose import compose_dict
from hookrun.errors import HookrunError, SpecError
from hookrun.run.tasks import parse_experiment
from hookrun.store.config.yaml_files import load

MIB = 2**20


def doubling(unit: str, start: str, layers: int = 40) -> str:
    lines = [f"a{n}: {unit.replace('BELOW', f'${{a{n - 1}}}')}" for n in range(1, layers)]
    return "\n".join([f"a0: {start}", *lines]) + "\n"


def layers(depth: int, width: int, start: str = "[1]", item: str = "[{}]") -> str:
    lines = [f"l0: &l0 {start}"]
    lines += [f"l{n}: &l{n} {item.format(', '.join([f'*l{n - 1}'] * width))}" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


BOMBS = {
    "aliases": layers(9, 9),
    "aliases of mappings": layers(40, 2, "{x: 1}", "[{}]"),
    "merge keys": layers(12, 9, "{x: 1}", "{{<<: [{}]}}"),
    "an alias of itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a {b: {c: *a}}\n",
    "deep aliases": layers(70, 1),
    "texts that double": doubling("'BELOWBELOW'", "'" + "x" * 50 + "'"),
    "lists that double": doubling("['BELOW', 'BELOW']", "[1, 2]"),
    "mappings that double": doubling("{x: 'BELOW', y: 'BELOW'}", "{x: 1}"),
    "selections that double": doubling("'BELOWBELOW'", "x").replace("${", "${oc.select:"),
    "a chain of interpolations": "".join(f"a{n}: '${{a{n + 1}}}'\n" for n in range(900)),
    "nested interpolations": "a: '" + "${" * 300 + "b" + "}" * 300 + "'\n",
    "a long text of interpolations": "a: '" + "${b}" * 5_000 + "'\nb: x\n",
    "a wide list that is named often": "a: [" + "1, " * 3_000 + "1]\n" + "".join(f"b{n}: '${{a}}'\n" for n in range(500)),
    "a long text that is named often in one text": "a: '" + "x" * 60_000 + "'\nb: '" + "${a}" * 400 + "'\n",
    "an interpolation of itself": "a: '${a}'\n",
    "a circle": "a: '${b}'\nb: '${a}'\n",
    "30 MB in one text": "a: '" + "x" * 30_000_000 + "'\n",
    "a text of 100,000 characters": "a: '" + "x" * 100_000 + "'\n",
    "a name of 100,000 characters": "? " + "k" * 100_000 + "\n: 1\n",
    "300,000 numbers": "a: [" + "1, " * 300_000 + "1]\n",
    "100,000 brackets": "a: " + "[" * 100_000 + "]" * 100_000 + "\n",
    "50,000 open braces": "a: " + "{" * 50_000,
    "50,000 dashes": "- " * 50_000 + "a\n",
    "200 levels": "".join(f"{'  ' * n}a:\n" for n in range(200)),
    "20,000 anchors": "".join(f"a{n}: &a{n} x\n" for n in range(20_000)),
    "400 digits": "a: " + "9" * 400 + "\n",
    "400 digits behind a point": "a: 1." + "9" * 400 + "\n",
    "400 digits behind an x": "a: 0x" + "f" * 400 + "\n",
    "400 digits by a tag": "a: !!int '" + "9" * 400 + "'\n",
    "base 60": "a: {index: [0, 4:8]}\n",
    "base 60 with a fraction": "a: 4:08.5\n",
    "base 60 as a key": "4:8: x\n",
    "a byte that is not UTF-8": "a: \udce9\n",
    "a control character": "a: \x01\n",
    "a decoded bracket": "a: '${oc.decode:${t}}'\nt: '" + "[" * 900 + "]" * 900 + "'\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_little_memory(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMBS[name], encoding="utf-8", errors="surrogateescape")
    before = peak()
    start = process_time()
    with pytest.raises(SpecError) as refused:
        load_spec(file)
    assert (
        process_time() - start < 2
    )  # without the guard: minutes. A loaded machine is slow, so there is room
    assert peak() - before < 50 * MIB
    assert str(file) in refused.value.errors[0].where


def peak() -> int:
    """Bytes of the process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("written", "quoted"), [("4:8", "'4:8'"), ("-1:30", "'-1:30'")])
def test_a_number_in_base_60_says_to_quote_it(written: str, quoted: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"a:\n  select: fc\n  index: {written}\n")
    with pytest.raises(SpecError) as refused:
        load_spec(file)
    (problem,) = refused.value.errors
    assert problem.where == f"{file}:3"
    assert problem.hint == f"quote it: {quoted}"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(SpecError, match="is a pipe or a device"):
            load_spec(path)


@pytest.mark.parametrize(
    "text",
    [
        "a: {}\n", "a: 0x1f\nb: 1e-30\nc: 3.14159265358979\n", layers(3, 9),
        "a: &a {b: 1}\nc: {<<: *a, d: 'R&D*'}  # & and *\n", "a: [" + "1, " * 9_000 + "1]\n",
    ],
)  # fmt: skip
def test_what_people_write_keeps_the_limits(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load(file)


HUGE = 10**5_000
HOOK: dict[str, Any] = {"select": "fc", "hook": "forward"}
CAPTURE = {**HOOK, "action": "capture"}
ADDED = {**HOOK, "hook": "apply", "action": "add_parameter", "name": "x"}


def deep(kind: type, levels: int = 5_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


HOOKS: dict[str, tuple[dict[Any, Any], str]] = {
    "a deep value": ({**HOOK, "action": "add_bias", "value": deep(list)}, "value"),
    "a deep difference": (
        {**HOOK, "action": "add_bias", "value": {"run": "a", "minus": deep(dict)}},
        "value",
    ),
    "a deep step": ({**CAPTURE, "when": {"step": deep(list)}}, "when.step"),
    "a deep schedule": ({**CAPTURE, "when": deep(dict)}, "when"),
    "a deep target": ({**CAPTURE, "target": deep(list)}, "target"),
    "a deep index": ({**CAPTURE, "index": deep(list)}, "index"),
    "a deep count": ({**CAPTURE, "expect": deep(list)}, "expect"),
    "a deep selector": ({**CAPTURE, "select": deep(list)}, "select"),
    "a deep selector of mappings": ({**CAPTURE, "select": deep(dict)}, "select"),
    "a deep name of an action": ({**HOOK, "action": deep(list)}, "action"),
    "a deep hook type": ({**CAPTURE, "hook": deep(dict)}, "hook"),
    "a huge target": ({**CAPTURE, "target": HUGE}, "target"),
    "a huge subscript": ({**CAPTURE, "target": f"[{'9' * 5_000}]"}, "target"),
    "a subscript beyond 64 bits": ({**CAPTURE, "target": "[9223372036854775808]"}, "target"),
    "a huge index": ({**CAPTURE, "index": HUGE}, "index"),
    "a huge index as a text": ({**CAPTURE, "index": "9" * 900}, "index"),
    "an index beyond 64 bits": ({**CAPTURE, "index": "0:9223372036854775808"}, "index"),
    "digits of another script": ({**CAPTURE, "index": "٣"}, "index"),
    "a huge count": ({**CAPTURE, "expect": HUGE}, "expect"),
    "a huge count as a text": ({**CAPTURE, "expect": ">=" + "9" * 5_000}, "expect"),
    "a count of another script": ({**CAPTURE, "expect": "९"}, "expect"),
    "a huge step": ({**CAPTURE, "when": {"step": HUGE}}, "when.step"),
    "a step beyond bounds": ({**CAPTURE, "when": {"step": 10**16}}, "when.step"),
    "a start beyond bounds": ({**CAPTURE, "when": {"step": {"start": 10**16}}}, "when.step"),
    "a huge seed": ({**CAPTURE, "when": {"seed": HUGE}}, "when.seed"),
    "a seed beyond 63 bits": ({**HOOK, "action": "noise", "seed": 2**63}, "seed"),
    "a huge priority": ({**CAPTURE, "priority": HUGE}, "priority"),
    "a priority beyond bounds": ({**CAPTURE, "priority": 10**15}, "priority"),
    "a huge factor": ({**HOOK, "action": "scale", "factor": HUGE}, "factor"),
    "a shape beyond 64 bits": ({**ADDED, "shape": [2**70]}, "shape"),
    "a shape of a terabyte": ({**ADDED, "shape": [2**38]}, "shape"),
    "a shape whose product is one": ({**ADDED, "shape": [2**20, 2**20]}, "shape"),
    "a shape of 1,000 sizes": ({**ADDED, "shape": [1] * 1_000}, "shape"),
    "a huge reservoir": ({**CAPTURE, "keep": {"reservoir": 10**15}}, "keep.reservoir"),
    "a huge name": ({**CAPTURE, "x" * 1_000: 1}, ""),
    "a huge number as a name": ({**CAPTURE, HUGE: 1}, ""),
    "a huge action": ({**HOOK, "action": "x" * 10**6}, "action"),
}
SETTINGS = {
    "compute.threads": [0, 1_000_000, HUGE],
    "compute.capture_buffer": [0, 2**40],
    "data.workers": [-1, 10_000, HUGE],
    "data.batch_size": [0, 10**9, HUGE],
    "train.epochs": [-1, 10**13, HUGE],
    "train.steps": [0, 10**13],
    "train.limit_batches": [10**13],
    "train.accumulate": [10**13],
    "train.log_every": [10**13],
    "seed": [-1, 2**63, HUGE],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_refused_with_its_key(name: str) -> None:
    hook, key = HOOKS[name]
    with pytest.raises(SpecError) as refused:
        load_spec({"a": hook})
    assert refused.value.errors[0].where.startswith(f"hooks.a.{key}".rstrip("."))
    assert len(str(refused.value)) < 5_000


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_is_refused_with_its_key(key: str) -> None:
    section, _, name = key.rpartition(".")
    for value in SETTINGS[key]:
        config = compose_dict()
        (config[section] if section else config)[name] = value
        with pytest.raises(SpecError) as refused:
            parse_experiment(config)
        assert [problem.where for problem in refused.value.errors] == [key]


def test_a_spec_that_contains_itself_is_refused() -> None:
    hook: dict[str, Any] = {**CAPTURE}
    hook["when"] = hook
    with pytest.raises(SpecError, match="nested more than 64 deep"):
        load_spec({"a": hook})


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
                    text = node[key]
                    at = draw.randrange(len(node[key]))
                    node[key] = (
                        text[:at] + draw.choice("[]{}*.:,'\"\\$0 \x00é") * draw.choice([1, 2, 50]) + text[at:]
                    )
    return changed


def test_a_mutated_spec_gives_a_plan_or_errors_with_key_paths() -> None:
    draw = random.Random(7)
    originals = specs()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
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
