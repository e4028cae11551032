"""Each command imports only the heavy packages that it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, sys
from hookrun.cli import main

def said(*names):
    print(json.dumps([codes, sorted(set(names) & set(sys.modules))]), file=sys.stderr)

shows = [['--help'], ['--cfg', 'job'], ['--info', 'config'], ['--hydra-help'], ['--version']]
wrong = [['--cfg', 'job', 'sed=1'], ['--cfg', 'job', 'model=cn'], ['--cfg', 'job', '-p', 'sed']]
codes = [main(line) for line in [*shows, *wrong]]
said('pydantic', 'hookrun.spec', 'hookrun.store', 'hookrun.tasks', 'hookrun.report', 'torch')

os.environ['COMP_LINE'] = 'hookrun experiment='
shows = [['--cfg', 'all', 'experiment=clip_fc'], ['-sc', 'query=bash'], ['--info', 'defaults']]
wrong = [['train.epochs=-1'], ['-m', 'experiment=clip_fc', 'train.epochs=1,-1']]
stderr, sys.stderr = sys.stderr, open(os.devnull, 'w')
codes = [main(line) for line in [*shows, *wrong]]
sys.stderr = stderr
said('torch', 'torchvision', 'sklearn', 'rich')

small = ['experiment=clip_fc', 'train.steps=1', 'train.limit_batches=1']
codes = [main([*small, 'task=plan']), main([*small, 'hydra.run.dir=run'])]
said('torch._dynamo', 'torch._inductor', 'sympy', 'triton', 'sklearn', 'scipy', 'pandas', 'torchvision')
"""


def test_each_command_imports_only_what_it_uses(tmp_path: Path) -> None:
    """All in one process, the lightest first."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path)
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[[")]
    assert len(found) == 3, done.stderr
    shows, refusals, small_run = found
    assert shows == [[0, 0, 0, 0, 0, 2, 2, 2], []], "help and configurations need no class that validates"
    assert refusals == [[0, 0, 0, 2, 2], []], "completion and refusals need no torch"
    assert small_run == [[0, 0], []], "a small run needs neither the compiler nor scikit-learn"
    assert "configuration error" in done.stderr and done.stderr.splitlines()[-1].startswith("[[")
