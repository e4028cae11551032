"""One command line: what it shows, composes and checks, and which files it leaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.cli import main
from hookrun.command.cli.running import RefusedByMain, agreed, ranks_of
from hookrun.command.compose.compose import compose_dict
from hookrun.command.compose.hydra import App
from hookrun.engine.actions import actions
from hookrun.errors import HookrunError, Problem, SpecError
from hookrun.report.__main__ import main as report
from hookrun.run.ranks import ALONE
from hookrun.run.tasks import parse_experiment, tasks
from hookrun.store.files import StoreError
from hookrun.store.run_dir import RunDir
from hookrun.verify import main as verify

Conf = Callable[..., str]
OWN = "# @package _global_\nseed: 7\n"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_has_its_own_directory_with_its_configuration(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "seed=5"]) == 0
    assert main(["experiment=clip_fc", "seed=5"]) == 0
    first, second, latest = sorted((cwd / "outputs").iterdir())
    assert latest.resolve() == second.resolve()
    assert [run_dir for _, run_dir in notes.ran] == [first, second]
    assert OmegaConf.load(first / ".hydra/config.yaml").hooks.clip_fc.max == 0.01
    assert OmegaConf.load(first / ".hydra/overrides.yaml") == ["experiment=clip_fc", "seed=5"]
    assert left(first) == [".hydra", "status.json"]  # no log file by Hydra


def test_the_model_is_built_once_before_the_directory_is_made(cwd: Path, notes, monkeypatch) -> None:
    seen = []
    prepare = notes.prepare
    monkeypatch.setattr(
        "hookrun.run.tasks.prepare", lambda *e, **o: (seen.append(left(cwd)), prepare(*e, **o))[1]
    )
    assert main(["seed=5"]) == 0
    assert seen == [[]]
    assert len(notes.prepared) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=clip_fx"],
        ["trian.epochs=3"],
        ["train.epochs=many"],
        ["hooks={x: {}}"],
        ["seed=2"],
        ["seed=${nowhere}"],
        ["hydra.run.dir=${nowhere}"],
        ["seed=1,2"],
        ["+hooks.x.select=h[-1]"],
        ["-m", "seed=5,x"],
        ["-m", "seed=5,6", "train.epochs=-1"],
        ["-m", "seed=5", "hydra.sweep.dir=${nowhere}"],
        ["--config-dir", "nowhere"],
        ["--config-name", "nothing"],
        ["--cfg", "job", "--info"],
        ["--resolve"],
        ["--no-such-flag"],
        ["--experimental-rerun", "config.pickle"],
        ["--cfg", "job", "--package", "nothing"],
        ["-sc", "query=no_shell"],
    ],
    ids=" ".join,
)
def test_a_refused_command_leaves_no_files(arguments, cwd: Path, notes, capsys) -> None:
    assert main(arguments) == 2
    assert left(cwd) == []
    assert notes.ran == []
    printed = capsys.readouterr()
    assert printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.splitlines()) < 30


@pytest.mark.parametrize(
    ("task", "flags"), [("plan", []), ("modules", ["-m"]), ("plan", ["hydra.mode=MULTIRUN"])], ids=str
)
def test_a_read_only_task_leaves_no_files(task: str, flags: list[str], cwd: Path, notes) -> None:
    assert main([*flags, "experiment=clip_fc", f"task={task}"]) == 0
    of = {"plan": "train", "modules": "modules"}  # a plan is that of the experiment's own task
    assert [shown.settings.task.name for shown in notes.shown] == [of[task]]
    assert notes.ran == []
    assert left(cwd) == []


def test_only_a_plan_accepts_a_directory_that_holds_a_run(cwd: Path, notes, capsys) -> None:
    assert main(["seed=5", "hydra.run.dir=mine"]) == 0
    assert main(["seed=6", "hydra.run.dir=mine"]) == 2
    assert f"hydra.run.dir: {cwd / 'mine'} already holds a run" in capsys.readouterr().err
    assert main(["seed=6", "task=plan", "hydra.run.dir=mine"]) == 0
    assert OmegaConf.load(cwd / "mine/.hydra/config.yaml").seed == 5, "it was not changed"


def test_a_directory_that_cannot_be_created_is_refused(cwd: Path, notes, capsys) -> None:
    (cwd / "file").touch()
    assert main(["seed=5", "hydra.run.dir=file/run"]) == 2
    assert "file/run: Not a directory" in capsys.readouterr().err


def test_a_configuration_may_refer_to_its_own_run_directory(cwd: Path, notes) -> None:
    assert main(["seed=5", "data.root=${hydra:runtime.output_dir}"]) == 0
    ((experiment, _),) = notes.prepared
    assert experiment.settings.data.root == str((cwd / "outputs/latest").resolve())


@pytest.mark.parametrize(("seed", "code"), [(5, 0), (1, 1), (2, 2), (3, 3), (4, 3), (130, 130)])
def test_the_exit_code_is_that_of_the_run(seed: int, code: int, notes) -> None:
    assert main([f"seed={seed}"]) == code


class TestOwnFolders:
    """`--config-dir` and `hydra.searchpath`: the user's own experiments, without changes to hookrun."""

    @pytest.mark.parametrize(
        ("file", "typed"),
        [
            ("experiment/mine", ["--config-dir", "FOLDER", "experiment=mine"]),
            ("experiment/clip_fc", ["--config-dir", "FOLDER", "experiment=clip_fc"]),
            ("experiment/mine", ["hydra.searchpath=[file://FOLDER]", "experiment=mine"]),
            ("mine", ["--config-dir", "FOLDER", "--config-name", "mine"]),
        ],
        ids=["new", "before the shipped one", "search path", "root"],
    )
    def test_a_file_of_the_user_is_found_first(self, file: str, typed: list[str], conf: Conf, notes) -> None:
        folder = conf(**{file: OWN if file != "mine" else "defaults: [config, _self_]\nseed: 7\n"})
        assert main([text.replace("FOLDER", folder) for text in typed]) == 0
        assert notes.ran[0][0] == 7

    def test_a_hook_set_of_the_user(self, conf: Conf, notes) -> None:
        folder = conf(**{"hooks/mine": "probe: {select: fc, hook: forward, action: capture}\n"})
        assert main(["--config-dir", folder, "hooks=mine", "seed=5"]) == 0
        ((experiment, _),) = notes.prepared
        assert [hook.name for hook in experiment.hooks.hooks] == ["probe"]

    def test_another_main_folder(self, conf: Conf, capsys) -> None:
        folder = conf(config="seed: 7\n")
        assert main(["--config-path", folder, "--cfg", "job"]) == 0
        assert capsys.readouterr().out == "seed: 7\n"


class TestTrust:
    """The person who runs a command may trust packages, the author of a file may not."""

    @pytest.mark.parametrize(
        "typed", [[], ["+trust=[mypkg,other.sub]"], ["trust=[mypkg,other.sub]"], ["+trust=mypkg", "++trust=other.sub"]]
    )  # fmt: skip
    def test_only_typed_packages_are_trusted(self, typed, cwd: Path, notes) -> None:
        assert main([*typed, "seed=5"]) == 0
        ((_, trust),) = notes.prepared
        assert trust == ({"mypkg", "other.sub"} if typed else frozenset())
        stored = (cwd / "outputs/latest/.hydra").iterdir()
        assert "mypkg" not in "".join(file.read_text() for file in stored)

    def test_every_job_of_a_sweep_trusts_the_typed_packages(self, notes) -> None:
        assert main(["-m", "+trust=mypkg", "seed=5,6"]) == 0
        assert [trust for _, trust in notes.prepared] == [{"mypkg"}, {"mypkg"}]


class TestReading:
    """Flags that only show something."""

    def test_cfg_shows_the_part_that_was_asked_for(self, capsys) -> None:
        def shown(*typed: str) -> Any:
            assert main(["--cfg", *typed]) == 0
            return OmegaConf.create(capsys.readouterr().out)

        job = shown("job", "experiment=clip_fc", "seed=5")
        assert job.seed == 5
        assert job.hooks.clip_fc.action == "clamp"
        assert "hydra" not in job
        assert list(shown("hydra")) == ["hydra"]
        assert {"hydra", "task", "model"} <= set(shown("all"))
        assert shown("job", "-p", "train", "--resolve", "train.epochs=${seed}", "seed=5").epochs == 5

    @pytest.mark.parametrize("what", ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"])
    def test_info(self, what: str, cwd: Path, capsys) -> None:
        assert main(["experiment=clip_fc", "--info", what]) == 0
        assert capsys.readouterr().out
        assert left(cwd) == []


class TestCompletion:
    """Shell completion for the console script."""

    @pytest.fixture
    def complete(self, monkeypatch, capsys) -> Callable[[str], list[str]]:
        def query(line: str) -> list[str]:
            monkeypatch.setenv("COMP_LINE", line)
            assert main(["-sc", "query=bash"]) == 0
            return capsys.readouterr().out.split()

        return query

    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("task=pl", ["task=plan"]),
            ("experiment=tutorial/01", ["experiment=tutorial/01_print_gradient"]),
            ("experiment=clip_fc hooks.clip_fc.m", ["hooks.clip_fc.max=", "hooks.clip_fc.min="]),
        ],
    )
    def test_completion_offers_groups_options_keys(self, line: str, offered: list[str], complete) -> None:
        assert complete(f"hookrun {line}") == offered
        assert {"experiment=", "data=", "task="} <= set(complete("hookrun "))

    def test_a_folder_of_the_user(self, complete, conf: Conf) -> None:
        folder = conf(**{"experiment/mine": OWN})
        assert complete(f"hookrun --config-dir {folder} experiment=m") == ["experiment=mine"]

    def test_the_script_to_install_is_for_the_console_script(self, capsys) -> None:
        assert main(["-sc", "install=bash"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith("-F hydra_bash_completion hookrun")


HOOK = "{select: fc, hook: grad, action: print}"
TYPED = "+hooks.x={select: fc, hook: forward, action: print}"


INLINE = f"# @package _global_\ndefaults: [{{override /hooks: scale}}]\nhooks: {{print_a: {HOOK}, print_b: {HOOK}}}\n"
BELOW = f"# @package _global_\ndefaults: [mine]\nhooks: {{b: {HOOK}}}\n"


@pytest.mark.parametrize("none", ["hooks=none", "~hooks"])
@pytest.mark.parametrize("name", ["mine", "below"])
def test_hooks_none_switches_hooks_off_wherever_they_are_defined(none: str, name: str, conf: Conf) -> None:
    folder = conf(**{"experiment/mine": INLINE, "experiment/below": BELOW})
    experiment = f"experiment={name}"
    assert len(parse_experiment(compose_dict([experiment], folder)).hooks.hooks) >= 3
    config = compose_dict([none, experiment], folder)
    assert config["hooked"] is False
    assert "print_a" in config["hooks"]
    assert parse_experiment(config).hooks.hooks == ()
    config = compose_dict([TYPED, experiment, none], folder)
    assert config["hooked"] is True
    assert list(config["hooks"]) == ["x"]
    assert compose_dict([none, experiment, "hooked=true"], folder)["hooked"] is True


@pytest.mark.parametrize("none", ["hooks=none", "~hooks"])
def test_a_hook_may_be_deleted_beside_hooks_none(none: str, conf: Conf, notes, capsys) -> None:
    folder = conf(**{"experiment/mine": INLINE})
    gone = [none, "~hooks.print_a", "~hooks.print_b"]
    assert compose_dict(["experiment=mine", *gone], folder)["hooked"] is False
    assert list(compose_dict([*gone, "experiment=mine", TYPED], folder)["hooks"]) == ["x"]
    line = ["--config-dir", folder, "experiment=mine", none, "~hooks.print_a"]
    assert main([*line, "-m", "seed=5,6"]) == 0
    assert [len(each.hooks.hooks) for each, _ in notes.prepared[-2:]] == [0, 0]
    for more in (["~hooks.prnt_b"], ["-m", "seed=5,6", "~hooks.prnt_b"]):
        capsys.readouterr()
        assert main([*line, *more]) == 2
        said = capsys.readouterr().err
        assert "~hooks.prnt_b: there is no such key" in said
        assert "did you mean 'hooks.print_b'" in said


def test_hooks_that_are_switched_off_are_checked(notes, capsys) -> None:
    assert main(["experiment=clip_fc", "hooked=false", "hooks.clip_fc.max=x"]) == 2
    assert "hooks.clip_fc.max: found 'x'" in capsys.readouterr().err
    assert main(["experiment=clip_fc", "hooked=maybe"]) == 2
    assert "hooked: found 'maybe'" in capsys.readouterr().err


def test_a_stored_configuration_can_be_run_again(cwd: Path, notes) -> None:
    assert main(["experiment=clip_fc", "seed=5", "hydra.run.dir=old"]) == 0
    assert main(["--config-dir", "old/.hydra", "--config-name", "config", "hooks.clip_fc.max=0.5"]) == 0
    (seed, new) = notes.ran[1]
    assert seed == 5
    assert new.parent == cwd / "outputs"
    assert sorted(path.name for path in new.iterdir()) == [".hydra", "status.json"], "no log of Hydra's"
    (first, _), (second, _) = notes.prepared
    assert first.hooks.hooks[0].action.max == 0.01
    assert second.hooks.hooks[0].action.max == 0.5
    assert main(["-m", "--config-dir", "old/.hydra", "--config-name", "config", "seed=5,6"]) == 0
    assert notes.ran[-1][1].parents[1] == cwd / "multirun"


def test_a_plan_accepts_the_keys_of_the_experiment_s_own_task(notes, capsys) -> None:
    assert main(["experiment=capture_features", "task=plan", "task.split=train"]) == 0
    assert main(["-m", "experiment=capture_features", "task=plan", "task.split=train,val"]) == 0
    assert [shown.settings.task.split for shown in notes.shown] == ["train", "train", "val"]
    assert main(["experiment=capture_features", "task=plan", "task.splt=train"]) == 2
    assert "task.splt: there is no such key\n      did you mean 'task.split'" in capsys.readouterr().err


def test_errors_name_the_interpolation_of_a_value(notes, capsys) -> None:
    typed = ["train.epochs=${data.name}", "hooks.clip_fc.action=a${seed}", "+hooks.x=${train}"]
    assert main(["experiment=clip_fc", *typed]) == 2
    printed = capsys.readouterr().err
    assert "train.epochs: found 'digits' (from ${data.name}): expected a valid integer" in printed
    assert "hooks.clip_fc.action: found 'a0' (from a${seed}), which is not an action" in printed
    assert "hooks.x.select: is missing (hooks.x is ${train})" in printed
    assert main(["tags=[a,${seed}]", f"train.steps={'${data.name}' * 100}"]) == 2
    printed = capsys.readouterr().err
    assert "tags.1: found 0 (from ${seed}): expected" in printed
    assert "…): expected" in printed
    assert max(map(len, printed.splitlines())) < 1_000


def test_tags_are_the_user_s_own_words(notes, capsys) -> None:
    assert main(["tags=[paper,baseline]", "seed=5"]) == 0
    assert notes.prepared[0][0].settings.tags == ("paper", "baseline")
    assert main(["tags=paper"]) == 2
    assert "tags: found 'paper': expected a valid list" in capsys.readouterr().err


def test_the_note_is_one_sentence_of_the_user(notes, capsys) -> None:
    assert main(['note="without the last layer, again"']) == 0
    assert notes.prepared[0][0].settings.note == "without the last layer, again"
    assert main(["note=[a]"]) == main([f"note={'x' * 501}"]) == 2
    printed = capsys.readouterr().err
    assert "note: found ['a']: expected a valid string" in printed
    assert "at most 500" in printed


def test_a_quick_preset() -> None:
    train = compose_dict(["train=quick"])["train"]
    assert train["epochs"] == 1
    assert train["log_every"] == 1
    assert train["limit_batches"] <= 10


@pytest.mark.parametrize("key", ["off", "no", "on"])
def test_a_hook_named_like_a_boolean_must_be_quoted(key: str, conf, notes, capsys) -> None:
    hook = "{select: fc, hook: forward, action: print}"
    folder = conf(**{"experiment/mine": f"# @package _global_\nhooks:\n  {key}: {hook}\n  null: {hook}\n"})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "quote what YAML reads as something else" in capsys.readouterr().err
    folder = conf(**{"experiment/mine": f"# @package _global_\nhooks: {{{key}: {hook}}}\n"})
    assert main(["--config-dir", folder, "experiment=mine"]) == 2
    assert "as true and false: quote the key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "places"),
    [
        (["hooks.clip_fc.mx=3", "trian.epochs=3", "seed=-1"], ["hooks.clip_fc.mx", "trian.epochs"]),
        (["hooks.clip_fc.max=abc", "seed=-1"], ["hooks.clip_fc.max", "seed"]),
    ],
    ids=["keys", "values"],
)
def test_wrong_keys_are_told_before_wrong_values(typed: list[str], places: list[str], notes, capsys) -> None:
    assert main(["experiment=clip_fc", *typed]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n")
    for where in places:
        assert f"\n  {where}: " in printed


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        assert main(["--help", *arguments]) == 0
        return capsys.readouterr().out

    return run


def section(text: str, title: str) -> str:
    return next(block for block in text.split("\n\n") if block.startswith(title))


def test_help_describes_usage_in_whole_lines(help_of) -> None:
    text = help_of()
    assert max(map(len, text.splitlines())) <= 110
    assert "…" not in text
    assert text.startswith("hookrun: PyTorch hooks as configuration\n")
    assert "hookrun experiment=clip_fc task=plan" in text
    assert 'eval "$(hookrun -sc install=bash)"' in text


def test_each_task_action_or_choice_is_listed(help_of) -> None:
    text = help_of()
    for name in tasks():
        assert f"  {name} " in section(text, "Tasks")
    listed = section(text, "Actions").partition("\n")[2]
    assert "".join(listed.split()).split(",") == list(actions())  # as found by importing their modules
    assert "cnn" in section(text, "Models")
    assert "digits" in section(text, "Data sets")
    assert "none" in section(text, "Hook sets")


def test_an_experiment_is_listed_with_its_first_sentence(help_of, conf: Conf) -> None:
    folder = conf(
        **{
            "experiment/mine": "# @package _global_\n\n# What I am\n# after. More of it.\nseed: 1\n",
            "experiment/silent": "# @package _global_\nseed: 1\n# late\n",
            "experiment/sub/deep": "# @package _global_\n# Deep down.\n",
        }
    )
    lines = section(help_of("--config-dir", folder), "Experiments").splitlines()
    for words in (["mine", "What I am after"], ["silent"], ["sub/deep", "Deep down"]):
        assert words in [re.split("  +", line.strip()) for line in lines]


def test_long_names_do_not_widen_columns_of_other_folders(help_of, conf: Conf) -> None:
    sentence = "Long enough to fill all of the line that a short name leaves, and not one word more"
    folder = conf(
        **{
            "experiment/mine": f"# @package _global_\n# {sentence}.\n",
            "experiment/sub/a_name_that_is_longer_than_any_other": f"# @package _global_\n# {sentence}.\n",
        }
    )
    text = help_of("--config-dir", folder)
    (line,) = [line for line in text.splitlines() if line.startswith("  mine ")]
    assert line.endswith(sentence)
    assert "sub/a_name_that_is_longer_than_any_other  Long enough to fill" in text


def test_another_help_template_of_hydra_still_works(help_of) -> None:
    text = help_of("hydra/help=default", "seed=7")
    assert "experiment: activation_patching, add_bias, " in text
    assert "seed: 7" in text


SECTIONS = {"model": {"name": "mlp"}, "data": {"name": "digits"}}


def test_a_run_is_composed_once(notes, conf, monkeypatch) -> None:
    count = 0
    real = App.compose_config

    def compose_config(self: App, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += self._checked is None
        return real(self, *args, **options)

    monkeypatch.setattr(App, "compose_config", compose_config)
    assert main(["seed=5"]) == 0
    assert count == 1
    folder = conf(**{"experiment/mine": "# @package _global_\nhydra: {mode: MULTIRUN}\n"})
    for typed, seeds in (
        (["seed=6,7"], [6, 7]),
        (["seed=8", "hydra.mode=RUN"], [8]),
        (["-r", "seed=9"], [9]),
    ):
        notes.ran.clear()
        assert main(["--config-dir", folder, "experiment=mine", *typed]) == 0
        assert [seed for seed, _ in notes.ran] == seeds
        assert (notes.ran[0][1].parent.name == "outputs") == (len(seeds) == 1), typed


def test_settings_of_sweeps_do_not_fit_a_single_run(notes, cwd: Path, capsys) -> None:
    assert main(["seed=5", "fail_fast=true"]) == 2
    assert "fail_fast: is for a sweep, and this is one run" in capsys.readouterr().err
    assert main(["seed=5", "baseline=true"]) == 0
    assert "NOTE: baseline: true is for sweeps (-m)" in capsys.readouterr().out
    assert main(["seed=5", "baseline=true", "task=plan"]) == 0
    assert "NOTE" not in capsys.readouterr().out


def test_mistakes_that_are_typed_come_before_those_in_files(notes, conf, capsys) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\ntrain: {epochs: x}\n"})
    assert main(["--config-dir", folder, "experiment=mine", "sed=1", "strickt=true"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n")
    assert "train.epochs" not in printed
    assert main(["--config-dir", folder, "experiment=mine", "seed=y"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("2 configuration errors\n")
    assert "train.epochs" in printed
    assert notes.prepared == []


def test_a_finished_run_is_not_resumed(notes, cwd: Path, capsys) -> None:
    assert main(["seed=5", "hydra.run.dir=mine"]) == 0
    left = cwd / "mine/checkpoints/state_000001"
    left.mkdir(parents=True)
    assert main(["resume=mine"]) == 0
    assert "mine is done: there is nothing to resume" in capsys.readouterr().out
    assert len(notes.ran) == 1
    assert not left.exists()
    assert main(["seed=1", "hydra.run.dir=failed"]) == 1
    capsys.readouterr()
    assert main(["resume=failed", "task=plan"]) == 2
    assert "task=plan does not make a run that could be resumed" in capsys.readouterr().err


class Two:
    """One of two ranks, with a given answer of the other rank."""

    several = True

    def __init__(self, rank: int, other: list[Any] | None) -> None:
        self.is_main, self._rank, self._other = rank == 0, rank, other

    def gathered(self, mine: Any) -> list[Any]:
        return [mine, self._other] if self._rank == 0 else [self._other, mine]


def test_a_run_without_a_strategy_refuses_several_processes(monkeypatch) -> None:
    with ranks_of(parse_experiment(SECTIONS)) as ranks:
        assert ranks is ALONE
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError), ranks_of(parse_experiment(SECTIONS)):
        pytest.fail("each of two processes would do the whole run")


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_wait_for_each_other_at_their_end(failed: bool, monkeypatch) -> None:
    met = list[bool]()
    group = SimpleNamespace(failed=failed, meet=lambda: met.append(True), failures_told=nullcontext)
    monkeypatch.setattr("hookrun.run.ranks.group.joined", lambda *_: nullcontext(group))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    compute = {"strategy": "ddp", "device": "cpu"}
    with ranks_of(parse_experiment({**SECTIONS, "compute": compute})) as ranks:
        assert ranks is group
        assert not met
    assert met == ([] if failed else [True])


def test_the_failure_of_one_rank_is_reported_once() -> None:
    refusal = SpecError([Problem("a", "is wrong")])
    ranks: Any = Two(0, ["b", 1])
    with pytest.raises(SpecError), agreed(ranks):
        raise refusal
    with pytest.raises(HookrunError, match="rank 1 cannot run the experiment") as told, agreed(ranks):
        pass
    assert "\nb" in str(told.value)
    ranks = Two(1, [str(refusal), 2])
    with pytest.raises(RefusedByMain) as silent, agreed(ranks):
        pass
    assert silent.value.exit_code == 2
    ranks = Two(1, None)
    with agreed(ranks):
        pass


SMALL = ["experiment=clip_fc", "train.epochs=1", "train.limit_batches=2", "compute=cpu", "hydra.run.dir=run"]


def test_hooks_that_do_not_fit_the_model_leave_no_files(cwd: Path, capsys) -> None:
    assert main([*SMALL, "hooks.clip_fc.select=fd"]) == 2
    printed = capsys.readouterr().err
    assert "hooks.clip_fc" in printed
    assert "Traceback" not in printed
    assert list(cwd.iterdir()) == []


def test_latest_is_made_in_the_folder_of_outputs_only(cwd: Path, notes, monkeypatch) -> None:
    monkeypatch.setenv("HOOKRUN_OUTPUT", str(cwd / "mine"))
    for folder, is_made in (("mine/outputs", True), ("elsewhere", False), ("mine/outputs2", False)):
        assert main(["seed=5", f"hydra.run.dir={cwd / folder / 'run'}"]) == 0
        assert (cwd / folder / "latest").is_symlink() == is_made, folder


def test_a_run_inside_the_directory_of_another_run_is_refused(cwd: Path, notes, capsys) -> None:
    done = cwd / "sweep/0"
    done.mkdir(parents=True)
    for name in ("status.json", "env.json"):
        (done / name).write_text('{"status": "done"}')
    (cwd / "link").symlink_to(done)
    for place in ("hydra.run.dir=sweep/0/b", "hydra.run.dir=link/deep/er"):
        assert main([place]) == 2
        assert f"is inside of {done}, which holds a run" in capsys.readouterr().err
    assert main(["-m", "seed=5,6", "hydra.sweep.dir=sweep/0/b"]) == 2
    assert main(["-m", "seed=5,6", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra.job.num}/x"]) == 2
    with pytest.raises(StoreError, match="is inside of"):
        RunDir.create(done / "own")
    assert notes.ran == []
    assert sorted(path.name for path in done.iterdir()) == ["env.json", "status.json"]
    assert main(["hydra.run.dir=sweep/b"]) == 0, "beside a job of a sweep"


LONG = "x" * 300


@pytest.mark.parametrize(
    "typed",
    [
        [f"hydra.run.dir={LONG}"],
        [f"hydra.run.dir=new/{LONG}/run"],
        ["hydra.run.dir=" + "x/" * 3_000],
        ["-m", "seed=5,6", f"hydra.sweep.dir=new/{LONG}"],
        ["-m", "seed=5,6", f"hydra.sweep.subdir=${{hydra.job.num}}{LONG}"],
        [f"resume={LONG}"],
        ["-m", f"resume={LONG}"],
        ["--config-dir", LONG],
    ],
)
def test_a_name_that_is_too_long_is_refused_in_a_sentence(typed, cwd: Path, notes, capsys) -> None:
    assert main(typed) == 2
    said = capsys.readouterr().err
    assert "File name too long" in said
    assert "Traceback" not in said
    assert notes.ran == []
    assert list(cwd.iterdir()) == []


def test_other_commands_refuse_a_path_that_is_too_long(capsys: Any) -> None:
    for command in (verify, report):
        assert command([LONG]) == 2
        said = capsys.readouterr().err
        assert "File name too long" in said
        assert len(said) < 1_000
