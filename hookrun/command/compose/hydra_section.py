"""The keys of Hydra's own section that a config file may set: a few that choose among installed plugins.

Everything else in that section (directories, logging, callbacks, the search path, environment variables) is set on
the command line only, since an experiment file may come from a stranger.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.conf import HydraConf

from hookrun.engine.keys import ROOT_KEYS, nested
from hookrun.errors import Problem, listed

CHOSEN_BY_FILES = ("hydra/launcher", "hydra/sweeper")
"""The groups of Hydra from which a file may choose an installed member."""
SHIPPED_CHOICES = {"hydra/help": "hookrun", "hydra/job_logging": "none", "hydra/hydra_logging": "none"}
"""The other choices of hookrun's own config.yaml, which a user's copy of that file may repeat."""
SHIPPED_DIRS = {
    "run.dir": "outputs/${now:%Y-%m-%d_%H-%M-%S-%f}",
    "sweep.dir": "multirun/${now:%Y-%m-%d_%H-%M-%S-%f}",
    "sweep.subdir": "${hydra.job.num}",
}
"""The directories in hookrun's own config.yaml, which a user's copy of that file may repeat."""

TEXTS = frozenset(
    [
        "account",
        "backend",
        "comment",
        "constraint",
        "direction",
        "gres",
        "partition",
        "prefer",
        "qos",
        "require",
        "reservation",
        "study_name",
    ]
)
"""Settings of launchers and sweepers that may be a short text; the others may be a number, true, false or null."""
MOST = 1_000_000
"""The greatest absolute value of such a number."""
MOST_PROCESSES = 1_024
MOST_SWEPT_TEXT = 4_000
NEVER_SWEPT = frozenset({"hydra", "trust", "resume", "resume_anyway", "fail_fast"})

_ACTING_KEYS = frozenset({"_target_", "_recursive_", "_convert_", "_partial_", "_args_", "()"})
_WORD = re.compile(r"[\w.,:@+-]{1,100}")
_JOB_NAME = re.compile(r"\w[\w.-]{0,99}")
_SWEPT_KEY = re.compile(r"(?:\+\+?|~)?(?P<root>[A-Za-z_]\w*)(?:[./][\w$-]+|\[[\w-]+\])*")
_SECTION = frozenset(HydraConf.__dataclass_fields__)
MISSING = object()
"""A sentinel that is equal to no value of a file."""
TRUST = Problem(
    "trust",
    "is taken from the command line only, never from a file",
    "type it: +trust=[mypkg], or set HOOKRUN_TRUST=mypkg in the environment",
)
_COMMAND_LINE = "it is for the command line alone: leave it out of the file, and type it"


def acting_keys(content: Any, where: str) -> list[Problem]:
    """The problem of each key, such as `_target_`, that makes Hydra or the logging library call code.

    content: plain values, nested at most 64 deep
    """
    problems: list[Problem] = []
    for path, _ in nested(content):
        key = path.rpartition(".")[2]
        if key in _ACTING_KEYS:
            problems.append(Problem(where, f"holds the key `{key}`, which would run code", "remove it"))
    return problems


def wrong_choices(defaults: Any, group: str, where: str) -> Iterator[Problem]:
    """The problem of each item of a defaults list that chooses from a group of Hydra closed to config files.

    group: the config group of the file itself, to which relative names refer
    """
    for item in defaults if isinstance(defaults, list) else ():
        if isinstance(item, Mapping) and item:
            text, value = next(iter(item.items()))
            chosen = _path_of(text, group)
        else:
            chosen, value = posixpath.split(_path_of(item, group))
        if chosen.partition("/")[0] != "hydra" or is_open(chosen):
            continue
        if SHIPPED_CHOICES.get(chosen, MISSING) != value:
            typed = f"{chosen}={value if isinstance(value, str) else 'NAME'}"
            yield Problem(where, f"its defaults list chooses {chosen!r}", f"{_COMMAND_LINE}: {typed}")


def _path_of(text: Any, group: str) -> str:
    """The path of an item of a defaults list, such as ``override /model@x``, in a file of the group."""
    words = str(text).split() or [""]
    name = words[-1].partition("@")[0]
    path = name if name.startswith("/") else f"{group}/{name}"
    return posixpath.normpath(path).lstrip("/.")


def is_open(group: str) -> bool:
    """Whether config files may choose from that group of Hydra."""
    return group.startswith(tuple(f"{each}/" for each in CHOSEN_BY_FILES)) or group in CHOSEN_BY_FILES


def wrong_settings(section: Any, groups: Collection[str], plugins: Collection[str] = ()) -> list[Problem]:
    """The problem of each key of a file's `hydra` section that a file may not set.

    section: plain and unresolved
    groups:  the existing config groups
    plugins: class names that `_target_` may have in a launcher or sweeper that was chosen on the command line
    """
    if not isinstance(section, Mapping):
        return [Problem("hydra", f"found {section!r}, expected a mapping", "")]
    problems: list[Problem] = []
    for key, value in section.items():
        problems += _setting(key, value, groups, plugins)
    return problems


def _setting(key: Any, value: Any, groups: Collection[str], plugins: Collection[str]) -> Iterator[Problem]:
    where = f"hydra.{key}"
    if key not in _SECTION or (key == "mode" and not (isinstance(value, str) and "${" in value)):
        return  # Hydra checks this key itself
    if key in ("launcher", "sweeper") and isinstance(value, Mapping):
        yield from _plugin_settings(value, where, groups, plugins)
    elif key in ("job", "run", "sweep") and isinstance(value, Mapping):
        for name, inner in value.items():
            if not _is_harmless(f"{key}.{name}", inner):
                yield _refused(f"{where}.{name}")
    elif key == "overrides" and "trust" in str(value):
        yield TRUST
    else:
        yield _refused(where)


def _is_harmless(key: str, value: Any) -> bool:
    if key == "job.name":
        return isinstance(value, str) and bool(_JOB_NAME.fullmatch(value))
    return value == SHIPPED_DIRS.get(key, MISSING) or (key == "job.chdir" and value is False)


def _refused(where: str) -> Problem:
    if where == "hydra.job.name":
        return Problem(where, "is not a name of letters, digits, `_`, `-` and `.`", "write a plain name")
    if where.startswith(("hydra.run", "hydra.sweep.")):
        return Problem(
            where,
            "cannot be set in a file: it says where files are written",
            "leave it out of the file; type it, or set HOOKRUN_OUTPUT=DIR in the environment for all outputs",
        )
    allowed = "hydra.mode, hydra.job.name, hydra.sweeper.params"
    return Problem(
        where,
        f"cannot be set in a file; of Hydra's section a file sets {allowed}, and settings of launchers and sweepers",
        _COMMAND_LINE,
    )


def _plugin_settings(
    section: Mapping[Any, Any], where: str, groups: Collection[str], plugins: Collection[str]
) -> Iterator[Problem]:
    for name, value in section.items():
        place = f"{where}.{name}"
        if name == "params" and where == "hydra.sweeper":
            yield from wrong_params(value, place, groups)
        elif name == "sampler" and where == "hydra.sweeper" and isinstance(value, Mapping):
            yield from _plugin_settings(value, place, groups, ())
        elif name == "_target_":
            if value not in plugins:
                what = "cannot be set in a file: it would run code"
                yield Problem(place, what, "choose an installed one by name")
        elif not isinstance(name, str) or not _is_setting(name, value):
            texts = listed(sorted(TEXTS), 20)
            hint = f"{_COMMAND_LINE}; a file may set numbers, true, false, and as text {texts}"
            yield Problem(place, "cannot be set in a file", hint)


def _is_setting(name: str, value: Any) -> bool:
    if isinstance(value, list):
        return name in TEXTS and len(value) <= 100 and all(_is_setting(name, each) for each in value)
    if isinstance(value, str):
        return name in TEXTS and bool(_WORD.fullmatch(value))
    if value is None or isinstance(value, bool):
        return True
    most = MOST_PROCESSES if name == "n_jobs" else MOST
    return isinstance(value, int | float) and -most <= value <= most


def wrong_params(
    params: Any, where: str, groups: Collection[str], does: str = "sweep over"
) -> Iterator[Problem]:
    """The problems of `hydra.sweeper.params`: each key must be one of the experiment's, as in an override.

    does: a verb phrase for errors, such as "sweep over": what the file does to the keys
    """
    if params is None:
        return
    if not isinstance(params, Mapping):
        yield Problem(where, f"found {params!r}, expected a mapping from a key to its values", "")
        return
    roots = {*ROOT_KEYS, "experiment", *groups} - NEVER_SWEPT
    for key, value in params.items():
        match = _SWEPT_KEY.fullmatch(key) if isinstance(key, str) else None
        root = None if match is None else match["root"]
        if root == "trust":
            yield TRUST
        elif root not in roots:
            yield Problem(
                f"{where}: {str(key)[:100]!r}",
                f"is not a key that a file may {does}",
                f"it begins with one of {listed(sorted(roots), 30)}",
            )
        elif isinstance(value, str) and len(value) > MOST_SWEPT_TEXT:
            yield Problem(
                f"{where}.{key}",
                f"found a text of {len(value):,} characters, expected at most {MOST_SWEPT_TEXT:,}",
                "type it on the command line",
            )
        elif isinstance(value, Mapping | Sequence) and not isinstance(value, str):
            yield Problem(
                f"{where}.{key}", f"found {type(value).__name__}, expected a text", "quote it: '1,2,3'"
            )
