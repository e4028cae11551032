"""task=lens: the prediction after each layer of a language model, and the contribution of each part to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hookrun.engine.spec.selector import AnySelector
from hookrun.engine.spec.tokens import Tokens, TokensClause
from hookrun.errors import HookrunError, Problem
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.tasks.under_hooks import TaskOfOneSplit

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.data import DataInfo
    from hookrun.run.experiment.prepared import Prepared
    from hookrun.run.passes.context import RunContext
    from hookrun.studies.lens.places import Places

MOST_TOP = 100


class LensTask(TaskOfOneSplit):
    """Reads the residual stream through the final norm and the unembedding (logit lens), into lens.jsonl.

    parts:      residual: the stream after the embedding and after each layer; layers: the contributions of the
                embedding, each attention and each MLP to the logits; heads: the same, with each attention head by
                itself; what hooks change elsewhere is the part `(rest)`
    norm:       applied: the final norm uses the statistics of each part; frozen: it uses the scale that it has on
                the final stream of the token, so that contributions add up to the logits. null: applied for residual,
                frozen for layers and heads
    tokens:     the positions to read, as in a hook's `tokens`; null: every real token
    top:        how many of the most probable tokens are recorded
    residual:   a selector of the blocks; null: the model's list of layers
    final_norm: the module path of the norm after the blocks; null: searched for beside the blocks
    unembed:    the module path of the layer that computes the logits; null: the model's output embedding
    heads:      a selector of the output projection of each block's attention; null: searched for in the attention
    """

    task_name: ClassVar[str] = "lens"
    not_compiled: ClassVar[str] = "task=lens observes every block, which is not possible in a compiled model"

    parts: Literal["residual", "layers", "heads"] = "residual"
    norm: Literal["applied", "frozen"] | None = None
    tokens: TokensClause | None = None
    top: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] = 5
    residual: AnySelector | None = None
    final_norm: str | None = None
    unembed: str | None = None
    heads: AnySelector | None = None

    @model_validator(mode="after")
    def _heads_are_read(self) -> LensTask:
        if self.heads is not None and self.parts != "heads":
            raise ValueError("`heads` names the projections that `parts: heads` reads")
        return self

    @property
    def positions(self) -> Tokens:
        """The clause of the positions to read."""
        return self.tokens if self.tokens is not None else Tokens.model_validate({"position": "all"})

    @property
    def frozen(self) -> bool:
        """Whether the final norm uses its scale on the final stream for every part."""
        return self.norm == "frozen" if self.norm is not None else self.parts != "residual"

    def model_problems(self, experiment: Experiment, info: DataInfo, model: Module) -> Iterator[Problem]:
        """Samples that are not sequences, tokens that cannot be read, and with CompileError what is not found."""
        from hookrun.data import TensorInfo
        from hookrun.engine.plan.texts import tokenizer_of
        from hookrun.run.experiment.metrics.problems import token_problems

        yield from super().model_problems(experiment, info, model)
        ids = info.inputs if isinstance(info.inputs, TensorInfo) else info.inputs.get("input_ids")
        has_ids = ids is not None and not ids.dtype.is_floating_point and len(ids.shape) == 1
        if info.tokenizer is None and not has_ids:
            yield Problem(
                "data.name",
                f"task=lens reads sequences of tokens, and the samples of the data '{info.name}' are not sequences",
                "use data=prompts, text, names, repeated_tokens, …",
            )
            return
        yield from token_problems(self.positions, info, tokenizer_of(model, info.tokenizer), padding=True)
        self._places(model)

    def _places(self, model: Module) -> Places:
        """The modules to read. Raises CompileError with all that are not found."""
        from hookrun.studies.lens.places import find_places

        return find_places(
            model,
            residual=self.residual,
            final_norm=self.final_norm,
            unembed=self.unembed,
            heads=self.heads,
            by_head=self.parts == "heads",
        )

    def lines(self, prepared: Prepared) -> Iterator[str]:
        """What the lens reads at which modules."""
        from hookrun.studies.lens.reading import cap_of

        places = self._places(prepared.model)
        blocks = f"{places.blocks[0]} to {places.blocks[-1]}" if len(places.blocks) > 1 else places.blocks[0]
        norm = "its scale on the final stream" if self.frozen else "the statistics of each part"
        yield (
            f"lens: {self.parts} of {len(places.blocks)} blocks ({blocks}) through {places.final_norm}, with {norm}, "
            f"and {places.unembed}, at tokens {self.positions}"
        )
        if places.heads:
            yield f"lens: heads of {places.heads[0].path}: {places.heads[0].count}"
        if self.frozen and self.parts != "residual" and cap_of(prepared.model) is not None:
            yield "lens: the model soft-caps its logits; contributions add up to the logits before the cap"

    def perform(self, context: RunContext) -> None:
        """Read the split. Raises HookrunError if no sample has a token to read, or if the model is not as expected."""
        from hookrun.engine.plan.texts import texts_of, tokenizer_of
        from hookrun.engine.runtime.tokens.choice import Rule
        from hookrun.run.passes.batches import Batches
        from hookrun.studies.lens.reading import Lens, Reader, changes_logits

        model, places = context.model, self._places(context.model)
        edited = changes_logits(context.prepared.plan, places.unembed)
        lens = Lens(model, places, self.parts, self.frozen, self.top, edited)
        texts, _ = texts_of(self.positions, "task", tokenizer_of(model, context.prepared.data.tokenizer))
        reader = Reader(context, lens, Rule(self.positions, False, texts))
        batches, means = Batches(context.prepared, self.split), reader.means
        with (
            reader.observer.installation,
            context.evaluating(batches, self.name, {"means": means}) as (passed, _),
        ):
            for batch in passed:
                with context.logged(context.hooks.clock.step):
                    reader.read(batch)
                context.hooks.step()
        if not means.sums:
            raise HookrunError("task.tokens: no sample has such a token: name others")
        for line in means.lines(self.parts):
            context.run_dir.log_metrics(split=self.split, **line)
        found: dict[str, Any] = {"positions": means.sums[None]["positions"]}
        if self.parts == "residual":
            found |= means.means(None, ("accuracy", "logit_difference"))
        elif self.frozen:
            found |= means.means(None, ("logit_difference",))
        context.conclude(self.split, found)
