"""The action `expert_load`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hookrun.engine.actions.base import FORMS, Action, Edit, HookSite
from hookrun.engine.actions.experts import router_output
from hookrun.engine.actions.fields import Count, Finite
from hookrun.engine.actions.statistics import Distribution, Options, numbers_of, rows_of, statistic
from hookrun.engine.hook_types import FORWARD

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class ExpertLoad(Action):
    """Record how a router spreads the tokens over its experts: load, entropy, dead and hot experts.

    dead:    an expert is dead if none of the last so many records of its router has it
    hot:     an expert is hot if it is chosen more than so many times as often as the mean one
    entropy: that of the softmax of the scores, or `{of: probabilities}` if the router returns probabilities

    A record has `counts`, how often each expert was chosen; `entropy`, in nats, its mean over the tokens, if the router
    returns scores; and the lists `dead` and `hot` of experts. Each call of a router is a record, in which all of its
    tokens count, padding too; with several ranks those of each rank. Of the modules that `select` matches, the hook
    stays on the routers: what they return is told by dtype and shape, and shown in the plan.
    """

    action_name = "expert_load"
    hook_types = frozenset({FORWARD})
    observes = True
    scope = "value"
    finds = (
        "the output of a router: indices and weights of the chosen experts, with the scores of all or an attribute "
        "`num_experts`"
    )
    otherwise = (
        "record scores that are returned alone by action: stats, of: [entropy], indices by of: [{counts: 8}]"
    )
    dead: Count = 100
    hot: Annotated[Finite, Field(gt=0)] = 2.0
    entropy: Distribution = Distribution()

    def taken(self, value: Any, module: Module) -> Mapping[str, Tensor]:
        """The scores, if there are any, and the indices."""
        scores, indices, count = router_output(value, module)
        found = {f"indices of {count} experts": indices}
        return found if scores is None else {"scores": scores, **found}

    def build(self, site: HookSite) -> Edit:
        """A function that records what a router returns, without waiting for the device."""
        import torch

        entropy = statistic(Options(entropy=self.entropy))
        silence = Silence(self.dead)  # an expert that was never chosen is dead
        site.register_state(silence)

        def load(value: Any) -> None:
            scores, indices, count = router_output(value, site.module)
            if not indices.numel():
                return
            counts = numbers_of(rows_of(indices), [statistic(Options(counts=count))])[0]
            record: dict[str, Any] = {"counts": counts.long()}
            if scores is not None:
                record["entropy"] = numbers_of(rows_of(scores.detach()), [entropy])[0, 0]
            before = torch.as_tensor(silence.records).to(counts)
            silence.records = torch.where(counts > 0, 0.0, before + 1)
            record["dead"] = silence.records >= self.dead
            record["hot"] = counts > self.hot * counts.mean()
            record[FORMS] = {"dead": places, "hot": places}
            site.emit(record)

        return load


def places(are: list[bool]) -> list[int]:
    """Where a list is true."""
    return [place for place, is_true in enumerate(are) if is_true]


class Silence:
    """For how many records each expert of a router was not chosen.

    records: [experts]; before the first record one number for all
    """

    def __init__(self, records: int) -> None:
        self.records: Any = records

    def state_dict(self) -> dict[str, Any]:
        """For a run that is resumed."""
        import torch

        return {"records": torch.as_tensor(self.records).tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.records = state["records"]
