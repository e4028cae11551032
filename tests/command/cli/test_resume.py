"""`resume=DIR` on the command line: what is resumed, what is refused, what is printed, and what is not changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hookrun
from hookrun.cli import main
from hookrun.command.cli.running import composed_again
from hookrun.command.compose.hydra import Composition, conf_dir, opened
from hookrun.run.passes import resuming
from hookrun.run.training import loop as training

SMALL = [
    "compute.device=cpu", "model=mlp", "train.epochs=2", "train.limit_batches=3", "train.checkpoint.every.steps=1",
]  # fmt: skip
Say = Callable[[list[str]], tuple[int, str]]
WRITTEN_AT = re.compile(r"\d\d:\d\d:\d\d UTC")


@pytest.fixture
def say(capfd: pytest.CaptureFixture[str]) -> Say:
    """Run a command line; returns its exit code and its whole output."""

    def run(argv: list[str]) -> tuple[int, str]:
        capfd.readouterr()
        code = main(argv)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture(scope="module")
def failed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, outputs/one, that failed in its fifth step."""
    folder = tmp_path_factory.mktemp("failed")
    with pytest.MonkeyPatch.context() as patch, failing_at(5), redirect_stderr(StringIO()) as said:
        patch.chdir(folder)
        assert main([*SMALL, "hydra.run.dir=outputs/one"]) == 1
    assert "to go on: hookrun resume=outputs/one" in said.getvalue()
    return folder


@pytest.fixture
def failed(failed_once: Path, cwd: Path) -> Path:
    """A copy of the run that failed in its fifth step."""
    shutil.copytree(failed_once / "outputs", cwd / "outputs", symlinks=True)
    return cwd / "outputs" / "one"


@pytest.fixture(scope="module")
def whole_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, finished."""
    folder = tmp_path_factory.mktemp("whole") / "one"
    assert main([*SMALL, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def whole(whole_once: Path, cwd: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(whole_once, cwd / "one"))


def test_a_resumed_run_ends_as_done(failed: Path, whole_once: Path, say: Say) -> None:
    config = (failed / ".hydra" / "config.yaml").read_bytes()
    code, said = say(["resume=latest"])
    assert os.readlink(failed.with_name("latest")) == "one"
    expected = hookrun.open_run(whole_once)
    resumed = hookrun.open_run(failed)

    assert code == 0
    assert "resumed from state_000005, step 4" in said
    assert list(map(str, resumed.metrics)) == list(map(str, expected.metrics))
    one = expected.path / "checkpoints/last.safetensors"
    other = resumed.path / "checkpoints/last.safetensors"
    assert one.read_bytes() == other.read_bytes()
    assert resumed.status["status"] == "done"
    assert (failed / ".hydra" / "config.yaml").read_bytes() == config
    code, said = say([f"+resume={failed}", "train.epochs=2"])
    assert code == 0
    assert "is done: there is nothing to resume" in said
    assert "not used: train.epochs=2" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["train.optimizer.lr=0.5"], "train.optimizer.lr: 0.001 there, 0.5 now"),
        (["+hooks.x={select: '**', hook: forward, action: capture}"], "None there, 'capture' now"),
        (["train.lr=3"], "train.lr"),
        (["model=cnn"], "model.name: 'mlp' there, 'cnn' now"),
        (["task=plan"], "task=plan does not make a run that could be resumed"),
    ],
)
def test_another_configuration_is_refused_with_differences(
    failed: Path, say: Say, more: list[str], expected: str
) -> None:
    before = files(failed)
    code, said = say([f"resume={failed}", *more])
    assert code == 2, said
    assert expected in said, said
    assert files(failed) == before


def test_repeating_the_same_overrides_is_not_a_change(failed: Path) -> None:
    with opened(conf_dir()) as app, composed_again(Composition(app, "config", SMALL), failed, force=False):
        pass


def test_another_version_is_refused_without_resume_anyway(failed, say, monkeypatch) -> None:
    monkeypatch.setattr(resuming, "__version__", "99")
    before = files(failed)
    code, said = say([f"resume={failed}"])
    assert code == 2
    assert "then, 99 now" in said
    assert "resume_anyway=true" in said
    assert files(failed) == before
    code, said = say([f"resume={failed}", "resume_anyway=true", "train.epochs=3"])
    assert code == 0
    assert "resumed from state_000005, step 4" in said
    assert "epochs: 3" in (failed / ".hydra" / "config.yaml").read_text(), "the new configuration is stored"
    assert hookrun.open_run(failed).metrics[-1]["epoch"] == 2


def test_changed_data_is_refused(cwd: Path, say: Say) -> None:
    def write(value: float) -> None:
        images = torch.full((30, 1, 8, 8), value)
        labels = torch.arange(30) % 10
        save_file({"x": images, "y": labels}, "data.safetensors")

    write(0.0)
    data = ["data=tensors", "data.args={file: data.safetensors, input: x, target: y}", "data.batch_size=5"]
    with failing_at(5):
        code, said = say([*SMALL, *data, "model.args.num_classes=10", "hydra.run.dir=one"])
    assert code == 1, said
    write(1.0)
    code, said = say(["resume=one"])
    assert code == 2, said
    assert "data.safetensors: its content has changed" in said, said


def test_damaged_states_are_kept_without_resume_anyway(failed: Path, say: Say) -> None:
    for file in failed.glob("checkpoints/state_*/state.json"):
        file.write_bytes(b"torn")
    before = files(failed)
    code, said = say([f"resume={failed}"])
    assert code == 2
    assert "has no undamaged state" in said
    assert files(failed) == before
    with failing_at(1):
        code, said = say([f"resume={failed}", "resume_anyway=true"])
    assert code == 1
    assert "the run starts from the beginning" in said
    assert "the machine is gone" in said


def test_a_run_that_cannot_go_on_is_not_told_to_go_on(failed: Path, say: Say) -> None:
    lines = failed / "metrics.jsonl"
    lines.write_bytes(lines.read_bytes()[:-9])
    code, said = say([f"resume={failed}"])
    assert code == 1
    assert "metrics.jsonl has" in said
    assert "to go on:" not in said


def test_an_earlier_state_replaces_a_damaged_one(failed: Path, say: Say) -> None:
    (failed / "checkpoints" / "state_000005" / "tensors.safetensors").write_bytes(b"torn")
    failed.with_name("latest").unlink()
    failed.with_name("latest").symlink_to("two")
    code, said = say([f"resume={failed}"])
    assert code == 0, said
    assert "state_000005 is damaged" in said
    assert "resumed from state_000004, step 3" in said
    assert os.readlink(failed.with_name("latest")) == "two", "a resumed run does not become the latest one"


def test_without_any_state_it_starts_from_the_beginning(failed: Path, say: Say) -> None:
    shutil.rmtree(failed / "checkpoints")
    code, said = say([f"resume={failed}"])
    steps = [line["step"] for line in hookrun.open_run(failed).metrics if line.get("of") == "batch"]
    assert "the run starts from the beginning" in said
    assert "resumed from" not in said
    assert code == 0
    assert steps == [0]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["resume=latest"], "there is no"),
        (["resume=outputs/on"], "there are none"),
        (["resume=latst"], "did you mean 'latest'?"),
        (["resume=."], "has no status.json: no run began there"),
        (["resume=1,2"], "expected one value"),
        (["resume=true"], "expected a directory"),
        (["resume="], "expected a directory"),
        (["resume=a b: {c"], "/a b: {c"),  # which Hydra's grammar cannot read
        (["resume_anyway=true"], "goes with resume=DIR"),
        (["resume=x", "resume_anyway=3"], "resume_anyway=true"),
    ],
)
def test_runs_that_cannot_be_resumed_say_why(cwd, say, argv: list[str], expected: str) -> None:
    code, said = say(argv)
    assert code == 2, said
    assert expected in said, said
    assert not (cwd / "outputs").exists()


def test_a_file_cannot_set_resume(conf: Callable[..., str], say: Say) -> None:
    folder = conf(**{"experiment/mine": "# @package _global_\nresume: latest\n"})
    code, said = say(["--config-dir", folder, "experiment=mine"])
    assert code == 2, said
    assert "resume: is taken from the command line only" in said, said


def test_states_are_kept_with_keep_done(cwd: Path, say: Say) -> None:
    argv = [*SMALL, "train.checkpoint.keep=3", "train.checkpoint.keep_done=true", "hydra.run.dir=one"]
    assert say(argv)[0] == 0
    states = sorted(path.name for path in Path("one/checkpoints").glob("state_*"))
    about = json.loads(Path("one/checkpoints", states[-1], "state.json").read_text())["about"]
    assert states == ["state_000006", "state_000007", "state_000008"]
    assert about["at"]["step"] == 6
    assert about["train"]["epochs"] == 2
    assert say(["resume=one"])[0] == 0
    assert Path("one/checkpoints", states[-1]).is_dir()


def test_the_page_that_a_killed_process_did_not_write_is_written(whole: Path, whole_once, say: Say) -> None:
    page = whole / "report.html"
    written = page.read_text().replace(str(whole_once), str(whole))
    for break_it in (page.unlink, lambda: os.utime(page, (0, 0))):
        break_it()
        code, said = say(["resume=one"])
        assert code == 0
        assert "nothing to resume" in said
        assert f"report: {page}" in said
        assert WRITTEN_AT.sub("", page.read_text()) == WRITTEN_AT.sub("", written)
        assert "report:" not in say(["resume=one"])[1]


def test_states_left_by_a_killed_process_are_removed(whole, failed, say) -> None:
    shutil.copytree(failed / "checkpoints", whole / "checkpoints", dirs_exist_ok=True)
    assert list(whole.glob("checkpoints/state_*"))
    code, said = say(["resume=one"])
    assert code == 0
    assert "is done" in said
    assert not list(whole.glob("checkpoints/state_*"))


def test_without_every_states_are_saved_for_signals_alone(cwd: Path, say: Say) -> None:
    keys = ["train.checkpoint.every=null", "train.checkpoint.keep_done=true", "hydra.run.dir=one"]
    code, said = say([*SMALL[:-1], *keys])
    assert code == 0, said
    assert not list(Path("one/checkpoints").glob("state_*"))


@contextmanager
def failing_at(number: int) -> Iterator[None]:
    """Training fails at its n-th step."""
    step = training.train_step
    left = [number]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the machine is gone")
        step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_step", failing)
        yield


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
