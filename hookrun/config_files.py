"""Config files on disk: whatever is wrong with one is said with its path, and none may swell while it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.plugins.config_source import ConfigLoadError

from hookrun.broken_yaml import problem_of_yaml
from hookrun.errors import HookrunError, Problem, SpecError

MAX_VALUES = 100_000
"""More than any experiment holds. OmegaConf copies what an alias stands for, and copies of copies multiply."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SpecError, with the path, for whatever goes wrong while the file is read."""
    try:
        refuse_bomb(path.read_text(encoding="utf-8"))
        yield
    except (HookrunError, ConfigLoadError):
        raise
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        raise SpecError([Problem(str(path), what)]) from error
    except OSError as error:
        raise SpecError([Problem(str(path), error.strerror or str(error))]) from error
    except ValueError as error:  # of Hydra's, about the header
        raise SpecError([Problem(str(path), str(error))]) from error
    except yaml.YAMLError as error:
        raise SpecError([problem_of_yaml(error)]) from error


def refuse_bomb(text: str) -> None:
    """Raise ValueError for YAML whose aliases stand for far more than is written."""
    if "&" in text and "*" in text:
        try:
            root = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError:
            return  # whoever reads the file next says where it is broken
        if root is not None and _size(root, {}) > MAX_VALUES:
            raise ValueError(
                f"its aliases stand for more than {MAX_VALUES:,} values: write out what is needed"
            )


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node holds when each alias is written out; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is known: whoever asks meanwhile is inside it
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [value for _, value in node.value]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]
