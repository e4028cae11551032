"""The scripts bring up their own environment: with any Python that works, once, and never a half-made one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["scripts/hookrun", "scripts/test", "scripts/coverage", "scripts/_env.sh", ".ci/run"]
TOOLS = ["bash", "cat", "dirname", "env", "flock", "head", "ln", "ls", "mkdir", "mv", "readlink", "rm", "sh"]

# Stands for a Python: makes environments that hold itself, notes which modules it was asked to run and where,
# fails at those named in $FAILING, kills its caller at those in $KILLED. All else goes to a real Python.
PYTHON = f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && ln -s "$SELF" "$3/bin/python" ;;
"-m "*)
    echo "$PWD: $*" >> "$LOG"
    case " $FAILING " in *" $2 "*) exit 9 ;; esac
    case " $KILLED " in *" $2 "*) kill -KILL $PPID ;; esac
    if [ "$2" = pytest ]; then echo "stdin: $(cat) CI: $CI"; fi ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A copy of the scripts, and a PATH that holds a few tools and the Pythons that a test puts there."""

    folder: Path
    failing: str = ""
    killed: str = ""

    @property
    def checkout(self) -> Path:
        return self.folder / "check out"

    @property
    def stamp(self) -> Path:
        return self.checkout / ".venv/.hookrun"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": str(self.folder / "bin"),
            "LOG": str(self.folder / "log"),
            "SELF": str(self.folder / "python"),
            "FAILING": self.failing,
            "KILLED": self.killed,
        }

    def put(self, name: str, program: str) -> None:
        command = self.folder / "bin" / name
        command.unlink(missing_ok=True)
        command.write_text(program)
        command.chmod(0o755)

    def run(self, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        work = self.folder / "work"
        return subprocess.run(
            [str(part) for part in command],
            cwd=work,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def bash(self, program: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a line of bash after the shared functions were read."""
        return self.run(
            "bash",
            "-c",
            f'set -euo pipefail; source "$0"; {program}',
            self.checkout / "scripts/_env.sh",
            **env,
        )

    def is_ready(self, extra: str = "") -> bool:
        return self.bash(f'is_ready "{extra}"').returncode == 0

    def asked(self) -> list[str]:
        """The modules that Python was asked to run since the last time, with their arguments."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.split(": -m ", 1)[1] for line in lines]

    def install(self, extra: str = "") -> None:
        done = self.bash(f'ensure_env "{extra}"')
        assert done.returncode == 0 and self.is_ready(extra), done.stderr
        self.asked()


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A fresh clone on a machine without any Python."""
    machine = Machine(tmp_path)
    for folder in ("bin", "work", "check out"):
        (tmp_path / folder).mkdir()
    for tool in TOOLS:
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
    """A fresh clone on a machine with a Python that works."""
    (bare.folder / "bin/python3").symlink_to(bare.folder / "python")
    return bare


def failing(machine: Machine, *modules: str) -> Machine:
    return Machine(machine.folder, failing=" ".join(modules))


def other_python(version: str) -> str:
    """A Python of another version, as far as anybody asks."""
    refuses = version < "3.11"
    return f"""#!/bin/sh
case "$*" in *ensurepip*) exit {int(refuses)} ;; *) echo {version} "$@" ;; esac
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_parses_and_can_be_run(script: str) -> None:
    path = ROOT / script
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    sourced = path.name.startswith("_")
    assert bool(path.stat().st_mode & 0o111) is not sourced
    assert path.read_text().startswith("#!/usr/bin/env bash\n") is not sourced


def test_the_first_python_that_can_make_an_environment_is_taken(machine: Machine) -> None:
    machine.put("python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    machine.put("python3.12", other_python("3.10"))
    done = machine.bash('choose_python; echo "$python"')
    assert (done.stdout, done.stderr, done.returncode) == ("python3\n", "", 0)
    mine = str(machine.folder / "python")
    assert machine.bash('choose_python; echo "$python"', PYTHON=mine).stdout == f"{mine}\n"


def test_a_users_choice_that_fails_is_said(machine: Machine) -> None:
    done = machine.bash('choose_python; echo "$python"', PYTHON="python9")
    assert done.stdout == "python3\n"
    assert "PYTHON=python9 cannot be used" in done.stderr


def test_without_a_python_the_error_says_what_to_do(bare: Machine) -> None:
    bare.put("python3", other_python("3.09"))
    done = bare.run(bare.checkout / "scripts/hookrun")
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs Python 3.11 or newer, with venv" in done.stderr and "PYTHON=" in done.stderr
    assert not (bare.checkout / ".venv").exists()


def test_a_fresh_clone_installs_once_and_runs(machine: Machine) -> None:
    script = machine.checkout / "scripts/hookrun"
    first = machine.run(script, "experiment=clip_fc", "note=two words")
    install, run = machine.asked()
    assert install.startswith("pip install") and install.endswith("--editable . --quiet")
    assert run == "hookrun experiment=clip_fc note=two words"
    assert (first.returncode, first.stdout) == (0, "")
    assert "making .venv" in first.stderr

    second = machine.run(script)
    assert machine.asked() == ["hookrun"]
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_a_run_starts_in_the_callers_folder(machine: Machine) -> None:
    machine.install()
    machine.run(machine.checkout / "scripts/hookrun")
    assert (machine.folder / "log").read_text() == f"{machine.folder / 'work'}: -m hookrun\n"


def test_a_link_to_the_script_finds_its_checkout(machine: Machine) -> None:
    machine.install()
    link = machine.folder / "bin/hookrun"
    link.symlink_to(machine.checkout / "scripts/hookrun")
    assert machine.run(link, "task=plan").returncode == 0
    assert machine.asked() == ["hookrun task=plan"]


def test_the_runs_exit_code_is_the_scripts(machine: Machine) -> None:
    machine.install()
    assert failing(machine, "hookrun").run(machine.checkout / "scripts/hookrun").returncode == 9


def test_an_environment_with_more_serves_who_needs_less(machine: Machine) -> None:
    machine.install()
    machine.install("dev")
    assert machine.is_ready() and machine.is_ready("dev")


def test_a_changed_pyproject_is_installed_again_into_the_same_environment(machine: Machine) -> None:
    machine.install()
    kept = machine.checkout / ".venv/kept"
    kept.touch()
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    assert not machine.is_ready()
    machine.install()
    assert kept.exists()


def test_another_python_begins_anew(machine: Machine) -> None:
    machine.install()
    python = machine.checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to(machine.folder / "bin/other")
    assert not machine.is_ready()  # the Python that it was made with is gone
    machine.put("other", other_python("3.99"))
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


def test_somebody_elses_environment_is_left_alone(machine: Machine) -> None:
    theirs = machine.checkout / ".venv/pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.write_text("home = /usr/bin\n")
    done = machine.run(machine.checkout / "scripts/hookrun")
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert theirs.read_text() == "home = /usr/bin\n"
    assert machine.asked() == []


def test_uv_installs_where_there_is_one(machine: Machine) -> None:
    machine.put("uv", '#!/bin/sh\necho "uv: -m uv $*" >> "$LOG"\n')
    assert machine.run(machine.checkout / "scripts/hookrun").returncode == 0
    python = machine.checkout / ".venv/bin/python"
    assert machine.asked() == [f"uv pip install --python {python} --editable . --quiet", "hookrun"]


def test_pip_installs_where_uv_fails(machine: Machine) -> None:
    machine.put("uv", "#!/bin/sh\necho 'no such index' >&2\nexit 2\n")
    done = machine.run(machine.checkout / "scripts/hookrun")
    assert done.returncode == 0
    assert "uv could not install; trying pip" in done.stderr
    assert [line.split()[0] for line in machine.asked()] == ["pip", "hookrun"]


def test_a_failed_installation_runs_nothing_and_is_tried_again(machine: Machine) -> None:
    script = machine.checkout / "scripts/hookrun"
    done = failing(machine, "pip").run(script)
    assert done.returncode == 1
    assert "the installation failed" in done.stderr
    assert [line.split()[0] for line in machine.asked()] == ["pip"]
    assert not machine.is_ready()
    assert machine.run(script).returncode == 0
    assert machine.is_ready()


def test_an_update_that_fails_keeps_what_there_was(machine: Machine) -> None:
    machine.install()
    assert failing(machine, "pip").bash("ensure_env dev").returncode == 1
    assert machine.is_ready() and not machine.is_ready("dev")


@pytest.mark.parametrize("extra", ["", "dev"])
def test_an_interrupted_installation_is_not_taken_for_a_good_one(machine: Machine, extra: str) -> None:
    if extra:
        machine.install()
    done = Machine(machine.folder, killed="pip").bash(f'ensure_env "{extra}"')
    assert done.returncode == 137
    assert not machine.is_ready(extra)
    left = machine.checkout / ".venv/half-installed"
    left.touch()
    machine.install(extra)
    assert not left.exists()


def test_two_started_at_once_install_once(machine: Machine) -> None:
    script = machine.checkout / "scripts/hookrun"
    both = [
        subprocess.Popen([script], cwd=machine.folder / "work", env=machine.env, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert sorted(line.split()[0] for line in machine.asked()) == ["hookrun", "hookrun", "pip"]


def test_the_checks_run_in_order_and_pytest_gets_the_arguments(machine: Machine) -> None:
    machine.install("dev")
    done = machine.run(machine.checkout / "scripts/test", "tests/spec", "-k", "a and b")
    assert done.returncode == 0
    assert machine.asked() == [
        "ruff format --check .",
        "ruff check .",
        "mypy",
        "pytest -n 2 tests/spec -k a and b",
    ]


def test_a_failed_check_is_named_and_ends_before_the_tests(machine: Machine) -> None:
    machine.install("dev")
    done = failing(machine, "ruff", "mypy").run(machine.checkout / "scripts/test")
    assert done.returncode == 1
    assert done.stderr.endswith("failed: ruff format --check ., ruff check ., mypy\n")
    assert machine.asked() == ["ruff format --check .", "ruff check .", "mypy"]


def test_the_last_line_and_the_exit_code_are_pytests(machine: Machine) -> None:
    machine.install("dev")
    done = failing(machine, "pytest").run(machine.checkout / "scripts/test")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (9, "== pytest -n 2", "")


def test_ci_runs_the_same_with_its_input_closed(machine: Machine) -> None:
    machine.install("dev")
    done = subprocess.run(
        [machine.checkout / ".ci/run", "-x"],
        cwd="/",
        env=machine.env,
        input="somebody types",
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-2:] == ["== pytest -n 2 -x", "stdin:  CI: true"]
    assert machine.asked()[-1] == "pytest -n 2 -x"
