"""An experiment, from what it names to its finished directory."""

from hookrun.callable_module import make_callable

make_callable(__name__, home="hookrun.in_process")
