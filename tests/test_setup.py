"""The scripts create their own environment: with any suitable Python, once, and never an incomplete one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["scripts/hookrun", "scripts/test", "scripts/_env.sh", ".ci/run"]
TOOLS = "bash cat dirname env find flock grep head ln ls mkdir readlink sed sh sort tail timeout"


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A fresh clone on a machine without any Python."""
    machine = Machine(tmp_path)
    for folder in ("bin", "work", "check out"):
        (tmp_path / folder).mkdir()
    for tool in TOOLS.split():
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    for script in (*SCRIPTS, "pyproject.toml"):
        copy = machine.checkout / script
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / script, copy)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return machine


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A fresh clone on a machine with a suitable Python."""
    (bare.folder / "bin/python3").symlink_to(bare.folder / "python")
    return bare


def test_each_script_parses() -> None:
    for script in SCRIPTS:
        path = ROOT / script
        assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
        sourced = path.name.startswith("_")
        assert bool(path.stat().st_mode & 0o111) is not sourced, script
        assert path.read_text().startswith("#!/usr/bin/env bash\n") is not sourced, script


def test_the_first_python_that_can_create_an_environment_is_used(machine: Machine) -> None:
    machine.put("python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    machine.put("python3.12", other_python("(3, 10)"))
    machine.put("python3.11", other_python("(3, 14)"))
    done = machine.bash('choose_python; echo "$python"')
    taken = machine.folder / "bin/python3"
    assert done.stdout == f"{taken}\n"
    assert done.stderr == ""
    assert done.returncode == 0
    mine = str(machine.folder / "python")
    assert machine.bash('choose_python; echo "$python"', PYTHON=mine).stdout == f"{mine}\n"
    done = machine.bash('choose_python; echo "$python"', PYTHON="python9")
    assert done.stdout == f"{taken}\n"
    assert "PYTHON=python9 cannot be used" in done.stderr
    (machine.checkout / ".venv/bin").mkdir(parents=True)  # active, and about to be created again
    (machine.checkout / ".venv/bin/python3").symlink_to(machine.folder / "python")
    active = f"{machine.checkout}/.venv/bin:{machine.folder}/bin"
    assert machine.bash('choose_python; echo "$python"', PATH=active).stdout == f"{taken}\n"


def test_without_a_python_the_error_says_what_to_do(bare: Machine) -> None:
    bare.put("python3", other_python("(3, 10)"))
    done = bare.script("scripts/hookrun")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "needs Python 3.11 or newer, with venv (on Debian" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (bare.checkout / ".venv").exists()


def test_a_fresh_clone_installs_once(machine: Machine) -> None:
    first = machine.script("scripts/hookrun", "experiment=clip_fc", "note=two words")
    install, run = machine.asked()
    assert install == "pip install --disable-pip-version-check --editable . --quiet"
    assert run == "hookrun experiment=clip_fc note=two words"
    assert first.returncode == 0
    assert first.stdout == ""
    assert "making .venv" in first.stderr

    second = machine.script("scripts/hookrun")
    assert machine.asked() == ["hookrun"]
    assert second.returncode == 0
    assert second.stdout == ""
    assert second.stderr == ""


def test_a_run_by_a_link_returns_its_exit_code(machine) -> None:
    machine.install()
    link = machine.folder / "bin/hookrun"
    link.symlink_to(machine.checkout / "scripts/hookrun")
    assert machine.run(link, "task=plan", FAILING="hookrun").returncode == 9
    assert machine.log() == [f"{machine.folder / 'work'}: -m hookrun task=plan"]


def test_a_changed_pyproject_is_installed_again(machine: Machine) -> None:
    machine.install()
    kept = machine.checkout / ".venv/kept"
    kept.touch()
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    assert not machine.is_ready()
    machine.install()
    machine.install("dev")
    assert machine.is_ready()  # an environment with more extras suffices
    assert kept.exists()


def test_another_python_makes_a_new_environment(machine: Machine) -> None:
    machine.install()
    python = machine.checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to(machine.folder / "bin/other")
    assert not machine.is_ready()  # the Python that created it is gone
    machine.put("other", other_python("(3, 12)"))
    assert not machine.is_ready()  # or was replaced
    machine.install()
    assert python.readlink() == machine.folder / "python"


def test_a_copied_checkout_does_not_run_the_first_ones_code(machine: Machine) -> None:
    machine.install()
    copy = Machine(machine.folder / "copy")
    shutil.copytree(machine.folder, copy.folder, symlinks=True)
    assert not copy.is_ready()
    (copy.checkout / ".venv/of the first").touch()
    copy.install()
    assert not (copy.checkout / ".venv/of the first").exists()


def test_the_environment_behind_a_link_is_kept(machine: Machine) -> None:
    machine.install()
    other = Machine(machine.folder / "other")
    shutil.copytree(machine.folder, other.folder, symlinks=True)
    shutil.rmtree(other.checkout / ".venv")
    (other.checkout / ".venv").symlink_to(machine.checkout / ".venv")
    done = other.script("scripts/hookrun")
    assert done.returncode == 1
    assert f"belongs to {machine.checkout}" in done.stderr
    assert machine.is_ready()
    assert other.asked() == []


def test_an_environment_of_other_origin_is_not_changed(machine: Machine) -> None:
    theirs = machine.checkout / ".venv/pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.write_text("home = /usr/bin\n")
    done = machine.script("scripts/hookrun")
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert [*theirs.parent.iterdir()] == [theirs]
    assert theirs.read_text() == "home = /usr/bin\n"
    assert machine.asked() == []


def test_pip_installs_where_uv_fails(machine: Machine) -> None:
    machine.put("uv", '#!/bin/sh\necho "uv: uv $*" >> "$LOG"\n[ "$1 $FAILING" != "pip uv" ]\n')
    by_uv = f"uv pip install --python {machine.checkout}/.venv/bin/python --editable .[dev] --quiet"
    by_pip = "pip install --disable-pip-version-check --editable .[dev] --quiet"
    done = machine.bash("ensure_env dev", FAILING="uv")
    assert done.returncode == 0
    assert "uv could not install; trying pip" in done.stderr
    assert machine.asked() == [by_uv, by_pip]
    (machine.checkout / "pyproject.toml").write_text("# another dependency\n")
    assert machine.bash("ensure_env dev").returncode == 0
    assert machine.asked() == [by_uv]


def test_a_failed_installation_is_tried_again(machine: Machine) -> None:
    done = machine.script("scripts/hookrun", FAILING="pip")
    assert done.returncode == 1
    assert "the installation failed" in done.stderr
    assert [line.split()[0] for line in machine.asked()] == ["pip"]
    assert not machine.is_ready()
    assert machine.script("scripts/hookrun").returncode == 0
    assert machine.bash("ensure_env dev", FAILING="pip").returncode == 1
    assert machine.is_ready()
    assert not machine.is_ready("dev")


def test_an_interrupted_installation_is_not_used(machine: Machine) -> None:
    for extra in ("", "dev"):  # a new environment, and an update
        assert machine.bash(f'ensure_env "{extra}"', KILLED="pip").returncode == 137
        assert not machine.is_ready()
        assert not machine.is_ready("dev")
        left = machine.checkout / ".venv/half-installed"
        left.touch()
        machine.install()
        assert not left.exists()


def test_two_started_at_once_install_once(machine: Machine) -> None:
    both = [machine.start(machine.checkout / "scripts/hookrun") for _ in range(2)]
    for process in both:
        process.communicate()
        assert process.returncode == 0
    assert sorted(line.split()[0] for line in machine.asked()) == ["hookrun", "hookrun", "pip"]


def test_the_checks_run_in_order(machine: Machine) -> None:
    machine.install("dev")
    done = machine.script("scripts/test", "tests/engine/spec", "-k", "a and b", FAILING="pytest")
    checks = ["ruff format --check .", "ruff check .", "mypy"]
    assert machine.asked() == [*checks, "pytest -n 2 tests/engine/spec -k a and b"]
    assert done.stdout.splitlines()[-1] == "== pytest -n 2 tests/engine/spec -k a and b"
    assert done.returncode == 9
    assert done.stderr == ""

    done = machine.script("scripts/test", FAILING="ruff mypy")
    assert machine.asked() == checks  # a failed check is named, and the tests do not run
    assert done.returncode == 1
    assert done.stderr.endswith("failed: ruff format --check ., ruff check ., mypy\n")


def test_ci_measures_coverage(machine: Machine) -> None:
    machine.install("dev")
    measured = "pytest -n 2 --cov --cov-report= --cov-fail-under=0"
    done = machine.script(".ci/run")
    assert done.stdout.splitlines()[-2:] == ["== pytest -n 2", "stdin: "]
    assert machine.asked()[-2:] == [measured, "scripts/covered.py"]
    machine.script(".ci/run", "-x")
    assert machine.asked()[-2:] == [f"{measured} -x", "scripts/covered.py --part"]
    assert machine.script(".ci/run", FAILING="pytest").returncode == 9
    assert machine.asked()[-1] == measured
    machine.script(".ci/run", COVERAGE="")
    plain = "pytest -n 2 -q tests/semantics tests/engine/actions tests/engine/runtime"  # with HOOKRUN_FAST=0
    assert machine.asked()[-5:] == ["pytest -n 2", plain, *WITH_HARNESSES]
    for free, last in (("14G", WITH_HARNESSES[-1]), ("15G", f"pytest -n 2 {OF_HOOKS}")):
        machine.put("df", f"#!/bin/sh\necho Avail\necho ' {free}'\n")
        done = machine.script(".ci/run", COVERAGE="", OLDEST="1")
        assert done.returncode == 0
        assert machine.asked()[-1] == last
        assert ("not tested: that takes 15 GB of disk, and 14G are free" in done.stdout) == (free == "14G")


def test_harnesses_are_beside_the_packages_of_venv(machine: Machine) -> None:
    machine.install("dev")
    machine.put("uv", '#!/bin/sh\necho "uv: uv $*" >> "$LOG"\n')  # it would install torch again
    assert machine.script("scripts/test", "--harnesses").returncode == 0
    assert machine.asked() == WITH_HARNESSES
    packages = "lib/python3.x/site-packages"
    seen = machine.checkout / ".venv-harnesses" / packages / "seen.pth"
    assert seen.read_text() == f"{machine.checkout / '.venv' / packages}\n"
    assert machine.script("scripts/test", "--harnesses", "-x").returncode == 0
    assert machine.asked() == [WITH_HARNESSES[1], "pytest -n 2 -x"]
    assert machine.script("scripts/test", "--harnesses", FAILING="pytest").returncode == 9


def test_ci_goes_on_without_packages_of_harnesses(machine: Machine) -> None:
    machine.install("dev")
    done = machine.script(".ci/run", COVERAGE="", FAILING="pip")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("not tested with lm_eval and inspect_ai")
    assert machine.asked()[-1] == WITH_HARNESSES[0]


WITH_HARNESSES = [
    "pip install --disable-pip-version-check --editable .[inspect,lm-eval] --quiet",
    "-c import inspect_ai, lm_eval",
    "pytest -n 2 -n 0 tests/integrations/test_inspect_ai.py tests/integrations/test_lm_eval.py",
]
OF_HOOKS = "tests/semantics tests/engine/runtime tests/engine/actions tests/engine/plan"


def test_other_versions_are_tested_in_environments_of_their_own(machine: Machine) -> None:
    """With a torch that is named, and with the lower bound of every direct dependency."""
    machine.install("dev")
    for arguments, name, pytests in (
        (("--torch", "2.12", "tests/engine/spec", "-x"), "torch-2.12", "tests/engine/spec -x"),
        (("--oldest",), "oldest", OF_HOOKS),
        (("--oldest", "tests/engine/spec"), "oldest", "tests/engine/spec"),
    ):
        venv = machine.checkout / f".venv-{name}"
        install = "pip install --disable-pip-version-check --editable .[dev] --quiet"
        install += f" --constraint {venv}/constraints.txt"
        expected = [f"pytest -n 2 {pytests}"] if venv.exists() else [install, f"pytest -n 2 {pytests}"]
        assert machine.script("scripts/test", *arguments).returncode == 0
        assert machine.asked() == expected
    assert machine.is_ready("dev")
    assert (machine.checkout / ".venv-torch-2.12/constraints.txt").read_text() == "torch==2.12.*\n"
    refused = machine.script("scripts/test", "--torch")
    assert refused.returncode == 1
    assert "such as 2.12" in refused.stderr

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    texts = {text for each in lists for text in each}
    bounds = {text.partition(">=")[0]: re.findall(r">=([0-9.]+)", text) for text in texts}
    assert [name for name, lowest in bounds.items() if len(lowest) != 1] == [], "each has one lower bound"
    fixed = (machine.checkout / ".venv-oldest/constraints.txt").read_text().splitlines()
    assert fixed == sorted(f"{name}=={lowest}" for name, (lowest,) in bounds.items())


# A fake Python: creates environments that contain itself, logs what it was asked to run and where, fails at the
# modules named in $FAILING, kills its caller at the one named in $KILLED. Other questions go to a real Python.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
-I*) exec "{sys.executable}" "$@" ;;
"-m venv") mkdir -p "$3/bin" "$3/lib/python3.x/site-packages" && ln -s "$SELF" "$3/bin/python" ;;
*)
    echo "$PWD: $*" >> "$LOG"
    case " $FAILING " in *" $2 "*) exit 9 ;; esac
    [ "$2" != "$KILLED" ] || kill -KILL $PPID
    [ "$2" != pytest ] || echo "stdin: $(cat)" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A copy of the scripts, and a PATH with a few tools and the Pythons that a test puts there."""

    folder: Path

    @property
    def checkout(self) -> Path:
        return self.folder / "check out"

    def put(self, name: str, program: str) -> None:
        command = self.folder / "bin" / name
        command.unlink(missing_ok=True)
        command.write_text(program)
        command.chmod(0o755)

    def start(self, *command: str | Path, **env: str) -> subprocess.Popen[str]:
        given = {"LOG": self.folder / "log", "SELF": self.folder / "python", "PATH": self.folder / "bin"}
        return subprocess.Popen(
            [str(part) for part in command], cwd=self.folder / "work",
            env={"FAILING": "", "KILLED": ""} | {key: str(value) for key, value in given.items()} | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, **env)
        out, err = process.communicate("somebody types")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def script(self, name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.checkout / name, *arguments, **env)

    def bash(self, program: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of bash after the shared functions were sourced."""
        shared = self.checkout / "scripts/_env.sh"
        return self.run("bash", "-c", f'set -euo pipefail; source "$0"; {program}', shared, **env)

    def is_ready(self, extra: str = "") -> bool:
        return self.bash(f'is_ready "{extra}"').returncode == 0

    def log(self) -> list[str]:
        """What Python was asked to run since the last call, after the folder of each command."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def asked(self) -> list[str]:
        return [line.split(": ", 1)[1].removeprefix("-m ") for line in self.log()]

    def install(self, extra: str = "") -> None:
        done = self.bash(f'ensure_env "{extra}"')
        assert done.returncode == 0, done.stderr
        assert self.is_ready(extra), done.stderr
        self.asked()


def other_python(version: str) -> str:
    """A Python that reports another version."""
    return f'#!/bin/sh\nexec "{sys.executable}" "$1" "import sys; sys.version_info = {version}; $2"\n'
