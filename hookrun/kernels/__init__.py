"""What is compiled on the machine that it runs on, where that has a C compiler; torch alone does the same elsewhere."""

SWITCH = "HOOKRUN_KERNELS"
"""The environment variable that turns compiled functions off: ``0``."""


class NoLibrary(Exception):
    """Why nothing is compiled here."""
