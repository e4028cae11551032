"""task=generate: continues the prompts of one split under the hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from hookrun.engine.spec import HookSpec
from hookrun.errors import Problem, counted, listed
from hookrun.run.experiment.experiment import Experiment
from hookrun.run.experiment.settings import Settings
from hookrun.run.experiment.task_keys import Sampling
from hookrun.run.tasks.under_hooks import TaskOfSplits
from hookrun.store.format import GENERATIONS
from hookrun.store.objective import Direction

if TYPE_CHECKING:
    from torch.nn import Module

    from hookrun.data import DataInfo, TensorInfo
    from hookrun.engine.plan.plan import ResolvedPlan
    from hookrun.engine.prove.trial import Example
    from hookrun.run.experiment.prepared import Prepared
    from hookrun.run.passes.context import RunContext

MOST_TOKENS = 2**17
_USED = {"input_ids", "attention_mask", "position_ids", "labels"}

Count = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
Token = Annotated[int, Field(ge=0, le=2**31, strict=True)]


class GenerateTask(TaskOfSplits):
    """Continues each prompt and writes generations.jsonl.

    max_new_tokens: the largest number of tokens by which each prompt is continued
    sampling:       draw each token, with draws that do not depend on the batch; null: take the most probable token
    without_hooks:  also continue the same prompts without the hooks, with the same draws
    compare:        the name of `without_hooks` in earlier versions
    stop:           tokens that end a sequence; null: the model's own, or its tokenizer's
    prompt_tokens:  use only this many first tokens of a sample as its prompt; null: all of them
    cache:          keep keys and values from token to token, if the model can; false: recompute them
    """

    task_name: ClassVar[str] = "generate"
    not_compiled: ClassVar[str] = (
        "task=generate calls the model for one token at a time, which cannot be compiled"
    )

    max_new_tokens: Count = 32
    sampling: Sampling | None = None
    without_hooks: bool = False
    compare: bool | None = None
    stop: tuple[Token, ...] | None = Field(default=None, max_length=1000)
    prompt_tokens: Count | None = None
    cache: bool = True

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, raw: Any) -> Any:
        is_old = isinstance(raw, Mapping) and raw.get("compare") is not None
        return {**raw, "without_hooks": raw["compare"]} if is_old else raw

    def measures(self, settings: Settings) -> dict[str, Direction | None]:
        """The metrics of a comparison, if `without_hooks` is set."""
        return (
            {f"{self.split}/{name}": None for name in ("changed", "kl_first")} if self.without_hooks else {}
        )

    def problems(self, settings: Settings, info: DataInfo | None) -> Iterator[Problem]:
        """The common problems of the settings, and data whose samples are not prompts."""
        yield from super().problems(settings, info)
        if info is None:
            return
        ids = _input_ids(info)
        if ids is None or ids.dtype.is_floating_point:
            yield Problem(
                "data.name",
                f"task=generate continues sequences of tokens (input_ids), and the data {info.name!r} has none",
                "use data=prompts, text, names, repeated_tokens or modular_addition, or your own with input_ids",
            )
        elif isinstance(info.inputs, Mapping) and (more := sorted(info.inputs.keys() - _USED)):
            yield Problem(
                "data.name",
                f"task=generate passes input_ids and attention_mask to the model, but not {listed(more, 4)}",
                "leave these inputs out of the data",
            )

    def model_problems(self, experiment: Experiment, info: DataInfo, model: Module) -> Iterator[Problem]:
        """A model that cannot generate, stop tokens outside its vocabulary, and too few positions."""
        from hookrun.studies.generate.continuing import cannot_generate, has_encoder
        from hookrun.studies.generate.generation import vocabulary_of

        yield from super().model_problems(experiment, info, model)
        if cannot_generate(model):
            yield Problem(
                "model.args.class",
                f"{type(model).__name__} does not predict next tokens, so nothing can be generated",
                "use model.args.class=causal_lm or seq2seq_lm",
            )
        vocabulary = vocabulary_of(model, info)
        if beyond := [str(each) for each in self.stop or () if vocabulary is not None and each >= vocabulary]:
            yield Problem(
                "task.stop",
                f"the model has {vocabulary} tokens, numbered from 0, and does not have {listed(beyond, 8)}",
                "name tokens that the model has",
            )
        yield from self._too_long(info, model, encoder=has_encoder(model))

    def _too_long(self, info: DataInfo, model: Module, *, encoder: bool) -> Iterator[Problem]:
        """A problem if prompt and new tokens need more positions than the model has.

        encoder: the prompt is read by an encoder, so that it takes no positions of the decoder
        """
        from hookrun.models.arguments import positions_of

        limit, ids = positions_of(model), _input_ids(info)
        if limit is None or ids is None or ids.shape[0] <= 0:
            return
        prompt = 1 if encoder else min(ids.shape[0], self.prompt_tokens or ids.shape[0])
        needed, (positions, where) = prompt + self.max_new_tokens - 1, limit
        if needed <= positions or prompt > positions:
            return
        most = positions - prompt + 1
        hint = (
            f"or take a model with more positions, such as model.args.length={needed}"
            if info.tokenizer is not None and where == "pos_embed"
            else "shorten the prompts (task.prompt_tokens), or take another model"
        )
        yield Problem(
            "task.max_new_tokens",
            f"{self.max_new_tokens} new tokens after prompts of up to {prompt} need {needed} positions, and the model "
            f"has {positions} ({where})",
            f"set it to at most {most}, {hint}",
        )

    def plan_problems(self, plan: ResolvedPlan, settings: Settings) -> Iterator[Problem]:
        """The common problems of the plan, and under `without_hooks` hooks that change the model itself."""
        yield from super().plan_problems(plan, settings)
        for hook in (
            planned.spec for planned in plan.hooks if self.without_hooks and planned.spec.keys.enabled
        ):
            can_pause = hook.action.does == "freeze" or hook.action.adds(hook.name) is not None
            if hook.hook_type.phase == "installation" and not can_pause:
                yield Problem(
                    f"{hook.where}.hook",
                    "changes the model itself, so the pass without hooks would still have the change",
                    f"leave task.without_hooks out, and compare with a run without {hook.name}",
                )

    def example(self, info: DataInfo, model: Module, samples: int) -> Example:
        """The arguments of a call with prompts; for an encoder-decoder also with the first token of an answer."""
        import torch

        from hookrun.engine.runtime.tokens.calls import DECODER_IDS
        from hookrun.studies.generate.continuing import has_encoder

        args, kwargs = super().example(info, model, samples)
        if not has_encoder(model):
            return args, kwargs
        first = torch.zeros(samples, 1, dtype=torch.int64)
        kept = {name: kwargs[name] for name in ("input_ids", "attention_mask") if name in kwargs}
        return args, {**kept, DECODER_IDS: first}

    def lines(self, prepared: Prepared) -> Iterator[str]:
        """One line about the length of the continuations and how tokens are chosen."""
        how = "always the most probable one" if self.sampling is None else f"drawn with {self.sampling}"
        more = "; then once more without the hooks" if self.without_hooks else ""
        yield f"each prompt is continued by up to {counted(self.max_new_tokens, 'token')}, {how}{more}"

    def remarks(self, settings: Settings, hooks: tuple[HookSpec, ...]) -> Iterator[str]:
        """The common notes, and a note if `without_hooks` is set and there are no hooks."""
        yield from super().remarks(settings, hooks)
        if self.compare is not None:
            yield "task.compare is the old name of task.without_hooks: write the new one"
        if self.without_hooks and not any(hook.keys.enabled for hook in hooks):
            yield "task.without_hooks: there are no hooks, so both continuations are the same"

    def perform(self, context: RunContext) -> None:
        """Continue every sample. Raises HookrunError if the split has no samples."""
        from hookrun.run.passes.batches import BatchesOfSplits
        from hookrun.studies.generate.generation import Generation, Sums, show

        batches = BatchesOfSplits(context.prepared, self.splits)
        names = context.sample_names(batches.parts)
        generation, sums = Generation(context), Sums()
        with context.evaluating(batches, self.name, {"sums": sums}) as (passed, _):
            for batch in passed:
                with context.logged(context.hooks.clock.step):
                    records = generation.records(batch)
                for record in records:
                    context.run_dir.append(GENERATIONS, [record])
                    sums.add(record)
                names.write(batch, None)
                context.hooks.step()
        context.conclude(self.split, sums.read(compared=self.without_hooks))
        show(sums, context.screen.console, compared=self.without_hooks)


def _input_ids(info: DataInfo) -> TensorInfo | None:
    """The input `input_ids` of a sample, if it is a sequence."""
    from hookrun.data import TensorInfo

    ids = None if isinstance(info.inputs, TensorInfo) else info.inputs.get("input_ids")
    return ids if ids is not None and len(ids.shape) == 1 else None
