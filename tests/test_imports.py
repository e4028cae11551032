"""The architecture, checked in the source: imports go in one direction, between rooms and between files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hookrun"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# The rooms of the house: each may import the ones above it, and itself. Names on one line are siblings that may not
# import each other, except in the last line, the surface.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("callable_module", "errors", "version"),
    ("terminal",),
    ("signals",),
    ("engine/collector", "engine/discovery", "engine/html", "engine/keys", "engine/rank"),
    ("engine/hook_types",),
    ("engine/values",),
    ("engine/validation", "engine/trust"),
    ("engine/actions",),
    ("engine/spec", "examples"),
    ("engine/plan",),
    ("engine/runtime",),
    ("engine/prove",),
    ("engine",),
    ("models", "data"),
    ("run/ranks",),
    ("store",),
    ("run/experiment",),
    ("run/passes",),
    ("run/training",),
    ("run/tasks",),
    ("run",),
    ("report",),
    ("integrations",),
    ("studies",),
    ("command/compose", "command/outcome"),
    ("command/sweeps",),
    ("command",),
    (
        "__init__",
        "__main__",
        "api",
        "bundle",
        "cli",
        "compare",
        "extend",
        "in_process",
        "integrations/harness",
        "integrations/inspect_ai",
        "integrations/lm_eval",
        "report/__main__",
        "runs",
        "schema",
        "testing",
        "verify",
    ),
)
SURFACE = LAYERS[-1]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Earlier in the order, and still not allowed to be imported: a report is made from the run directory alone.
APART = {"report": ("engine/runtime", "engine/plan", "engine/prove", "run")}

HEAVY = {"torch", "torchvision"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, also inside a function or for the type checker."""

    line: int
    module: str


@cache
def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"), filename=file)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import of a file of `package` (``hookrun.spec``); ``from a import b`` gives ``a.b``."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, f"{source}.{alias.name}")


def room_of(file: str) -> str:
    """``engine/spec/when.py`` -> ``engine/spec``, ``errors.py`` -> ``errors``; as it is if no room has the file."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    for count in range(len(parts), 0, -1):
        if (room := "/".join(parts[:count])) in RANK:
            return room
    return parts[0]


def package_of(file: str) -> str:
    return ".".join(["hookrun", *file.split("/")[:-1]])


def room_imported(module: str) -> str | None:
    """The room that ``hookrun.spec.when`` belongs to; ``from hookrun import SpecError`` asks the surface."""
    first, _, rest = module.partition(".")
    if first != "hookrun":
        return None
    room = room_of(rest.replace(".", "/"))
    return room if room in RANK else "__init__"


@cache
def imports_of(tree: ast.Module, file: str) -> tuple[Import, ...]:
    """The imports of a whole file, collected once for all rules."""
    return tuple(imports(tree, package_of(file)))


def wrong_directions(tree: ast.Module, file: str) -> list[str]:
    room = room_of(file)
    found = []
    for each in imports_of(tree, file):
        target = room_imported(each.module)
        if target is None or target == room or (room in SURFACE and target in SURFACE):
            continue
        is_apart = any(f"{target}/".startswith(f"{apart}/") for apart in APART.get(room, ()))
        if RANK[target] >= RANK[room] or is_apart:
            found.append(f"{file}, line {each.line}: {room} imports {each.module}")
    return found


def is_read_before_torch(file: str) -> bool:
    """Whether a configuration cannot be validated without this file; what only runs need is in folders of tasks/."""
    is_task = re.fullmatch(r"run/tasks/\w+\.py|studies/\w+/task\.py", file) is not None
    first = ("engine/actions", "engine/spec", "engine/hook_types", "engine/keys", "engine/validation")
    return is_task or room_of(file) in (*first, "engine/discovery", "store/config")


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword argument; None where there is none."""
    return next(
        (k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None
    )


def foreign_code(tree: ast.Module, file: str) -> list[str]:
    """An experiment, a data file or a checkpoint is data; nothing that reads one may run it."""
    found = [
        f"{file}, line {each.line}: imports {each.module}"
        for each in imports_of(tree, file)
        if each.module.split(".")[0] in PICKLES or each.module.startswith("hydra.utils.instantiate")
    ]
    for call in (node for node in nodes(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        where = f"{file}, line {call.lineno}"
        if name in {"eval", "exec", "__import__"} or name.endswith(
            ("hydra.utils.instantiate", "hydra.utils.call")
        ):
            found.append(f"{where}: calls {name}")
        elif name == "torch.load" and keyword(call, "weights_only") is not True:
            found.append(f"{where}: torch.load without weights_only=True")
        elif keyword(call, "allow_pickle") is True:
            found.append(f"{where}: {name} with allow_pickle=True")
        elif name in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
            found.append(f"{where}: {name} instead of yaml.safe_load")
    return found


STUDIES = sorted(path.name for path in (PACKAGE / "studies").iterdir() if (path / "task.py").exists())
MEAN_OTHER_THINGS = {"captures", "generate"}
"""A folder of a run directory, and a method of the models of transformers."""


def study_of(file: str) -> str | None:
    """The study to which a file belongs."""
    room, _, rest = file.partition("/")
    study = rest.partition("/")[0]
    return study if room == "studies" and study in STUDIES else None


def outside_of_studies(tree: ast.Module, file: str) -> list[str]:
    """A study imports the kit, the engine, errors and itself."""
    study = study_of(file)
    if study is None:
        return []
    rooms = ("hookrun.engine", "hookrun.errors", "hookrun.studies.kit", f"hookrun.studies.{study}")
    return [
        f"{file}, line {each.line}: the study imports {each.module}"
        for each in imports_of(tree, file)
        if each.module.startswith("hookrun") and not each.module.startswith(rooms)
    ]


def named_studies(tree: ast.Module, file: str) -> list[str]:
    """Nothing outside names a study: a registry finds what its folder has."""
    if file.startswith("studies/"):
        return []
    found = [
        f"{file}, line {each.line}: imports {each.module}"
        for each in imports_of(tree, file)
        if each.module.startswith("hookrun.studies.")
    ]
    is_below = file.split("/")[0] in ("engine", "run", "data", "models", "store", "report")
    for node in nodes(tree):
        if is_below and isinstance(node, ast.Constant) and node.value in set(STUDIES) - MEAN_OTHER_THINGS:
            found.append(f"{file}, line {node.lineno}: names the study {node.value!r}")
    return found


RULES = (wrong_directions, foreign_code, outside_of_studies, named_studies)


def broken(rule: object) -> list[str]:
    assert callable(rule)
    return [line for file in FILES for line in rule(parse(file), file)]


def test_every_file_belongs_to_a_room() -> None:
    assert FILES
    assert sorted({room_of(file) for file in FILES} - set(RANK)) == []


def test_the_architecture_page_names_every_room() -> None:
    page = (PACKAGE / "README.md").read_text(encoding="utf-8")
    rooms = {room_of(file).split("/")[0] for file in FILES} - {"__init__", "__main__", "version"}
    assert sorted(room for room in rooms if f"`{room}/`" not in page and f"`{room}.py`" not in page) == []


def test_imports_run_from_later_stages_to_earlier_ones() -> None:
    assert broken(wrong_directions) == []


def test_nothing_runs_foreign_code() -> None:
    assert broken(foreign_code) == []


def test_a_study_imports_kit_or_engine_alone() -> None:
    assert broken(outside_of_studies) == []


def test_nothing_outside_names_a_study() -> None:
    assert broken(named_studies) == []


MOST_NAMES = {"attribute": 54, "captures": 36, "compare": 48, "effects": 97, "generate": 47, "lens": 70}
"""Study -> how many names it may import from outside its folder."""


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_imports_few_names(study: str) -> None:
    names = set[str]()
    for file in FILES:
        if study_of(file) == study:
            names |= {each.module for each in imports_of(parse(file), file)}
    names = {
        name
        for name in names
        if name.startswith("hookrun.") and not name.startswith(f"hookrun.studies.{study}.")
    }
    assert len(names) <= MOST_NAMES.get(study, 35), sorted(names)


def test_a_file_says_what_it_is() -> None:
    assert [file for file in FILES if not ast.get_docstring(parse(file))] == []


def modules() -> dict[str, str]:
    """Module name -> file."""
    names = {file.removesuffix(".py").replace("/", "."): file for file in FILES}
    return {f"hookrun.{name}".removesuffix(".__init__"): file for name, file in names.items()}


def imported_files(known: Mapping[str, str], sources: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """File -> the files that it imports, also inside functions and for the type checker."""
    graph = dict[str, set[str]]()
    for file, tree in sources.items():
        found = set[str]()
        for each in imports_of(tree, file):
            module = each.module
            while module not in known and "." in module:
                module = module.rpartition(".")[0]
            if module in known and known[module] != file:
                found.add(known[module])
        graph[file] = found
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Files that import each other, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other() -> None:
    # The package's own __init__ is the surface: it imports a public name when that is first used.
    sources = {file: parse(file) for file in FILES if file != "__init__.py"}
    assert circle(imported_files(modules(), sources)) == []


def test_a_circle_is_found() -> None:
    known = {"hookrun.spec.a": "spec/a.py", "hookrun.spec.b": "spec/b.py", "hookrun.spec": "spec/__init__.py"}
    one = ast.parse("def f():\n    from hookrun.spec import b")
    other = ast.parse("if TYPE_CHECKING:\n    from hookrun.spec.a import A")
    found = circle(imported_files(known, {"spec/a.py": one, "spec/b.py": other}))
    assert set(found) == {"spec/a.py", "spec/b.py"}
    assert circle(imported_files(known, {"spec/a.py": one, "spec/b.py": ast.parse("")})) == []


def test_a_module_named_like_a_function_is_called() -> None:
    """A submodule that is imported replaces the function of the package."""
    import hookrun

    taken = {name for name in hookrun.__all__ if callable(getattr(hookrun, name))}
    both = taken & {room_of(file).split("/")[0] for file in FILES}
    assert both == {"run", "runs"}
    for name in both:
        assert callable(import_module(f"hookrun.{name}")), name
    assert not (PACKAGE / "command" / "cli" / "main.py").exists()


def test_importing_every_spec_leaves_torch_unimported() -> None:
    """An experiment is validated, and ``--help`` printed, before torch is imported."""
    names = [
        name
        for name, file in modules().items()
        if is_read_before_torch(file) or room_of(file) in {"errors", "__init__", "__main__", "cli"}
    ]
    program = f"import sys, {', '.join(names)}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_configuration_names_no_code() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files
    assert [path.name for path in files if "_target_" in path.read_text(encoding="utf-8")] == []


HOOK_TYPE_NAMES = re.compile(
    r"forward_pre|backward_pre|output_grad|post_accumulate_grad|saved_tensors|optimizer_step_(pre|post)"
)


def test_no_file_asks_for_a_hook_type_by_its_name() -> None:
    """Names belong to the records: a comparison with a string would miss a new hook type."""
    found = [
        f"{file}, line {node.lineno}: {node.value!r}"
        for file in FILES
        if file != "engine/hook_types.py"
        for node in nodes(parse(file))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and HOOK_TYPE_NAMES.fullmatch(node.value)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/spec/when.py", "from hookrun.engine.plan.plan import ResolvedPlan"),
        ("engine/spec/when.py", "from ..plan import plan"),
        ("engine/spec/when.py", "def f():\n    import hookrun.engine.runtime.install"),
        ("engine/spec/when.py", "if TYPE_CHECKING:\n    from hookrun.run.tasks import train"),
        ("engine/spec/when.py", "from hookrun import SpecError"),
        ("engine/actions/scale.py", "from hookrun.store import writer"),
        (
            "engine/plan/plan.py",
            "if TYPE_CHECKING:\n    from hookrun.engine.runtime.install import Installation",
        ),
        ("report/captures.py", "from hookrun.run.execute import execute"),
        ("models/names.py", "from hookrun.data import names"),
        ("errors.py", "from .engine.spec import hook"),
        ("store/reader.py", "import pickle"),
        ("store/reader.py", "torch.load(path)"),
        ("store/reader.py", "torch.load(path, weights_only=False)"),
        ("store/reader.py", "np.load(path, allow_pickle=True)"),
        ("store/reader.py", "yaml.load(text, loader)"),
        ("command/cli/__init__.py", "from hydra.utils import instantiate"),
        ("command/cli/__init__.py", "hydra.utils.instantiate(cfg)"),
        ("engine/spec/selector.py", "eval(text)"),
        ("studies/effects/task.py", "from hookrun.store.reader import Run"),
        ("studies/compare/task.py", "from hookrun.studies.effects import grid"),
        ("command/cli/__init__.py", "from hookrun.studies.effects import task"),
        ("store/reader.py", "ask('effects')"),
    ],
)
def test_a_violation_is_found(file: str, source: str) -> None:
    assert sum(len(rule(ast.parse(source), file)) for rule in RULES) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/spec/when.py", "from hookrun.errors import SpecError\nfrom hookrun.engine.spec import hook"),
        ("engine/spec/when.py", "from . import hook"),
        ("run/training/loop.py", "import torch\nfrom hookrun.store import writer"),
        ("command/cli/__init__.py", "from hookrun.command import sweeps"),
        ("store/reader.py", "torch.load(path, weights_only=True)\nmodel.eval()"),
        ("store/reader.py", "re.compile('x')\nyaml.safe_load(text)"),
    ],
)
def test_what_is_allowed_is_not_reported(file: str, source: str) -> None:
    assert [line for rule in RULES for line in rule(ast.parse(source), file)] == []
