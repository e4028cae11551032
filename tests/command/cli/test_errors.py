"""Every mistake on the command line or in a file is reported with its place, the existing names and the next step."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from hookrun.cli import main
from hookrun.command.compose.hydra import parse_override
from hookrun.command.compose.overrides import quoted, take_trust
from hookrun.errors import SpecError

Conf = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], notes) -> Callable[..., str]:
    """What a refused command line prints to stderr."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return run


@pytest.fixture
def said_of(said: Callable[..., str], conf: Conf) -> Callable[[str], str]:
    """The errors for an experiment file with this text; its folder is written as `CONF`."""

    def run(text: str) -> str:
        folder = conf(**{"experiment/mine": text})
        return said("--config-dir", folder, "experiment=mine").replace(folder, "CONF")

    return run


@pytest.mark.parametrize(
    ("typed", "lines"),
    [
        (
            ["experiment=clip_fx"],
            ["experiment: there is no 'clip_fx'; did you mean 'clip_fc'", "add_bias, ", "clip_fc, "],
        ),
        (["model=resnet19"], ["model: there is no 'resnet19'; did you mean 'resnet1", "cnn, decoder, mlp, "]),
        (["data.args.root=x"], ["data.args.root: there is no such key", "did you mean 'data.root'?"]),
        (["vars.x=1"], ["vars.x: there is no such key\n      vars holds no keys; to add it: +vars.x=1\n"]),
        (["experiment=[clip_fc,ad_bias]"], ["experiment: there is no 'ad_bias'; did you mean 'add_bias'?"]),
        (["experiment=tutoral/01_print_gradient"], ["did you mean 'tutorial/01_print_gradient'"]),
        (
            ['+vars={"a.*": {"b": x}, c: 1}'],
            ['Hydra: write keys without quotes: "+vars={a.*: {b: x}, c: 1}"\n'],
        ),
        (["++model=cnn"], ["\n  force-add of config groups is not supported: '++model=cnn'\n"]),
        (
            ["-m", "trian.epochs=3", "seed=1,2"],
            ["  trian.epochs: there is no such key\n      did you mean 'train.epochs'?\n"],
        ),
        (
            ["trian.epochs=3", "experiment=clip_fc", "hooks.clip_fc.mx=1", "strickt=true"],
            ["3 configuration errors\n", "'train.epochs'?", "'hooks.clip_fc.max'?", "'strict'?"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0].isascii() and len(value) == 1 else "",
)
def test_mistakes_on_the_command_line(typed: list[str], lines: list[str], said) -> None:
    printed = said(*typed)
    assert [line for line in lines if line not in printed] == []


def test_an_experiment_whose_name_is_a_number_needs_quotes(conf: Conf, notes, capsys) -> None:
    folder = conf(**{"experiment/nan": "# @package _global_\nseed: 7\n"})
    assert main(["--config-dir", folder, "experiment=nan"]) == 2
    assert "put the name in quotes of its own: \"experiment='nan'\"\n" in capsys.readouterr().err
    assert main(["--config-dir", folder, "experiment='nan'"]) == 0


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("trian.epochs=3", "did you mean 'train.epochs'?"),
        ("~trian", "did you mean 'train'?"),
        ("+train.epochs=3", "leave the `+` out"),
        ("model=resnet19", "did you mean 'resnet18'"),
        ("train=3", "expected a name"),
        ("seed=1,2", "put -m first"),
        ("+hooks.c.select=h[-1]", "\"+hooks.c.select='h[-1]'\""),
        ("hydra/launcher=jobblib", "must be installed first"),
        ("hydra.searchpath=[file:///nowhere]", "there is no folder /nowhere"),
    ],
)
def test_messages_do_not_depend_on_hydra_s_wording(typed: str, line: str, said, monkeypatch) -> None:
    monkeypatch.setattr(HydraException, "__str__", lambda error: "reworded")
    assert line in said(typed)


def test_folders_of_the_search_path_are_listed(conf: Conf, said) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\nseed: 7\n"})
    searched = f"hydra.searchpath=[file://{folder}]"
    assert "did you mean 'mine'?" in said(searched, "experiment=mien")
    printed = said(searched, "experiment=mine", "sede=3")
    assert printed.startswith("1 configuration error\n  sede: there is no such key\n")


@pytest.mark.parametrize(
    "typed",
    [
        "hooks.new.select=fc", "vars.width=3", "vars={width: 3}", "model.args.width=3",
        "data.transforms.normalize.mean=0",
        "train.optimizer.momentum=0.9", "train.optimizer={name: SGD, momentum: 0.9}", "train.scheduler.name=StepLR",
    ],
)  # fmt: skip
def test_the_suggested_plus_works(typed: str, said, capsys) -> None:
    assert f"to add it: +{typed}\n" in said(typed)
    assert main(["--cfg", "job", f"+{typed}"]) == 0


@pytest.mark.parametrize("key", ["expect", "index", "priority", "enabled"])
def test_a_key_that_the_hook_may_have_is_only_to_be_added(key: str, said) -> None:
    typed = f"hooks.clip_fc.{key}=1"
    assert said("experiment=clip_fc", typed).endswith(f"there is no such key\n      to add it: +{typed}\n")
    assert "did you mean" in said("experiment=clip_fc", "hooks.clip_fc.factor=1"), "clamp has no factor"


@pytest.mark.parametrize(("key", "meant"), [("mn", "min"), ("idnex", "index"), ("whem.step", "when.step")])
def test_a_misspelt_hook_key_is_compared_with_all_keys(key: str, meant: str, said) -> None:
    typed = f"hooks.clip_fc.{key}=1"
    assert f"did you mean 'hooks.clip_fc.{meant}'" in said("experiment=clip_fc", "~hooks.clip_fc.min", typed)


def test_a_key_of_a_swept_experiment_needs_two_plusses(capsys, notes) -> None:
    assert main(["-m", "experiment=clip_fc,", "hooks.clip_fc.max=1"]) == 2
    assert main(["-m", "experiment=choice(clip_fc)", "hooks.clip_fc.max=1"]) == 2
    assert "where only a swept experiment has it: ++hooks.clip_fc.max=1" in capsys.readouterr().err
    assert main(["-m", "experiment=choice(clip_fc)", "++hooks.clip_fc.max=1", "task=plan"]) == 0


class TestFiles:
    """Mistakes in an experiment file."""

    @pytest.mark.parametrize("value", ["*.conv", "**.attn", "*conv", "!conv", "@conv", "%conv", "`conv`"])
    def test_a_value_that_needs_quotes(self, value: str, said_of) -> None:
        printed = said_of(f"# @package _global_\nhooks:\n  a:\n    select: {value}\n")
        assert "CONF/experiment/mine.yaml:4:1" in printed
        assert f"in the line\n          select: {value}\n" in printed
        assert f"needs quotes: select: '{value}'\n" in printed

    def test_a_task_by_the_defaults_list(self, conf: Conf, notes) -> None:
        header = "# @package _global_\ndefaults: [{override /task: predict}]\n"
        folder = conf(**{"experiment/mine": header})
        assert main(["--config-dir", folder, "experiment=mine"]) == 0
        assert main(["--config-dir", folder, "experiment=mine", "task=plan"]) == 0
        assert [experiment.settings.task.name for experiment, _ in notes.prepared] == ["predict", "predict"]
        assert len(notes.ran) == 1
        assert len(notes.shown) == 1

    def test_a_suffix_that_hydra_does_not_read(self, conf: Conf, said) -> None:
        folder = conf(**{"experiment/mine.yml": "# @package _global_\n"})
        printed = said("--config-dir", folder, "experiment=mine")
        assert f"{folder}/experiment/mine.yml: configuration files end in .yaml" in printed
        assert "rename it to mine.yaml" in printed


def test_short_flags_with_their_choice_attached_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-cjob", "seed=7"]) == 0
    assert "seed: 7\n" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["a,b", "", "3", "null", "{a: b}", "[a", "['']", "/a/b"])
def test_anything_but_package_names_is_refused(given: str) -> None:
    with pytest.raises(SpecError, match=r"write \+trust=\[mypkg,other\]"):
        take_trust([f"+trust={given}"])


values = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=12)


@given(values)
def test_a_quoted_override_reaches_hydra_unchanged(value: str) -> None:
    """A shell removes the outer quotes, Hydra the inner ones."""
    shown = quoted(f"+hooks.c.select={value}")
    if shown is None:
        assert value[0] in "'\"" or "${" in value
        return
    (word,) = shlex.split(shown)
    assert parse_override(word).value() == value


@pytest.mark.parametrize("text", ["seed", "seed=", "seed='a", 'seed="a', "seed=a${b}"])
def test_quotes_are_not_suggested_where_they_do_not_help(text: str) -> None:
    assert quoted(text) is None
