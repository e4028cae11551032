"""Models of transformers, `name: transformers`: from a folder or the hub, or random ones of any architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from hookrun.engine.validation import Args, validated
from hookrun.errors import (
    HookrunWarning,
    Problem,
    SpecError,
    listed,
    nearest,
    refuse,
    refused_at,
    spec_error,
)
from hookrun.models.arguments import DataDefaults, too_large
from hookrun.models.weights import SCALES, differing, kind_of, read_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hookrun.models.settings import Model

TRANSFORMERS = "transformers"
PATH = "model.args.path"
CONFIG = "model.args.config"

# The value of `class` -> transformers' auto class, which chooses the class of the architecture.
CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}
# Keys of a configuration for which null means the data set's value.
_FROM_DATA = {
    "vocab_size": "vocab_size",
    "num_labels": "num_classes",
    "num_channels": "in_channels",
    "image_size": "image_size",
}
_REFUSED = (
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "quantization",
    "kernel",
    "name_or_path",
)
_OF_EVERY_CONFIG = ("num_labels", "model_type", "decoder_start_token_id")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_MOST = 2**31
_MOST_LAYERS = 1024
_MOST_CLASSES = 2**20
_COUNTS = re.compile(
    "^(?!.*(size|dim|token|length|channel|vocab)).*(layer|depth|block|stage|expert|group|level)"
)
"""Keys of numbers of modules, such as layers, which are limited."""
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The files of weights that transformers writes, in the order in which it looks for them."""

_CONNECT_TIMEOUT = 10.0


class TransformersArgs(Args):
    """Which model.

    path:      the folder of a model, or its name on the hub; null: a random model, described by `config`
    config:    of a random model: {model_type: gpt2, n_layer: 4, ...}; for vocab_size, num_labels, num_channels and
               image_size null means the data set's value
    class_:    the kind of model, such as causal_lm
    dtype:     dtype of the weights; null: as saved, float32 for a random model
    attention: eager: plain operations; sdpa: torch's fused attention; points: plain operations, with a module for each
               intermediate value
    result:    with points: also a module for what each head adds to the residual stream, after the output projection;
               the sum over the heads equals the projection, up to rounding
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    class_: Literal[
        "causal_lm",
        "masked_lm",
        "sequence_classification",
        "encoder",
        "seq2seq_lm",
        "image_classification",
    ] = Field(default="causal_lm", alias="class")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    attention: Literal["eager", "sdpa", "points"] = "eager"
    result: bool = False

    @property
    def implementation(self) -> str:
        """The attention with which transformers makes the model; the points are added to it."""
        return "eager" if self.attention == "points" else self.attention

    @model_validator(mode="after")
    def _one_source(self) -> TransformersArgs:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path`, or `config` with a model_type for a random model")
        if self.result and self.attention != "points":
            raise ValueError("`result: true` goes with `attention: points`")
        return self


def prepare(config: Model, data: DataDefaults) -> partial[Any]:
    """The call that builds the model. Raises SpecError for invalid arguments."""
    args = validated(TransformersArgs, config.args, "model.args")
    try:
        import transformers  # noqa: F401 - whether it is there
    except ImportError as error:
        raise spec_error(
            "model.name",
            "models of transformers need the package, which is not installed",
            "pip install 'hookrun[transformers]'",
        ) from error
    return partial(_build, args=args, data=data)


def _build(args: TransformersArgs, data: DataDefaults) -> nn.Module:
    from hookrun.engine.plan.attention_points import add_points, add_results

    with _quiet():
        try:
            model = _random(args, data) if args.path is None else _saved(args)
        except (SpecError, HookrunWarning):
            raise
        except Exception as error:  # no network, no such model, a damaged file, sizes that do not go together
            raise SpecError([_failure(args, error)]) from error
        config: Any = model.config
        config.use_cache = False  # passes over whole sequences need no KV cache
        with refused_at("model.args.attention", "use eager or sdpa", kinds=ValueError, what="points: "):
            if args.attention == "points":
                add_points(model)
            if args.result:
                add_results(model)
    return model.train()


def _random(args: TransformersArgs, data: DataDefaults) -> nn.Module:
    """A model of the configuration, its weights drawn from torch's generator."""
    import torch

    config = _config(args.config or {}, data, args)
    auto = _auto_class(args, config, CONFIG)
    options = {"attn_implementation": args.implementation, "dtype": getattr(torch, args.dtype or "float32")}
    make = partial(auto.from_config, config, trust_remote_code=False, **options)
    if why := too_large(make):
        raise spec_error(CONFIG, why, "give smaller sizes")
    return make()


def _config(given: Mapping[str, Any], data: DataDefaults, args: TransformersArgs) -> Any:
    """The configuration object. Raises SpecError with every key that it does not have."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise spec_error(
            f"{CONFIG}.model_type",
            f"found {kind!r}, which is not an architecture of transformers",
            "for example gpt2" if kind is None else nearest(str(kind), list(CONFIG_MAPPING.keys())),
        )
    filled = dict(_filled(given, data))
    if "classification" in args.class_ and "num_labels" not in filled and data.num_classes is not None:
        filled["num_labels"] = data.num_classes
    cls = CONFIG_MAPPING[kind]
    keys = {*cls().to_dict(), *cls.attribute_map, *_OF_EVERY_CONFIG} - set(_REFUSED)
    problems: list[Problem] = []
    for key in filled:
        if key not in keys and not _forbidden(key):
            what = f"{kind} has no such key; {nearest(str(key), keys)}"
            problems.append(Problem(f"{CONFIG}.{key}", what, "correct it"))
    refuse([*problems, *_large(filled, CONFIG), *_choosing_code(filled)])
    filled.pop("model_type")
    says = f"{kind} refuses the configuration: "
    with refused_at(
        CONFIG, "correct its values", kinds=Exception, what=says, tell=_message
    ):  # its own checks
        return AutoConfig.for_model(kind, **filled)


def _filled(given: Mapping[str, Any], data: DataDefaults) -> Iterator[tuple[str, Any]]:
    """Each key with its value; null is replaced by the data set's value, if it has one."""
    supplied = data.values()
    for key, value in given.items():
        ours = _FROM_DATA.get(key)
        if value is None and ours in supplied:
            value = supplied[ours]
            value = value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
        yield key, list(value) if isinstance(value, tuple) else value


def _choosing_code(given: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem of each key that chooses what code a model runs, also in nested sections."""
    for key, _, where in _entries(given, CONFIG):
        if _forbidden(key):
            hint = "model.args.attention chooses the attention" if "attn" in key else "leave it out"
            yield Problem(where, "a file may not choose what code a model runs", hint)


def _forbidden(key: object) -> bool:
    return any(word in str(key) for word in _REFUSED)


def _large(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """The problem of each number that is too large, also in nested sections and lists."""
    for key, value, at in _entries(given, where):
        most = _MOST
        if _COUNTS.search(key):
            most = _MOST_LAYERS
        elif key == "num_labels":
            most = _MOST_CLASSES
        numbers = value if isinstance(value, list) else [value]
        large = [number for number in numbers if type(number) is int and abs(number) > most]
        if large:
            yield Problem(at, f"found {str(large[0])[:80]}, expected at most {most}")
        elif len(numbers) > _MOST_LAYERS and _COUNTS.search(key):
            yield Problem(at, f"found {len(numbers)} values, expected at most {_MOST_LAYERS}")


def _entries(given: Mapping[str, Any], where: str, depth: int = 0) -> Iterator[tuple[str, Any, str]]:
    """Key, value and key path of each entry, also in nested sections."""
    for key, value in given.items():
        yield str(key), value, f"{where}.{key}"
        if isinstance(value, Mapping) and depth < 4 and not _forbidden(key):
            yield from _entries(value, f"{where}.{key}", depth + 1)


def _auto_class(args: TransformersArgs, config: Any, where: str) -> Any:
    """transformers' auto class for the kind of model. Raises SpecError if the architecture has no such kind."""
    import transformers

    auto = getattr(transformers, CLASSES[args.class_])
    if type(config) in auto._model_mapping:
        return auto
    kinds: list[str] = []
    for name, cls in CLASSES.items():
        if type(config) in getattr(transformers, cls)._model_mapping:
            kinds.append(name)
    raise spec_error(
        "model.args.class",
        f"transformers has no {args.class_!r} model of the type {config.model_type}, but {listed(kinds)}",
        "use one of these",
    )


def _saved(args: TransformersArgs) -> nn.Module:
    """The model in a folder or on the hub, from tensors alone; none of its code runs."""
    import torch
    from transformers import AutoConfig, PreTrainedConfig

    path = args.path or ""
    folder = Path(path).expanduser().absolute()
    local = folder.is_dir()
    if not local and not _HUB_ID.fullmatch(path):
        raise spec_error(
            PATH,
            f"there is no folder {folder}",
            "give the folder of a model, or its name on the hub, such as openai-community/gpt2",
        )
    place = str(folder) if local else path
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local or not _hub_answers()}
    given, _ = PreTrainedConfig.get_config_dict(place, **options)
    refuse(_large(given, PATH))
    config = AutoConfig.from_pretrained(place, **options)
    auto = _auto_class(args, config, PATH)
    dtype = getattr(torch, args.dtype) if args.dtype else "auto"
    plain = config.dtype if dtype == "auto" else dtype
    if why := too_large(partial(auto.from_config, config, dtype=plain, trust_remote_code=False)):
        raise spec_error(PATH, f"{place}: {why}", "take a smaller model, or a machine with more memory")
    file = _weights_file(config, place) if local else None
    is_pickle = file is not None and ".safetensors" not in file.name
    if file is not None and is_pickle:
        read_weights(file, where=PATH)  # refuses anything but tensors before transformers reads it
    model, report = auto.from_pretrained(
        place,
        config=config,
        attn_implementation=args.implementation,
        dtype=dtype,
        use_safetensors=not is_pickle,
        output_loading_info=True,
        **options,
    )
    _check_loaded(model, report, place)
    changes = list(_changed(model, report, config, place))
    problems = differing(place, "of another kind", changes, len(model.state_dict()), SCALES)
    refuse(problem.moved(PATH) for problem in problems)
    return model


def _failure(args: TransformersArgs, error: Exception) -> Problem:
    """The problem of a model that transformers could not make, with its reason."""
    message = _message(error)
    if args.attention == "sdpa" and "attn_implementation" in str(error):
        return Problem("model.args.attention", f"sdpa: {message}", "use model.args.attention=eager")
    if args.path is None:
        return Problem(CONFIG, f"transformers cannot build the model: {message}", "correct the values")
    folder = Path(args.path).expanduser().absolute()
    if folder.is_dir():
        return Problem(
            PATH,
            f"{folder} has no model that transformers can load from tensors alone: {message}",
            "save one there with save_pretrained",
        )
    return Problem(
        PATH,
        f"there is no folder {folder}, and '{args.path}' could not be fetched from the hub: {message}",
        f"where there is no network, fetch it elsewhere with `hf download {args.path} --local-dir DIR`, "
        f"bring DIR here and set {PATH}=DIR",
    )


def _check_loaded(model: nn.Module, report: Mapping[str, Any], place: str) -> None:
    """Warn of tensors that the folder does not have, which are then random. Raises SpecError if it has none."""
    import warnings

    missing = sorted(report.get("missing_keys", ()))
    if not missing:
        return
    total = len(model.state_dict())
    what = f"{place} lacks {len(missing)} of the model's {total} tensors: {listed(missing)}"
    if len(missing) == total:
        raise spec_error(PATH, what, "give the folder of such a model, or another model.args.class")
    warnings.warn(f"{PATH}: {what}; they are random", HookrunWarning, stacklevel=2)


def _changed(model: Any, report: Mapping[str, Any], config: Any, place: str) -> Iterator[str]:
    """Each tensor that transformers has converted to another kind of number: ``'a.b' is torch.int8 in the file and …``.

    A quantized model is left out as far as its tensors have scales beside them, which transformers has applied.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    of_parameters = {kind_of(each.dtype) for each in model.parameters()}
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    prefix = f"{model.base_model_prefix}."
    file = _weights_file(config, place)
    if file is None:
        return
    is_quantized = hasattr(config, "quantization_config")
    dtypes: dict[str, torch.dtype] = {}
    scaled = set[str]()
    for name, tensor in read_weights(file, where=PATH).items():
        if name in report["unexpected_keys"] or ignored.search(name):
            continue
        dtypes[name] = tensor.dtype
        module, _, last = name.rpartition(".")
        if is_quantized and "scale" in last:
            scaled.add(module)
    for name, dtype in sorted(dtypes.items()):
        kinds = of_parameters  # a tensor under another name becomes a part of some parameter
        for other in (name, prefix + name, name.removeprefix(prefix)):
            if other in tensors:
                kinds = {kind_of(tensors[other].dtype)}
                break
        if kind_of(dtype) not in kinds and name.rpartition(".")[0] not in scaled:
            yield f"'{name}' is {dtype} in the file and {' or '.join(sorted(kinds))} in the model"


def _weights_file(config: Any, place: str) -> Path | None:
    """The file from which transformers loads the model, or its index of several; None if it is not on this machine."""
    from transformers.utils.hub import cached_file

    find = partial(cached_file, place, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    named = getattr(config, "transformers_weights", None)
    for name in [named] if named else _FILES:
        if path := find(name):
            return Path(path)
    return None


def _hub_answers() -> bool:
    """Whether the hub can be reached; a single request, as the hub's own client retries for half a minute."""
    from huggingface_hub import constants, utils

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        session: Any = utils
        session.get_session().head(constants.ENDPOINT, timeout=_CONNECT_TIMEOUT)
    except Exception:  # its client may be one of several libraries; whatever it raises, there is no answer
        return False
    return True


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and advice while it loads; errors are reported by hookrun."""
    from transformers.utils import logging as theirs

    logging: Any = theirs
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
