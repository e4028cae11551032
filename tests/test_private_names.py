"""A private name that torch, Hydra or OmegaConf lacks is told at import, with the package and its version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hookrun.engine.runtime.fast import copies, direct_calls, small_tensors
from hookrun.engine.values import private_names
from hookrun.errors import HookrunError

PACKAGE = Path(private_names.__file__).parents[1]

OTHERS = {
    *("_asdict", "_exit", "_getframe", "_make", "_option_string_actions", "_reconstructor", "_replace"),
    *("_run_exitfuncs", "_shutdown"),
    # Lightning's and transformers', asked for with care
    *("_logger_connector", "_attn_implementation", "_model_mapping", "_results"),
    # of objects, set by constructors
    *("_backward_cls", "_fsdp_param_groups", "_module_parameters", "_scale"),
    # on the way to others
    *("_C", "_autograd", "_functorch", "_dynamo", "_current_level", "_pytree", "_utils"),
}
"""Private names that are Python's, of other packages, or cannot be looked up without an object."""


def test_every_version_installed_here_has_the_names() -> None:
    for part in private_names.NAMES:
        private_names.require(part)


@pytest.mark.parametrize("part", private_names.NAMES)
def test_a_missing_name_is_told_with_package_and_version(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = next(iter(private_names.NAMES[part]))
    monkeypatch.setitem(private_names.NAMES, part, {where: "_gone", f"{where}.nowhere": "_lost"})
    private_names.require.cache_clear()
    package = part.partition(",")[0]
    try:
        with pytest.raises(HookrunError) as caught:
            private_names.require(part)
    finally:
        private_names.require.cache_clear()
    text = str(caught.value)
    assert f"{package} {version(package)} has no {where.replace(':', '.')}._gone" in text and "_lost" in text


WITHOUT = """
import importlib, sys, torch, hydra._internal.config_loader_impl as loader, omegaconf, pkgutil
for where, name, module in (
    ("torch:_C", "_current_graph_task_id", "hookrun.engine.prove.trial"),
    ("torch._subclasses.fake_tensor", "FakeCopyMode", "hookrun.engine.prove.trial"),
    ("torch._utils", "_functionalize_sync", "hookrun.engine.runtime.install"),
    ("torch._prims_common", "suggest_memory_format", "hookrun.engine.runtime.rng"),
    ("torch.utils.checkpoint", "_CheckpointFrame", "hookrun.engine.runtime.checkpointing"),
    ("torch.nn.modules.batchnorm", "_NormBase", "hookrun.run.training.loop"),
    ("hydra._internal.config_loader_impl", "ConfigLoaderImpl", "hookrun.command.compose.loader"),
    ("omegaconf:Container", "_evaluate_custom_resolver", "hookrun.store.config.interpolations"),
):
    owner = pkgutil.resolve_name(where)
    real = getattr(owner, name)
    delattr(owner, name)
    try:
        importlib.import_module(module)
    except Exception as error:
        print(type(error).__name__, name in str(error))
    setattr(owner, name, real)
    for loaded in [each for each in sys.modules if each.startswith("hookrun") and each != "hookrun"]:
        del sys.modules[loaded]
"""


def test_the_names_are_looked_up_before_any_of_them_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["HookrunError True"] * 8, "")


def private_uses(tree: ast.AST) -> set[str]:
    """What the code takes from a private module of these packages, and the private attributes of objects."""
    used = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("torch", "hydra", "omegaconf")
        ):
            is_private = "._" in str(node.module)
            used |= {alias.name for alias in node.names if is_private or alias.name.startswith("_")}
    return used


def test_every_private_name_in_the_source_is_in_a_table() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    own = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    places = [place for part in private_names.NAMES.values() for place in part.items()]
    told = {name for _, names in places for name in names.split()} | {
        re.split("[.:]", where)[-1] for where, _ in places
    }
    fast = {
        name
        for module in (copies, direct_calls, small_tensors)
        for path in module.NAMES
        for name in path.split(".")
    }
    used = {name for tree in trees for name in private_uses(tree)}
    assert used - own - told - fast - OTHERS == set()
