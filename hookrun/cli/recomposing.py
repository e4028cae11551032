"""The configurations of a sweep's jobs: their common part is composed once, and each job sets its own values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig

from hookrun.cli.config_copies import copied

_MOST = 128
"""The most cached compositions; a sweep over groups needs one for each combination of their choices."""

_MOST_PARSED = 512
"""The most cached parsed overrides."""


class Recomposing:
    """The cached compositions of one loader.

    compose:  composes a configuration from overrides, by Hydra
    is_group: whether a key names a config group
    apply:    sets values in a configuration, as Hydra does
    name:     joins overrides to `hydra.job.override_dirname`
    """

    def __init__(
        self,
        compose: Callable[[list[str]], DictConfig],
        is_group: Callable[[str], bool],
        apply: Callable[[list[Override], DictConfig], None],
        name: Callable[..., str],
    ) -> None:
        self._compose, self._is_group, self._apply, self._name = compose, is_group, apply, name
        self._common = dict[tuple[str, ...], DictConfig]()
        self._parser = OverridesParser.create()
        self._parsed = dict[str, Override]()

    def config(self, hydras: Sequence[str], own: Sequence[str]) -> DictConfig | None:
        """The configuration of all overrides; None where only a full composition gives the right result.

        hydras: the overrides of Hydra's section
        own:    the overrides of the job
        """
        parsed = self._parse(own)
        values = [each for each in parsed if self._sets_a_value(each)]
        rest = [each for each in parsed if each not in values]
        changes = [each for each in rest if not self._chooses(each)]
        if any(_overlap(value, each) for value in values for each in changes):
            return None
        key = (*hydras, *(str(each.input_line) for each in rest))
        if key not in self._common:
            if len(self._common) >= _MOST:
                self._common.clear()
            self._common[key] = self._compose(list(key))
        cfg = copied(self._common[key])
        self._apply(values, cfg)
        tasks = [each for each in parsed if not each.is_hydra_override()]
        cfg.hydra.overrides.task = [each.input_line for each in tasks]
        of_name = cfg.hydra.job.config.override_dirname
        cfg.hydra.job.override_dirname = self._name(
            tasks,
            exclude_keys=of_name.exclude_keys,
            item_sep=of_name.item_sep,
            kv_sep=of_name.kv_sep,
        )
        return cfg

    def _parse(self, overrides: Sequence[str]) -> list[Override]:
        """The parsed overrides; an override that several jobs have is parsed once."""
        if new := [each for each in overrides if each not in self._parsed]:
            if len(self._parsed) >= _MOST_PARSED:
                self._parsed.clear()
                new = list(overrides)
            self._parsed |= zip(new, self._parser.parse_overrides(new), strict=True)
        return [self._parsed[each] for each in overrides]

    def _chooses(self, override: Override) -> bool:
        """Whether the override chooses a config: Hydra treats a mapping for a group as a value, set in typed order."""
        return self._is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def _sets_a_value(self, override: Override) -> bool:
        """Whether the override is ``key=value`` and chooses no config: a composition applies such overrides last."""
        return (
            override.type == OverrideType.CHANGE
            and not override.is_sweep_override()
            and not override.is_hydra_override()
            and override.package is None
            and not self._is_group(override.key_or_group)
        )


def _overlap(first: Override, second: Override) -> bool:
    """Whether one override sets a part of what the other sets, so that their order matters."""
    one, other = f"{first.key_or_group}.", f"{second.key_or_group}."
    return one.startswith(other) or other.startswith(one)
