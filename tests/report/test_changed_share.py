"""The share of elements that edits changed over the steps of a training: counted, bounded, and drawn by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookrun.run.passes.step_changes import MOST_COUNTS, MOST_STEPS, noting_changes, summed

TRAINING = ("train.epochs=3", "train.limit_batches=6", "train.log_every=2")


@pytest.fixture(scope="module")
def edited(shared: Callable[..., Path]) -> Path:
    """A training of 18 steps with an edit of every element, one of none, and one of the last steps."""
    return shared(
        *TRAINING,
        halved="{select: fc, hook: forward, action: scale, factor: 0.5}",
        kept="{select: 'layers.*', hook: forward, action: scale, factor: 1}",
        late="{select: fc.weight, hook: grad, action: replace, value: 1, when: {step: {start: 13}}}",
    )


def by_step(path: Path, hook: str) -> list[list[list[int]]]:
    """What hooks.json has of each site of a hook."""
    sites = json.loads((path / "hooks.json").read_text())["sites"]
    return [site["by_step"] for site in sites if site["hook"] == hook]


def test_each_logged_step_has_its_own_count(edited: Path) -> None:
    (halved,) = by_step(edited, "halved")
    assert [step for step, _, _ in halved] == list(range(0, 18, 2)), "validations in between are not counted"
    for _, changed, total in halved:
        assert changed == total == halved[0][2]
    for layer in by_step(edited, "kept"):
        assert [changed for _, changed, _ in layer] == [0] * 9
    (late,) = by_step(edited, "late")
    assert [step for step, _, _ in late] == [14, 16]
    assert late[0][2] == 10 * 64, "the size of fc.weight"


def test_the_page_draws_the_share_of_each_hook(edited: Path, page) -> None:
    made = page(edited)
    assert made.text.count("share of changed elements") == 3
    assert f"kept forward, scale on {len(by_step(edited, 'kept'))} modules" in made.text
    assert "halved forward, scale on 1 module" in made.text


def test_over_twenty_layers_the_rest_is_folded(edited: Path, tmp_path: Path, remade) -> None:
    path = Path(shutil.copytree(edited, tmp_path / "many"))
    plan = json.loads((path / "plan.json").read_text())
    (hook,) = [hook for hook in plan["hooks"] if hook["name"] == "halved"]
    hook["targets"] = [{"path": f"<b>{n}"} for n in range(300)]
    (path / "plan.json").write_text(json.dumps(plan))
    counts = {"hook": "halved", "fired": 2, "total": 600, "silent": None}
    sites = [
        counts | {"module": f"<b>{n}", "changed": n, "by_step": [[0, n, 300], [1, 0, 300]]}
        for n in range(300)
    ]
    (path / "hooks.json").write_text(json.dumps({"sites": sites}))
    text = remade(path).text
    assert "share of changed elements, 1–8 of 300 layers" in text
    assert "share of changed elements, 17–20 of 300 layers" in text
    assert "share of changed elements: 180 layers that changed less; hooks.json has 100 more" in text
    assert text.index("<b>299") < text.index("<b>298") < text.index("<b>100")
    assert "<b>99 " not in text


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_edit_is_told_to_be_uncounted(
    compiled: bool, edited: Path, tmp_path: Path, remade
) -> None:
    path = Path(shutil.copytree(edited, tmp_path / "compiled"))
    config = path / ".hydra/config.yaml"
    text = config.read_text()
    assert "compile: false" in text
    config.write_text(text.replace("compile: false", f"compile: {str(compiled).lower()}"))
    hooks = json.loads((path / "hooks.json").read_text())
    for each in hooks["sites"]:
        if each["hook"] == "halved":
            each |= {"changed": 0, "total": 0, "by_step": []}
    (path / "hooks.json").write_text(json.dumps(hooks))
    assert remade(path).text.count("is not counted inside of compiled graphs") == compiled


def site(changed: int = 0) -> Any:
    return SimpleNamespace(changed=changed, total=0, by_step=())


def train(sites: list[Any], steps: range, every: int = 1) -> None:
    """Each step changes as many elements as its number, of 1,000."""
    for step in steps:
        with noting_changes(sites, step, every):
            for each in sites:
                each.changed += step
                each.total += 1000


@pytest.mark.parametrize("every", [1, 10])
def test_a_long_training_keeps_evenly_spaced_steps(every: int) -> None:
    found = site(changed=5)
    train([found], range(0, 1000 * every, every), every)
    steps = [step for step, _, _ in found.by_step]
    assert MOST_STEPS / 2 < len(steps) <= MOST_STEPS
    assert steps == list(range(0, 1000 * every, 16 * every))
    assert [changed for _, changed, _ in found.by_step] == steps
    assert {total for _, _, total in found.by_step} == {1000}


def test_many_sites_keep_fewer_steps_of_each() -> None:
    sites = [site() for _ in range(2_000)]
    train(sites, range(60))
    assert MOST_COUNTS / 4 < sum(len(each.by_step) for each in sites) <= MOST_COUNTS


def test_a_resumed_training_keeps_the_same_steps() -> None:
    whole = site()
    train([whole], range(700))
    first = site()
    train([first], range(333))
    resumed = site()
    resumed.by_step = json.loads(json.dumps(first.by_step))
    train([resumed], range(333, 700))
    assert resumed.by_step == whole.by_step


def test_a_step_without_a_firing_has_no_count() -> None:
    found = site()
    for step in range(4):
        with noting_changes([found], step, 1):
            found.total += step % 2
    assert found.by_step == [[1, 0, 1], [3, 0, 1]]


def test_the_counts_of_ranks_are_summed_by_step() -> None:
    assert summed([[[0, 1, 4], [2, 3, 4]], [[2, 1, 4], [1, 2, 4]]]) == [[0, 1, 4], [1, 2, 4], [2, 4, 8]]
    assert summed([(), ()]) == []
