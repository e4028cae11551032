"""What a start imports: nothing heavy that the run does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "sklearn", "scipy", "pandas", "torchvision")


def test_a_small_run_imports_neither_the_compiler_nor_scikit_learn(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from hookrun.cli import main\n"
        "small = ['experiment=clip_fc', 'train.steps=1', 'train.limit_batches=1']\n"
        "code = main([*small, 'task=plan']) or main([*small, 'hydra.run.dir=run'])\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "0 []\n"


def test_what_only_shows_builds_none_of_the_classes_that_validate(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from hookrun.cli import main\n"
        "shows = [['--help'], ['--cfg', 'job'], ['--info', 'config'], ['--hydra-help'], ['--version']]\n"
        "wrong = [['--cfg', 'job', 'sed=1'], ['--cfg', 'job', 'model=cn'], ['--cfg', 'job', '-p', 'sed']]\n"
        "codes = [main(line) for line in [*shows, *wrong]]\n"
        "heavy = ('pydantic', 'hookrun.spec', 'hookrun.store', 'hookrun.tasks', 'hookrun.report', 'torch')\n"
        "print(codes, [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 2, 2, 2] []"
