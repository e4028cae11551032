"""The action `expert_load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hookrun.engine.actions.base import Absent, Action, Edit, Halves, HookSite
from hookrun.engine.actions.experts import chosen_experts, expert_count, path_of, scores_of
from hookrun.engine.actions.fields import Count, Finite
from hookrun.engine.actions.statistics import MOST_NUMBERS, CountsOf, numbers_of, rows_of, statistic
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.values.index import AnyTarget

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class ExpertLoad(Action):
    """Record how a router spreads the tokens over its experts: load, entropy, dead and hot experts.

    dead:    an expert is dead if it was chosen in none of the last so many records of its router
    hot:     an expert is hot if it is chosen more than so many times as often as the mean one
    logits:  where the scores of all experts are, `"[0]"`; null: told by shape
    indices: where the numbers of the chosen experts are; null: told by dtype and shape
    count:   how many experts there are; null: the last dimension of the scores

    A record has `counts`, how often each expert was chosen, `entropy`, in nats, of the softmax of the scores, its mean
    over the tokens, and the lists `dead` and `hot` of experts. Of the modules that `select` matches the hook stays on the
    routers, which the trial run shows.
    """

    action_name = "expert_load"
    hook_types = frozenset({FORWARD})
    observes = True
    scope = "value"
    finds = "the output of a router: scores of all experts, indices and weights of the chosen ones"
    dead: Count = 100
    hot: Annotated[Finite, Field(gt=0)] = 2.0
    logits: AnyTarget | None = None
    indices: AnyTarget | None = None
    count: Annotated[Count, Field(le=MOST_NUMBERS)] | None = None

    def _parts(self, value: Any, module: Module) -> tuple[Tensor | None, Tensor, int]:
        """The scores, the indices and the number of experts. Raises Absent if it is not the output of a router."""
        try:
            indices, _ = chosen_experts(value, self.indices)
            count = self.count or expert_count(module)
            scores = scores_of(value, indices, count, self.logits)
        except ValueError as error:
            raise Absent(str(error)) from error
        if scores is None and self.count is None:
            raise Absent("there are no scores of all experts: name them with `logits`, or say `count`")
        return scores, indices, count or scores.shape[-1]

    def reading(self, value: Any, module: Module) -> str:
        """Which tensors are the scores and the indices, and how many experts there are."""
        scores, indices, count = self._parts(value, module)
        found = "no scores" if scores is None else f"scores {path_of(value, scores)}"
        return f"{found}, indices {path_of(value, indices)}, {count} experts"

    def build(self, site: HookSite) -> Edit:
        """A function that records what it sees of each call, without waiting for the device."""
        halves = self.halves(site)

        def load(value: Any) -> None:
            halves.report(halves.measure(value))

        return load

    def halves(self, site: HookSite) -> Halves:
        """The counts and the entropy of a value; the record of them."""
        import torch

        module = site.module
        entropy = statistic("entropy")
        silence = Silence()
        site.register_state(silence)

        def measure(value: Any) -> Tensor:
            scores, indices, count = self._parts(value, module)
            counts = statistic(CountsOf(counts=count))
            numbers = numbers_of(rows_of(indices), [counts])
            if scores is not None:
                numbers = torch.cat([numbers, numbers_of(rows_of(scores.detach()), [entropy])], dim=1)
            return numbers[0]

        def report(numbers: Tensor) -> None:
            count = self.count or len(numbers) - 1
            counts = numbers[:count]
            record = {"counts": counts.long(), "entropy": numbers[count:].sum()}
            if len(numbers) == count:
                del record["entropy"]
            record["dead"] = silence.after(counts) >= min(self.dead, silence.records)
            record["hot"] = counts > self.hot * counts.mean()
            site.emit(record)

        return Halves(measure, report)


class Silence:
    """For how many records each expert of a router was not chosen."""

    def __init__(self) -> None:
        self.records = 0
        self._silent: Tensor | None = None

    def after(self, counts: Tensor) -> Tensor:
        """[experts]: the same with one more record."""
        import torch

        before = torch.zeros_like(counts) if self._silent is None else self._silent.to(counts)
        self._silent = torch.where(counts > 0, 0.0, before + 1)
        self.records += 1
        return self._silent

    def state_dict(self) -> dict[str, Any]:
        """For a run that is resumed."""
        silent = None if self._silent is None else self._silent.tolist()
        return {"records": self.records, "silent": silent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        import torch

        self.records = state["records"]
        silent = state["silent"]
        self._silent = None if silent is None else torch.tensor(silent, dtype=torch.float64)
