"""`when: {data: {field: value}}` acts on the samples that a hand-written mask over the data chooses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import hookrun
from hookrun.data.info import DataInfo, TensorInfo
from hookrun.engine.plan.texts import unknown_fields
from hookrun.engine.spec.when import MOST_CHARACTERS, MOST_FIELDS
from hookrun.errors import CompileError

RECORDS: list[dict[str, Any]] = [
    {"prompt": "ab cd", "answer": " x", "topic": "cat", "n": 1, "ok": True},
    {"prompt": "ab ce", "answer": " y", "topic": "dog", "n": "1", "ok": False},
    {"prompt": "ab c", "answer": " x", "topic": "cat", "n": 1.0, "ok": 1},
    {"prompt": "ab cg", "answer": " z", "n": 2, "deep": {"a": 1}, "nothing": None},
    {"prompt": "ab ch", "answer": " z", "topic": "bird", "n": True, "long": "a" * MOST_CHARACTERS},
]
DECODER = ("model=decoder", "model.args={width: 16, heads: 2, layers: 1, length: 8}")
PROMPTS = (*DECODER, "data=prompts", "data.args.file=p.jsonl", "data.batch_size=2")
DIGITS = ("model=cnn", "data=digits", "data.batch_size=16", "train.limit_batches=2")


@pytest.fixture
def prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))


@pytest.mark.usefixtures("prompts")
def test_a_field_is_compared_by_type_with_one_value_or_several(executed) -> None:
    keys = {"h": "select: blocks.0, hook: forward, action: capture"}
    keys["last"] = f"{keys['h']}, tokens: -1"
    numbered = list(enumerate(CHOSEN))
    hooks = [when(data, body, f"{name}{n}") for name, body in keys.items() for n, data in numbered]
    captures = executed("task=predict", *PROMPTS, *hooks).captures
    for name in keys:
        whole = captures[f"{name}{len(CHOSEN) - 1}"]["blocks.0"][:]
        for number, (data, samples) in enumerate(CHOSEN.items()):
            kept = captures[f"{name}{number}"]["blocks.0"]
            assert kept.sample_ids.tolist() == samples, data
            assert torch.equal(kept[:], whole[samples]), data


def test_an_edit_leaves_the_samples_of_other_labels_bit_equal(executed) -> None:
    edit = "select: relu1, hook: forward, action: scale, factor: 3"
    both = "when: {data: {class: '5', split: val}, value: {of: mean, above: 0.05}}"
    made = executed(
        "task=predict",
        *DIGITS,
        when("{label: [3, 4]}", edit),
        f"+hooks.both={{select: conv2, hook: forward, action: add_bias, value: 1, {both}}}",
        "+hooks.seen={select: fc, hook: forward, action: capture}",
    )
    model, x, labels = digits()
    with torch.no_grad():
        hidden = model.relu1(model.conv1(x))
        hidden = torch.where(((labels == 3) | (labels == 4))[:, None, None, None], hidden * 3, hidden)
        hidden = model.conv2(model.pool1(hidden))
        chosen = (labels == 5) & (hidden.flatten(1).mean(1) > 0.05)
        hidden = torch.where(chosen[:, None, None, None], hidden + 1, hidden)
        expected = model.fc(model.flatten(model.pool2(model.relu2(hidden))))
    torch.testing.assert_close(made.captures["seen"]["fc"][:], expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_part_of_a_training_step_has_the_labels_of_its_rows(accumulate: int, executed) -> None:
    keys = "select: fc, hook: output_grad, action: capture"
    made = executed(
        *DIGITS,
        *("train.epochs=1", "train.limit_batches=6", f"train.accumulate={accumulate}"),
        when("{label: 3, split: train}", keys),
        f"+hooks.all={{{keys}}}",
        when("{split: val}", "select: fc, hook: forward, action: capture", "val"),
    )
    kept = made.captures["h"]["fc"]
    whole = made.captures["all"]["fc"]
    mask = made.labels_of(whole) == 3
    assert mask.any()
    assert torch.equal(kept[:], whole[:][mask])
    assert torch.equal(kept.sample_ids, whole.sample_ids[mask])
    assert set(made.captures["val"]["fc"].splits) == {"val"}


def test_the_class_of_an_image_is_its_folder(executed, refused, tmp_path) -> None:
    for number, name in enumerate(["cat", "dog", "cat", "emu"]):
        (folder := tmp_path / f"images/val/{name}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(folder / f"{number}.png")
    images = ("task=predict", "model=cnn", "model.args.in_channels=3", "data=image_folder")
    images = (*images, "data.root=images", "data.transforms={resize: {size: 8}}")
    keys = "select: fc, hook: forward, action: capture"
    made = executed(*images, when("{class: [cat, emu]}", keys), when("{file: val/dog/1.png}", keys, "one"))
    assert made.captures["h"]["fc"].class_names == ["cat", "cat", "emu"]
    assert made.captures["one"]["fc"].class_names == ["dog"]
    said = refused(*images, when("{class: cow}", keys))
    assert "hooks.h.when.data.class: no sample of the data 'image_folder' has the value \"cow\"" in said


def test_a_number_is_not_a_class_without_names() -> None:
    image = TensorInfo((1, 8, 8), torch.float32)
    label = TensorInfo((), torch.int64)
    data = DataInfo("mine", image, label, None, {"train": 1, "val": 1})
    (problem,) = unknown_fields({"class": ["cat", 3], "label": [3]}, "when", data)
    assert problem.where == "when.class"
    assert "found 3, and no sample has it" in problem.what


@pytest.mark.usefixtures("prompts")
def test_a_prompt_is_continued_under_the_hooks_of_its_fields(executed) -> None:
    keys = "select: blocks.0, hook: forward, action: replace, value: 0"
    argv = ("task=generate", *PROMPTS, "task.max_new_tokens=2")
    some = [line["ids"] for line in executed(*argv, when("{topic: cat}", keys)).generations]
    every = [line["ids"] for line in executed(*argv, f"+hooks.h={{{keys}}}").generations]
    none = [line["ids"] for line in executed(*argv).generations]
    assert some == [(every if sample in (0, 2) else none)[sample] for sample in range(5)]
    assert every != none


def test_the_label_of_an_attributed_sample_is_that_of_the_data(executed) -> None:
    keys = "select: relu2, hook: forward, action: replace, value: 0"
    made = executed("task=attribute", *DIGITS, "task.score=top", "task.steps=2", when("{label: 3}", keys))
    is_zero = made.attributions["attributions"].flatten(1).abs().sum(1) == 0
    assert torch.equal(is_zero, digits()[2] == 3)


def test_a_moved_hook_acts_on_its_samples_in_every_cell(executed) -> None:
    task = ("task=effects", "task.hook=h", "task.over={index: [0, 3, 5]}", "task.metric=loss")
    moved = "select: relu1, hook: forward, action: replace, value: 0"
    fixed = "select: relu2, hook: forward, action: scale, factor: 2"
    made = executed(*task, *DIGITS, when("{label: [3, 4]}", moved), when("{label: 5}", fixed, "fixed"))
    model, x, labels = digits()
    for cell, channel in enumerate([0, 3, 5]):
        with torch.no_grad():
            hidden = model.relu1(model.conv1(x))
            hidden[(labels == 3) | (labels == 4), channel] = 0
            hidden = model.relu2(model.conv2(model.pool1(hidden)))
            hidden[labels == 5] *= 2
            losses = F.cross_entropy(model.fc(model.flatten(model.pool2(hidden))), labels, reduction="none")
        torch.testing.assert_close(made.effects["exact_samples"][cell].float(), losses)


@pytest.mark.parametrize(
    ("data", "keys", "text"),
    [
        ("{lable: 3}", "", "has no field 'lable'; did you mean 'label'"),
        ("{label: 10}", "", "no sample of the data 'digits' has the value 10"),
        ("{label: true}", "", "has the value true"),
        ("{label: [3, '3']}", "", 'has the value "3"'),
        (
            "{class: 3}",
            "",
            "when.data.class: no sample of the data 'digits' has the value 3; there are: \"0\"",
        ),
        ("{class: ['3', cow]}", "", 'has the value "cow"'),
        ("{file: 3}", "", "when.data.file: found 3, .* names of files are texts"),
        ("{sample: '3'}", "", 'when.data.sample: found "3", .* samples are numbered'),
        ("{split: test}", "", 'has the value "test"; there are: "train", "val"'),
        ("{}", "", r"when.data: found \{\}"),
        ("{label: []}", "", r"when.data.label: found \[\]"),
        ("{label: [3, null]}", "", "when.data.label.1: found None"),
        ("{label: nan}", "", "when.data.label.0: found nan"),
        ("3", "", "when.data: found 3, expected a mapping"),
        ("{label: 3}", "select: fc.weight, hook: grad, action: scale, factor: 2", "when.data: .*'grad' sees"),
        ("{label: 3}", "select: fc, hook: forward, action: clip_norm, max_norm: 1", "from the other rows"),
        ("{label: 3}", "select: fc, hook: forward, action: scale, factor: 2, index: '0:2'", "picks samples"),
    ],
)
def test_what_cannot_hold_is_refused_before_the_run(data: str, keys: str, text: str, refused) -> None:
    said = refused("task=predict", *DIGITS, when(data, keys or "select: fc, hook: forward, action: capture"))
    assert re.search(text, said), said


@pytest.mark.usefixtures("prompts")
def test_fields_of_a_file_are_checked_by_value(refused) -> None:
    keys = "select: blocks.0, hook: forward, action: capture"
    for data, text in (
        ("{topik: cat}", "has no field 'topik'; did you mean 'topic'"),
        ("{topic: cta}", 'has the value "cta"'),
        ("{n: 3}", "has the value 3; there are: "),
        ("{label: 3}", "has no field 'label'"),
        ("{deep: 1}", "has no field 'deep'"),
        ("{long: a}", "has no field 'long'"),
        ("{prompt: ab cd}", "has no field 'prompt'"),
    ):
        assert text in refused("task=predict", *PROMPTS, when(data, keys)), data


def test_loops_of_ones_own_are_refused_by_name(refused) -> None:
    edit = "select: fc, hook: forward, action: scale, factor: 2"
    said = refused("task=predict", *DIGITS, "compute.compile=true", when("{label: 3}", edit))
    assert "hooks.h.when.data: scale on 'forward' is evaluated at each call" in said
    hook = {"select": "fc", "hook": "forward", "action": "capture", "when": {"data": {"label": 3}}}
    model, _ = hookrun.build(overrides=["model=cnn", "data=digits"])
    with pytest.raises(CompileError, match=r"when\.data: reads the data of a run"):
        hookrun.compile({"h": hook}, model)


@pytest.mark.usefixtures("prompts")
def test_a_value_that_no_sample_of_the_pass_has_is_told(executed, fails, capsys) -> None:
    edit = when("{topic: bird}", "select: blocks.0, hook: forward, action: scale, factor: 2")
    argv = ("task=predict", *PROMPTS, "train.limit_batches=1", edit)
    executed(*argv)
    assert 'fired and found no sample with topic "bird"' in capsys.readouterr().out
    assert 'fired and found no sample with topic "bird"' in fails(*argv, "strict=true")


@pytest.mark.parametrize("packed", [False, True])
def test_only_documents_have_the_fields_of_their_lines(packed: bool, executed, refused, tmp_path) -> None:
    many = {f"f{number}": number for number in range(2 * MOST_FIELDS)}
    lines = [{"text": "abc", "lang": "de"}, {"text": "abd", "lang": "en"}, {"text": "abe", **many}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = ("data=text", "data.args.file=t.jsonl", "data.args.val_fraction=1", f"data.args.packed={packed}")
    argv = ("task=predict", *DECODER, *data, "data.args.length=8")
    keys = "select: blocks.0, hook: forward, action: capture"
    if packed:
        assert "has no field 'lang'" in refused(*argv, when("{lang: en}", keys))
    else:
        assert executed(*argv, when("{lang: en}", keys)).captures["h"]["blocks.0"].sample_ids.tolist() == [1]
        assert f"at most {MOST_FIELDS} names" in refused(*argv, when("{f127: 127}", keys))


def when(data: str, keys: str = "hook: forward, action: capture", name: str = "h") -> str:
    return f"+hooks.{name}={{{keys}, when: {{data: {data}}}}}"


def digits(split: str = "val") -> tuple[Any, Tensor, Tensor]:
    """The model, the inputs and the labels of the first two batches of DIGITS."""
    model, data = hookrun.build(overrides=[*DIGITS, "compute.device=cpu"])
    batches = list(data.loader(split))[:2]
    return model.eval(), *(
        torch.cat([getattr(batch, of) for batch in batches]) for of in ("inputs", "target")
    )


CHOSEN = {
    "{topic: cat}": [0, 2],
    "{topic: [cat, bird]}": [0, 2, 4],
    "{n: 1}": [0, 2],
    "{n: '1'}": [1],
    "{n: true}": [4],
    "{ok: [1, false]}": [1, 2],
    "{topic: cat, ok: true}": [0],
    "{answer: ' z'}": [3, 4],
    "{file: 'p.jsonl:2'}": [1],
    "{sample: [0, 3], split: val}": [0, 3],
    "{split: val}": [0, 1, 2, 3, 4],
}
"""The condition, and the samples that it chooses."""


def test_a_fold_by_label_needs_a_label_for_each_sample(refused) -> None:
    says = refused(
        *("data=names", "model=decoder", "model.args={layers: 1, heads: 1, width: 8, length: 32}"),
        "+hooks.units={select: blocks.0.mlp.act, hook: forward, action: fold, tokens: all, by: label}",
    )
    assert "hooks.units.by: the data set does not have a label for each sample" in says


def test_a_fold_of_too_many_labels_is_refused(refused) -> None:
    says = refused(
        *("data=digits", "model=mlp", "model.args.hidden=[3000]"),
        "+hooks.units={select: layers.0, hook: forward, action: fold, of: cov, by: label}",
    )
    assert "hooks.units.by: on layers.0: 10 labels of 3,000 units take 720,240,000 bytes, at most" in says


def test_the_plan_says_how_many_labels_fit() -> None:
    hook = {"select": "0", "hook": "forward", "action": "fold", "of": "cov", "by": "label"}
    model = torch.nn.Sequential(torch.nn.Linear(2, 3000))
    plan = hookrun.compile({"units": hook}, model, example=((torch.ones(4, 2),), {}))
    assert "holds 72 MB for each label, at most 7 labels, on 0" in str(plan)
