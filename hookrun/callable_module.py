"""Modules that can be called: `hookrun.run` is a folder of the package, and the function that runs an experiment.

Python sets `hookrun.run` to the folder when any file of it is imported, so that a function of that name would be lost.
The command ``python -m hookrun.runs`` and the function `hookrun.runs` have one name likewise.
The class of a module may be replaced, see "Customizing module attribute access" in Python's reference.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module of hookrun whose call is that of the public function of its name.

    home: the module that has the function; it is imported when the function is first needed
    """

    home: str

    def function(self) -> Callable[..., Any]:
        """The function: ``hookrun.run`` is `run` of its home."""
        name = self.__name__.rpartition(".")[2]
        found: Callable[..., Any] = getattr(importlib.import_module(self.home), name)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function()(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """What `inspect.signature` gives."""
        return inspect.signature(self.function())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What `help` shows: the function, and then the module."""
        called = f"{self.__name__}{self.__signature__}\n\n{inspect.getdoc(self.function())}"
        return f"{called}\n\nThe module: {vars(self)['__doc__']}"


def make_callable(module: str, home: str) -> None:
    """Let the module, which is being imported, be called as the function of its name in the module `home`."""
    made = sys.modules[module]
    made.__class__ = CallableModule
    made.home = home  # type: ignore[attr-defined]
