"""The architecture, read off the source: imports run one way, nothing in the package runs foreign code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hookrun"
FILES = sorted(PACKAGE.rglob("*.py"))

# The stages of the pipeline: each may import what stands above it, and itself. Names on one line are siblings
# that may not import each other, but for the last line, the surface.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "hook_types", "discovery"),
    ("actions",),
    ("spec",),
    ("containers",),
    ("plan",),
    ("proving",),
    ("runtime",),
    ("models", "data"),
    ("store",),
    ("run_values",),
    ("tasks",),
    ("report",),
    ("__init__", "__main__", "api", "cli", "broken_yaml", "config_files", "schema", "verify"),
)
SURFACE = LAYERS[-1]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Below it in the order, and yet not its business: the store keeps what it is handed, whoever made it.
APART = {"store": {"runtime"}}

# (file, stage that it imports) -> why it may.
EXCEPTIONS = {
    (
        "plan/plan.py",
        "runtime",
    ): "Plan.install is a method for the user's sake; it forwards, inside the function",
}

MAX_LINES = 400
HEAVY = {"torch", "torchvision"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: at module level or inside a function, or only for the type checker."""

    line: int
    module: str
    inside_function: bool
    typing_only: bool


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(tree: ast.AST, package: str, function: bool = False, typing: bool = False) -> Iterator[Import]:
    """Every import of a file of `package` (``hookrun.spec``); ``from a import b`` gives ``a.b``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, function, typing)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, f"{source}.{alias.name}", function, typing)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from imports(ast.Module(node.body, []), package, function, True)
            yield from imports(ast.Module(node.orelse, []), package, function, typing)
        else:
            inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, function or inner, typing)


def stage_of(file: str) -> str:
    """``spec/when.py`` -> ``spec``, ``errors.py`` -> ``errors``."""
    return file.split("/")[0].removesuffix(".py")


def package_of(file: str) -> str:
    return ".".join(["hookrun", *file.split("/")[:-1]])


def stage_imported(module: str) -> str | None:
    """The stage that ``hookrun.spec.when`` belongs to; ``from hookrun import SpecError`` asks the surface."""
    first, _, rest = module.partition(".")
    if first != "hookrun":
        return None
    stage = rest.split(".")[0]
    return stage if stage in RANK else "__init__"


def wrong_directions(tree: ast.Module, file: str) -> list[str]:
    stage = stage_of(file)
    found = []
    for each in imports(tree, package_of(file)):
        target = stage_imported(each.module)
        if target is None or target == stage or (file, target) in EXCEPTIONS:
            continue
        if stage in SURFACE and target in SURFACE:
            continue
        if RANK[target] >= RANK[stage] or target in APART.get(stage, ()):
            found.append(f"line {each.line}: {stage} imports {each.module}")
    return found


def is_read_before_torch(file: str) -> bool:
    """Whether a configuration cannot be validated without it; what tasks run lies in tasks/loop."""
    is_task = stage_of(file) == "tasks" and not file.startswith("tasks/loop/")
    return is_task or stage_of(file) in ("actions", "spec")


def early_torch(tree: ast.Module, file: str) -> list[str]:
    """An experiment is validated, and ``--help`` printed, before torch is imported."""
    if not is_read_before_torch(file):
        return []
    may_inside_function = stage_of(file) != "spec"
    return [
        f"line {each.line}: imports {each.module}"
        for each in imports(tree, package_of(file))
        if each.module.split(".")[0] in HEAVY
        and not each.typing_only
        and not (each.inside_function and may_inside_function)
    ]


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword argument; None where there is none."""
    return next(
        (k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None
    )


def foreign_code(tree: ast.Module, file: str) -> list[str]:
    """An experiment, a data file or a checkpoint is data; nothing that reads one may run it."""
    found = [
        f"line {each.line}: imports {each.module}"
        for each in imports(tree, package_of(file))
        if each.module.split(".")[0] in PICKLES or each.module.startswith("hydra.utils.instantiate")
    ]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in {"eval", "exec", "__import__"} or name.endswith(
            ("hydra.utils.instantiate", "hydra.utils.call")
        ):
            found.append(f"line {call.lineno}: calls {name}")
        elif name == "torch.load" and keyword(call, "weights_only") is not True:
            found.append(f"line {call.lineno}: torch.load without weights_only=True")
        elif keyword(call, "allow_pickle") is True:
            found.append(f"line {call.lineno}: {name} with allow_pickle=True")
        elif name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
            found.append(f"line {call.lineno}: {name} instead of yaml.safe_load")
    return found


RULES: tuple[Callable[[ast.Module, str], list[str]], ...] = (wrong_directions, early_torch, foreign_code)
each_file = pytest.mark.parametrize("file", [path.relative_to(PACKAGE).as_posix() for path in FILES])


@each_file
def test_every_module_belongs_to_a_stage(file: str) -> None:
    assert stage_of(file) in RANK


@each_file
def test_imports_run_from_later_stages_to_earlier_ones(file: str) -> None:
    assert wrong_directions(parse(PACKAGE / file), file) == []


@each_file
def test_specs_actions_and_tasks_load_without_torch(file: str) -> None:
    assert early_torch(parse(PACKAGE / file), file) == []


@each_file
def test_nothing_runs_foreign_code(file: str) -> None:
    assert foreign_code(parse(PACKAGE / file), file) == []


@each_file
def test_a_file_says_what_it_is_and_stays_short(file: str) -> None:
    path = PACKAGE / file
    assert ast.get_docstring(parse(path))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize(("file", "stage"), EXCEPTIONS)
def test_an_exception_to_the_directions_is_in_use_and_inside_a_function(file: str, stage: str) -> None:
    used = [
        each
        for each in imports(parse(PACKAGE / file), package_of(file))
        if stage_imported(each.module) == stage
    ]
    assert used
    assert all(each.inside_function or each.typing_only for each in used)


def test_importing_every_spec_action_and_task_leaves_torch_unimported() -> None:
    """The same promise as above, whatever the way in: through other packages too."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if is_read_before_torch(file := path.relative_to(PACKAGE).as_posix())
        or stage_of(file) in {"errors", "__init__", "__main__", "cli"}
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_configuration_names_no_code() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    assert [path.name for path in files if "_target_" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("spec/when.py", "from hookrun.plan.plan import Plan"),
        ("spec/when.py", "from ..plan import plan"),
        ("spec/when.py", "def f():\n    import hookrun.runtime.install"),
        ("spec/when.py", "if TYPE_CHECKING:\n    from hookrun.tasks import train"),
        ("spec/when.py", "from hookrun import SpecError"),
        ("actions/scale.py", "from hookrun.store import writer"),
        ("store/writer.py", "from hookrun.runtime import install"),
        ("store/writer.py", "from hookrun.tasks import train"),
        ("models/names.py", "from hookrun.data import names"),
        ("errors.py", "from .spec import hook"),
        ("spec/when.py", "import torch.nn"),
        ("spec/when.py", "def f():\n    import torch"),
        ("actions/scale.py", "import torch"),
        ("tasks/train.py", "import torch"),
        ("actions/scale.py", "class A:\n    from torch import nn"),
        ("store/reader.py", "import pickle"),
        ("store/reader.py", "torch.load(path)"),
        ("store/reader.py", "torch.load(path, weights_only=False)"),
        ("store/reader.py", "np.load(path, allow_pickle=True)"),
        ("store/reader.py", "yaml.load(text, loader)"),
        ("cli/__init__.py", "from hydra.utils import instantiate"),
        ("cli/__init__.py", "hydra.utils.instantiate(cfg)"),
        ("spec/selector.py", "eval(text)"),
    ],
)
def test_a_breach_is_found(file: str, source: str) -> None:
    assert sum(len(rule(ast.parse(source), file)) for rule in RULES) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "spec/when.py",
            "from hookrun.errors import SpecError\nfrom hookrun.spec import hook\nfrom . import hook",
        ),
        ("actions/scale.py", "def f():\n    import torch"),
        ("tasks/train.py", "def f():\n    import torch"),
        ("actions/scale.py", "if TYPE_CHECKING:\n    import torch"),
        (
            "tasks/loop/training.py",
            "import torch\nfrom hookrun.store import writer\nfrom hookrun.runtime import install",
        ),
        ("cli/__init__.py", "from hookrun import api, __main__"),
        (
            "store/reader.py",
            "torch.load(path, weights_only=True)\nmodel.eval()\nre.compile('x')\nyaml.safe_load(text)",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(file: str, source: str) -> None:
    assert [line for rule in RULES for line in rule(ast.parse(source), file)] == []
