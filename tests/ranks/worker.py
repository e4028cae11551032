"""A process that runs one command line after the other, each as one rank of its own process group."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys

from hookrun.cli import main


def run(command: dict[str, object]) -> dict[str, object]:
    said = io.StringIO()
    environment = command["environment"]
    assert isinstance(environment, dict)
    os.environ.update(environment)
    os.chdir(str(command["folder"]))
    argv = command["argv"]
    assert isinstance(argv, list)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(argv)
    return {"code": code, "said": said.getvalue()}


if __name__ == "__main__":
    faulthandler.enable()  # where it hangs: kill -ABRT
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run(command)), file=sys.__stdout__, flush=True)
        if command["leaves"]:  # the end of the process closes its connections, so that others stop waiting
            break
