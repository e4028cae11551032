"""task=lens: the prediction after each layer of a language model, and the contribution of each part to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hookrun.errors import CompileError, HookrunError, spec_error
from hookrun.spec import Experiment
from hookrun.spec.selector import AnySelector
from hookrun.spec.tokens import Tokens, TokensClause
from hookrun.tasks.under_hooks import TaskOfOneSplit

if TYPE_CHECKING:
    from hookrun.runtime.tokens.choice import Texts
    from hookrun.tasks.base import JobCache
    from hookrun.tasks.lens.places import Places
    from hookrun.tasks.run.context import RunContext
    from hookrun.tasks.run.prepare import Prepared

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

    @field_validator("tokens")
    @classmethod
    def _of_a_stream(cls, tokens: Tokens | None) -> Tokens | None:
        if tokens is not None and (tokens.on_pattern or tokens.dim is not None):
            raise ValueError(
                "the positions of the residual stream are its dimension 1: leave out query, key and dim"
            )
        if tokens is not None and tokens.phase == "generation":
            raise ValueError("task=lens does not generate tokens: leave out `phase: generation`")
        return tokens

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

    def prepare(
        self, experiment: Experiment, *, trust: frozenset[str], cache: JobCache | None = None
    ) -> Prepared:
        """As for other tasks; also finds what the lens reads. Raises SpecError or CompileError."""
        from hookrun.tasks.run.prepare import missing_spans

        prepared = super().prepare(experiment, trust=trust, cache=cache)
        settings = prepared.settings
        reach = self.samples_in_reach(settings, prepared.data.sizes)
        if problems := missing_spans([(self.tokens, "task")], settings, self.split, reach):
            raise CompileError(problems)
        return replace(prepared, lines=(*prepared.lines, *self._said(prepared, self._setup(prepared)[0])))

    def _setup(self, prepared: Prepared) -> tuple[Places, Texts]:
        """The modules to read, and text in `tokens` -> its token ids.

        Raises SpecError or CompileError if the model or the data does not fit.
        """
        from hookrun.data import TensorInfo
        from hookrun.plan.texts import texts_of, tokenizer_of, unknown_spans
        from hookrun.tasks.lens.places import find_places

        data = prepared.data
        if isinstance(data.inputs, TensorInfo):
            has_ids = not data.inputs.dtype.is_floating_point and len(data.inputs.shape) == 1
        else:
            has_ids = "input_ids" in data.inputs
        if data.tokenizer is None and not has_ids:
            raise spec_error(
                "data.name",
                f"task=lens reads sequences of tokens, and the samples of the data '{data.name}' are not sequences",
                "use data=prompts, text, names, repeated_tokens, …",
            )
        places = find_places(
            prepared.model,
            residual=self.residual,
            final_norm=self.final_norm,
            unembed=self.unembed,
            heads=self.heads,
            by_head=self.parts == "heads",
        )
        texts, problems = texts_of(self.positions, "task", tokenizer_of(prepared.model, data.tokenizer))
        problems += unknown_spans(self.positions, "task", data)
        if problems:
            raise CompileError(problems)
        return places, texts

    def _said(self, prepared: Prepared, places: Places) -> Iterator[str]:
        """Lines for the plan: what the lens reads at which modules."""
        from hookrun.tasks.lens.reading import cap_of

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
        from hookrun.runtime.tokens.choice import Rule
        from hookrun.tasks.lens.reading import Lens, changes_logits, read_split

        places, texts = self._setup(context.prepared)
        edited = changes_logits(context.prepared.plan, places.unembed)
        lens = Lens(context.model, places, self.parts, self.frozen, self.top, edited)
        rule = Rule(self.positions, once=False, texts=texts)
        means = read_split(context, lens, rule, self.split, self.name)
        if not means.sums:
            raise HookrunError("task.tokens: no sample has such a token: name others")
        for line in list(means.lines(self.parts)):
            context.run_dir.log_metrics(split=self.split, **line)
        found: dict[str, Any] = {"positions": means.sums[None]["positions"]}
        own = means.means(None, compared=True)
        names = ("accuracy", "logit_difference") if self.parts == "residual" else ("logit_difference",)
        if self.parts == "residual" or self.frozen:
            found |= {name: own[name] for name in names if name in own}
        context.conclude(self.split, found)
