"""hookrun's exceptions, and the problems that they list: where, what was asked and found, the next step."""

from __future__ import annotations

import difflib
import errno
import re
import reprlib
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Fix:
    """How a program corrects a mistake: take away what stands at its place, then set `key` to `value`.

    key:        a key path, or a flag of the command line; as in an override, `+` before it adds a key
    value:      true for a flag that takes no value
    takes_away: `key` is taken away, too, instead of set
    """

    key: str
    value: Any = None
    takes_away: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake of a user.

    where: the key path (``hooks.clip_fc.min``), or a file and line
    what:  what was asked and what there is, with the nearest names
    hint:  the one next step

    The others are for programs. They are neither shown nor compared:

    found: the wrong value or name
    near:  the nearest names that there are, the nearest first
    fix:   only where it is right with good confidence, see `slip_of`
    place: the key, flag or words alone, where `where` says more or nothing
    """

    where: str
    what: str
    hint: str = ""
    found: Any = field(default=None, compare=False, repr=False, kw_only=True)
    near: Sequence[str] = field(default=(), compare=False, repr=False, kw_only=True)
    fix: Fix | None = field(default=None, compare=False, repr=False, kw_only=True)
    place: str = field(default="", compare=False, repr=False, kw_only=True)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n    {self.hint}" if self.hint else head

    def moved(self, where: str) -> Problem:
        """The problem at another place. A fix of the value goes along, one of the key does not."""
        fix = self.fix
        if fix is not None:
            fix = replace(fix, key=where) if fix.key == self.where else None
        return replace(self, where=where, fix=fix)


class HookrunError(Exception):
    """Base of every error that hookrun raises on purpose; ``str()`` holds the whole report, for a terminal.

    exit_code: what the command line returns for it
    """

    exit_code = 1
    _is_told = False  # whether the other ranks of the run end too, with this error or with one of their own

    def __str__(self) -> str:
        return printable(Exception.__str__(self), kept="\n\t")  # KeyError's own shows the repr of the message


class Refusal(HookrunError):
    """Base of the errors that list every mistake of a user; ``str()`` shows the first `MOST_LISTED`.

    errors: the mistakes, at least one; creating it without any is a ValueError
    notes:  additional notes, such as what could not be checked
    """

    kind = "problem"

    def __init__(self, errors: Sequence[Problem], notes: Sequence[str] = ()) -> None:
        self.errors = list(errors)
        self.notes = tuple(notes)
        if not self.errors:
            raise ValueError(f"a {type(self).__name__} needs at least one problem")
        super().__init__(self.errors)  # without notes: a second base class may take other arguments
        # Unpickling calls the class with these: errors of jobs are pickled between processes.
        self.args = (self.errors, self.notes)

    def __str__(self) -> str:
        title = counted(len(self.errors), self.kind)
        shown = printable("\n".join([*first_lines(map(str, self.errors)), *self.notes]), kept="\n\t")
        return "\n".join([title, *(f"  {shortened(line, MOST_OF_A_LINE)}" for line in shown.split("\n"))])


class SpecError(Refusal):
    """The configuration is wrong, for any model; `errors` lists every mistake."""

    kind = "configuration error"
    exit_code = 2


def spec_error(where: str, what: str, hint: str = "") -> SpecError:
    """The error of one mistake."""
    return SpecError([Problem(where, what, hint)])


@contextmanager
def refused_at(
    where: str,
    hint: str = "",
    *,
    kinds: type[Exception] | tuple[type[Exception], ...] = HookrunError,
    what: str = "",
    tell: Callable[[Any], str] = str,
) -> Iterator[None]:
    """Raise a SpecError at the key `where` for an exception of these kinds in the block; a Refusal stays as it is.

    what: how the SpecError begins
    tell: what it then says about the exception; its type if that is empty
    """
    try:
        yield
    except Refusal:
        raise
    except kinds as error:
        raise spec_error(where, what + (tell(error) or reason(error)), hint) from error


_NOT_TAKEN = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


@contextmanager
def paths_refused() -> Iterator[None]:
    """Raise a SpecError for a path of a user that the system refuses: its name is too long, or it may not be read."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_TAKEN or error.filename is None:
            raise
        raise spec_error(shortened(str(error.filename)), str(error.strerror), "give another path") from error


class CompileError(Refusal):
    """The hooks do not fit the model; `errors` lists every mistake."""

    kind = "compile error"
    exit_code = 2


def compile_error(where: str, what: str, hint: str = "") -> CompileError:
    """The error of one mistake."""
    return CompileError([Problem(where, what, hint)])


def refuse(problems: Iterable[Problem], kind: type[Refusal] = SpecError) -> None:
    """Raise an error of this kind with the problems, if there are any."""
    if errors := list(problems):
        raise kind(errors)


@dataclass
class Mistakes:
    """Collects mistakes, to tell them all at once.

    problems:      the mistakes so far
    unchecked:     what could not be checked because of them
    of_hooks_only: all of them are of hooks that do not fit the model
    """

    problems: list[Problem] = field(default_factory=list, kw_only=True)
    unchecked: list[str] = field(default_factory=list, kw_only=True)
    of_hooks_only: bool = field(default=True, kw_only=True)

    def add(self, problems: Iterable[Problem], *, of_hooks: bool = False) -> None:
        """Add mistakes.

        of_hooks: they are of hooks that do not fit the model
        """
        for problem in problems:
            self.problems.append(problem)
            self.of_hooks_only &= of_hooks

    def note(self, where: str, what: str, hint: str = "") -> None:
        """Add one mistake, see `Problem`."""
        self.add([Problem(where, what, hint)])

    def tried(self, make: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """The result of `make`. If it raises SpecError or CompileError, None, and its mistakes are added."""
        try:
            return make(*args, **options)
        except Refusal as error:
            self.add(error.errors, of_hooks=isinstance(error, CompileError))
            self.unchecked += error.notes
            return None

    def refuse(self) -> None:
        """Raise SpecError if there are mistakes; CompileError if only hooks do not fit the model."""
        if self.problems:
            kind = CompileError if self.of_hooks_only else SpecError
            raise kind(list(dict.fromkeys(self.problems)), self.unchecked)


class HookError(HookrunError):
    """A hook's action failed while the model ran; the message names hook and module."""


class CheckFailed(HookrunError):
    """A `check` action failed; the message names hook, module, step and value."""

    exit_code = 3


class HookrunWarning(UserWarning):
    """A hook did nothing: it never fired, or found nothing that its action could act on; or a job of a sweep failed."""

    def __str__(self) -> str:
        return printable(super().__str__(), kept="\n\t")


MOST_COMPARED = 2_000
"""How many names are compared with a wrong one: a file may have very many."""


def close(name: str, options: Iterable[str], limit: int = 3) -> list[str]:
    """The options closest to `name`, the closest first; none if no option is like it."""
    names = sorted(set(islice(options, MOST_COMPARED)))
    return difflib.get_close_matches(name, names, n=limit, cutoff=0.6)


def nearest(name: str, options: Iterable[str], limit: int = 3) -> str:
    """A clause naming the options closest to `name`: ``did you mean 'clamp'?``, else a list of what there is."""
    names = sorted(set(islice(options, MOST_COMPARED)))
    alike = close(name, names, limit)
    if alike:
        return f"did you mean {' or '.join(map(repr, alike))}?"
    if not names:
        return "there are none"
    return f"there are: {listed(map(printable, names), 12)}"


def misnamed(where: str, what: str, name: str, options: Iterable[str], hint: str | None = None) -> Problem:
    """The problem of a value at `where` that is not one of the options.

    hint: by default the nearest options
    """
    names = list(options)
    if hint is None:
        hint = nearest(name, names)
    meant = slip_of(name, names)
    fix = None if meant is None else Fix(where, meant)
    return Problem(where, what, hint, found=name, near=_near(name, names, meant), fix=fix)


def renamed(problem: Problem, key: str, options: Iterable[str], section: object = None) -> Problem:
    """The problem of a key that its section does not have, with the key that was meant.

    problem: at the key path, whose last part is `key`
    section: what is in the section; without it there is no fix, nor for a key that is in it already
    """
    names = list(options)
    meant = slip_of(key, names)
    fix = None
    if meant is not None and isinstance(section, Mapping) and meant not in section:
        fix = Fix(problem.where.removesuffix(key) + meant, section[key])
    return replace(problem, found=key, near=_near(key, names, meant), fix=fix)


def _near(name: str, options: Iterable[str], meant: str | None) -> list[str]:
    """The options like the name, first the one that was meant."""
    alike = close(name, options)
    return alike if meant is None else [meant, *(each for each in alike if each != meant)]


def slip_of(name: str, options: Iterable[str]) -> str | None:
    """The only option that can have been meant with `name`; None if there is none, or more than one.

    It may be set without asking, so it is right with good confidence: the same letters in another case or with another
    separator (``sgd`` for ``SGD``, ``clip-fc`` for ``clip_fc``), or one slip of the fingers in a word: a letter left
    out, one too many, two swapped, or one replaced in a word of at least five: ``relu`` is not ``gelu``. It is never
    given where options are equally near, or digits or single letters differ: ``layer5`` is not ``layer4``.
    """
    typed = _folded(name)
    folded = {option: _folded(option) for option in options}
    alike = [option for option, text in folded.items() if text == typed]
    if not alike:
        alike = [option for option, text in folded.items() if _is_slip(typed, text)]
    return alike[0] if len(alike) == 1 else None


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def _is_slip(typed: str, name: str) -> bool:
    """Whether the two differ by one letter or separator, or by two letters that are swapped."""
    start = _count_alike(typed, name)
    end = _count_alike(typed[start:][::-1], name[start:][::-1])
    wrong = typed[start : len(typed) - end]
    right = name[start : len(name) - end]
    longer = max(typed, name, key=len)
    match len(wrong), len(right):
        case (1, 0) | (0, 1) if "_" in (wrong, right):
            return not longer[max(start - 1, 0) : start + 2].replace("_", "").isdigit()
        case (1, 0) | (0, 1):
            least = 3
        case (1, 1):
            least = 5
        case (2, 2) if wrong == right[::-1]:
            least = 3
        case _:
            return False
    letters = _NO_LETTERS.split(longer[:start])[-1] + _NO_LETTERS.split(longer[start:])[0]
    return (wrong + right).isalpha() and len(letters) >= least


_NO_LETTERS = re.compile(r"[\W\d_]")


def _count_alike(first: str, second: str) -> int:
    """How many characters at the beginning are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def counted(count: int, noun: str) -> str:
    """``1 job``, ``2,000 jobs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Iterable[str], limit: int = 6) -> str:
    """The first `limit` items with commas, and how many more there are: ``conv1, conv2 and 7 more``."""
    texts = list(items)
    first = ", ".join(texts[:limit])
    return first if len(texts) <= limit else f"{first} and {len(texts) - limit} more"


MOST_LISTED = 20
"""How many things of one kind are shown on a terminal."""

MOST_OF_A_LINE = 1_000
"""How many characters of a line of an error are shown."""


def first_lines(lines: Iterable[str], limit: int = MOST_LISTED) -> list[str]:
    """The first lines, and one that says how many more there are."""
    texts = list(lines)
    beyond = len(texts) - limit
    return texts if beyond <= 0 else [*texts[:limit], f"and {beyond:,} more"]


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
"""Characters that a terminal acts on: controls, further line breaks, marks of direction, parts of characters."""


def printable(text: str, kept: str = "") -> str:
    """The text with the characters that a terminal acts on as escapes such as ``\\x1b``, except those in `kept`."""
    return _CONTROLS.sub(lambda match: match[0] if match[0] in kept else ascii(match[0])[1:-1], text)


def whole_characters(text: str) -> str:
    """The text with parts of characters, which a file name that is not UTF-8 has, as escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def shortened(text: str, most: int = 80) -> str:
    """`printable` of a name that may be of any length: its beginning and its end."""
    half = most // 2
    return printable(text if len(text) <= most else f"{text[:half]}…{text[-half:]}")


def reason(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def at_module(error: BaseException) -> str:
    """A clause with the innermost module whose forward raised the exception: `` (in conv1, a Conv2d)``.

    Empty for the model itself, and for an exception from elsewhere.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, Exception):
        return ""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    if not modules:
        return ""
    for path, module in modules[0].named_modules():
        if path and module is modules[-1]:
            return f" (in {path}, a {type(module).__name__})"
    return ""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """The repr of a value, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        return f"a value of type {type(value).__name__}"


class NoSuchKey(HookrunError, KeyError):
    """There is no such key; the message names similar keys."""


class _ByText(dict[str, V]):
    """A dict with texts as keys; it has no other key, also none that has no hash, such as a list."""

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and super().__contains__(key)


class Lookup(Mapping[str, V]):
    """A mapping by name whose errors for missing keys name similar ones.

    kind:    what a key is: hook, module or tensor
    where:   what the mapping contains, for messages
    aliases: other name -> key
    """

    def __init__(
        self, kind: str, where: str, items: Mapping[str, V], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self._where = where
        self._aliases = aliases or {}
        self.data = _ByText(items)

    if TYPE_CHECKING:

        def __getitem__(self, key: str) -> V: ...

    else:
        # It calls __missing__. A key after `captures["seen"]["` is completed only because this is not a function of
        # our own: IPython calls none of those while the user types.
        __getitem__ = UserDict.__getitem__

    def __missing__(self, key: str) -> V:
        if not isinstance(key, str):  # a frequent mistake: indexing rows before naming the hook or module
            raise NoSuchKey(f"{self._where} holds one {self._kind} per name; {nearest('', self.data)}")
        name = self._aliases.get(key, key)
        if name not in self.data:
            raise NoSuchKey(f"no {self._kind} {key!r} in {self._where}: {nearest(key, self.data)}")
        return self.data[name]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (key in self.data or self._aliases.get(key) in self.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"<{self._where}: {listed(map(repr, self.data), MOST_LISTED)}>"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.data)

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if not name.startswith("_") and name != "data"]
