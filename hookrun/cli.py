"""The command line in this process: ``hookrun.cli.main(argv)`` returns the exit code."""

from hookrun.command.cli import main

__all__ = ["main"]
