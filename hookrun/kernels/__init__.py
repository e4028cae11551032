"""Functions compiled on the user's machine, where that has a C compiler; elsewhere torch computes the same."""

SWITCH = "HOOKRUN_KERNELS"
"""The environment variable that turns compiled functions off: ``0``."""


class NoLibrary(Exception):
    """No compiled function is available; the message says why."""
