"""Less work for the tracer of coverage: it rests in code of other packages, which is not measured.

On Python 3.11 a tracer makes all Python code twice as slow, whoever wrote it. It rests in modules of others while they
are imported, in the functions of `RESTING`, and in pytest between the parts of a test. What these call of hookrun is
measured again, by the functions of `WORKING`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

Function = Callable[..., Any]

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("hookrun", "tests", "scripts"))

RESTING = {
    "_pytest.assertion.rewrite": ["_rewrite_test"],
    "_pytest.runner": ["runtestprotocol"],
    "html.parser": ["HTMLParser.feed"],
    "hydra._internal.config_loader_impl": [
        "ConfigLoaderImpl._apply_overrides_to_config",
        "ConfigLoaderImpl._compose_config_from_defaults_list",
        "ConfigLoaderImpl._load_configuration_impl",
        "ConfigLoaderImpl._load_single_config",
        "ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
        "create_defaults_list",
    ],
    "hydra._internal.config_repository": [
        "ConfigRepository._find_object_source",
        "ConfigRepository.get_group_options",
        "ConfigRepository.load_config",
    ],
    "hydra._internal.hydra": ["Hydra.compose_config", "Hydra.get_sanitized_hydra_cfg"],
    "hydra.core.override_parser.overrides_parser": ["OverridesParser.parse_overrides"],
    "jinja2": ["Environment.compile"],
    "omegaconf": [
        "DictConfig.__deepcopy__",
        "OmegaConf.create",
        "OmegaConf.masked_copy",
        "OmegaConf.merge",
        "OmegaConf.to_container",
        "OmegaConf.to_yaml",
    ],
    "torch._dynamo.convert_frame": ["_compile"],
    "torch._subclasses.fake_tensor": ["FakeTensorMode.__init__", "FakeTensorMode.dispatch"],
    "yaml": ["dump", "load"],
}
"""Functions of others, by their module, in which the tests spend the most time."""

WORKING = {
    "_pytest.fixtures": ["_teardown_yield_fixture", "call_fixture_func"],
    "_pytest.python": ["Function.runtest"],
    "hookrun.command.compose.loader": [
        "FileConfigSource.available",
        "FileConfigSource.load_config",
        "ImportlibResourcesConfigSource.load_config",
        "Loader._compose_config_from_defaults_list",
        "Loader._load_configuration_impl",
        "Loader._load_single_config",
        "Loader._parse_overrides_and_create_caching_repo",
    ],
    "hookrun.store.config.interpolations": ["_allowed", "_counted", "_parsed", "_weighed"],
}
"""Functions that those call, and that are measured or call what is measured."""

_rest = threading.local()
"""tracer: the one of this thread that rests."""


def resting(function: Function) -> Function:
    """The function, in which the tracer rests."""

    @wraps(function)
    def rests(*args: Any, **kwargs: Any) -> Any:
        tracer: Any = sys.gettrace()
        if not hasattr(tracer, "start"):  # it rests already, or a test traces
            return function(*args, **kwargs)
        outer = getattr(_rest, "tracer", None)
        _rest.tracer = tracer
        # In one frame, so that the tracer, which counts calls and returns, misses both or none.
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            _rest.tracer = outer
            tracer.start()

    return rests


def working(function: Function) -> Function:
    """The function, in which the tracer works, also if it rests in what calls the function."""

    @wraps(function)
    def works(*args: Any, **kwargs: Any) -> Any:
        tracer = getattr(_rest, "tracer", None)
        if tracer is None or sys.gettrace() is not None:
            return function(*args, **kwargs)
        tracer.start()
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(None)

    return works


def _replace(module: ModuleType) -> None:
    for names, replaced in ((RESTING, resting), (WORKING, working)):
        for path in names.get(module.__name__, ()):
            *owners, name = path.split(".")
            owner: Any = module
            for each in owners:
                owner = getattr(owner, each)
            function = vars(owner)[name]
            if isinstance(function, staticmethod):
                setattr(owner, name, staticmethod(replaced(function.__func__)))
            else:
                setattr(owner, name, replaced(function))


def _exec_module(original: Function) -> Function:
    theirs, ours = resting(original), working(original)

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        if self.path.startswith(OURS):
            ours(self, module)
        else:
            theirs(self, module)
        _replace(module)

    return exec_module


def quick_coverage() -> None:
    """From now on the tracer rests, if there is one: in the modules that are imported, and in those to come."""
    if not hasattr(sys.gettrace(), "start"):
        return
    for name in {*RESTING, *WORKING} & {*sys.modules}:
        _replace(sys.modules[name])
    SourceFileLoader.exec_module = _exec_module(SourceFileLoader.exec_module)  # type: ignore[method-assign]
