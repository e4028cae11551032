"""C functions compiled on the user's machine if it has a C compiler; without one, torch computes the same."""

SWITCH = "HOOKRUN_KERNELS"
"""The environment variable that turns compiled functions off: ``0``."""


class NoLibrary(Exception):
    """No compiled library can be used; the message says why."""
