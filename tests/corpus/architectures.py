"""Tiny random models of the architectures in `transformers`, made from their config classes alone.

Nothing is downloaded. `build("llama", "eager")` makes one, with sample inputs, at two layers and a
width of 64; `build("llama head=CausalLM length=33", "sdpa")` another (see tests/corpus/rows.py).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.corpus.inputs import sample_inputs
from tests.corpus.rows import Row, parse_row
from tests.corpus.sizes import shrink
from tests.models import peaked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 40_000_000


class PartOfModelError(NotImplementedError):
    """transformers has a config for it, and makes no model of it alone that has a forward."""


@dataclass(frozen=True)
class Architecture:
    """A tiny model in eval mode with the positional inputs that it takes, by name.

    `dynamic_shapes` is torch.export's, None where every dim is static.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    dynamic_shapes: tuple[tuple[dict[int, Dim] | None, ...]] | None = None

    def of_any_size(self) -> Architecture:
        """With dims that take what the model takes of them, where it doesn't take all of 2..64."""
        assert self.dynamic_shapes is not None
        (shapes,) = self.dynamic_shapes
        names = {dim.__name__ for shape in shapes for dim in (shape or {}).values()}
        dims = {name: Dim(name) for name in names}
        opened = tuple(
            shape and {axis: dims[dim.__name__] for axis, dim in shape.items()} for shape in shapes
        )
        return replace(self, dynamic_shapes=(opened,))


def build(text: str, attention: str = "eager") -> Architecture:
    """Build the row `text` with random, peaked weights and `attention` "eager" or "sdpa".

    Raises MemoryError where the architecture stays too large when shrunk, UnknownInputError where
    its input is of an unknown kind, PartOfModelError where it is no model of its own, and what
    transformers raises where it can't be built.
    """
    row = parse_row(text)
    with _quiet():
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _model(row, attention).parameters())
        if size > MAX_PARAMETERS:
            raise MemoryError(f"{text} has {size:,} parameters even when shrunk")
        torch.manual_seed(0)
        model = _model(row, attention).float()
    peaked(model)
    feed, fixed = sample_inputs(model, row)
    module = FirstTensor(model, tuple(feed), fixed).eval()
    return Architecture(module, tuple(feed.values()), tuple(feed), _dynamic(feed, row.dims))


class FirstTensor(nn.Module):
    """Calls the model with its positional inputs by name and returns one tensor of its outputs.

    It is the last hidden state, or the first tensor where there is none, or the last one of the
    first tuple.
    """

    def __init__(
        self, model: PreTrainedModel, names: tuple[str, ...], fixed: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.model, self.names = model, names
        cached = "use_cache" in inspect.signature(model.forward).parameters
        self.flags = {"use_cache": False} if cached else {}
        self.constants = tuple(fixed)
        for name, value in fixed.items():
            self.register_buffer(f"fixed_{name}", value, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        feed = dict(zip(self.names, inputs, strict=True))
        feed |= {name: getattr(self, f"fixed_{name}") for name in self.constants}
        result = self.model(**feed, **self.flags, return_dict=True)
        if isinstance(result, Tensor):
            return result
        values = dict(enumerate(result)) if isinstance(result, tuple) else result
        found = values.get("last_hidden_state")
        if isinstance(found, Tensor):
            return found
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        # A backbone has a tuple of maps, of which the last is made of all its stages.
        return tensors[0] if tensors else next(filter(None, values.values()))[-1]


def _model(row: Row, attention: str) -> PreTrainedModel:
    import transformers

    config = _config(row, attention)
    maker = getattr(transformers, f"AutoModelFor{row.head}" if row.head else "AutoModel")
    if row.head or type(config) in maker._model_mapping:
        make = maker.from_config
    else:
        make = _own_class(config)._from_config
    model: PreTrainedModel = make(config, attn_implementation=attention)
    return model


def _own_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model that is made of this config, where it is no `AutoModel`: a part of another one."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    made = [
        found
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, PreTrainedModel)
        and found.config_class is type(config)
        and found.forward is not PreTrainedModel.forward
    ]
    if not made:
        raise PartOfModelError(f"transformers has no model of {config.model_type} with a forward")
    return next((found for found in made if found.__name__.endswith("Model")), made[-1])


def _config(row: Row, attention: str) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    parts = {key: value for key, value in row.options.items() if _is_part(value)}
    config = CONFIG_MAPPING[row.model_type](**parts)
    shrink(config)
    for key, value in row.options.items():
        if key in parts:
            continue
        *path, name = key.split(".")
        part = reduce(getattr, path, config)
        if isinstance(part, dict):
            part[name] = value
        else:
            setattr(part, name, value)
    config.use_cache = False
    config._attn_implementation = attention
    return config


def _is_part(value: object) -> bool:
    """Whether it is a config of its own, which the whole one is made with."""
    return isinstance(value, dict) and "model_type" in value


def _dynamic(
    feed: Mapping[str, Tensor], dims: Sequence[str]
) -> tuple[tuple[dict[int, Dim] | None, ...]] | None:
    """The batch, and the lengths of the token inputs, as dims; the decoder's length is its own."""
    if not dims:
        return None
    made = {name: Dim(name, min=2, max=64) for name in (*dims, "target")}
    shapes: list[dict[int, Dim]] = []
    for name, tensor in feed.items():
        length = "target" if name.startswith("decoder") else "seq"
        shapes.append({0: made["batch"]} if "batch" in dims else {})
        if "seq" in dims and tensor.ndim == 2 and ("input_ids" in name or "mask" in name):
            shapes[-1][1] = made[length]
    return (tuple(shape or None for shape in shapes),)  # they are one starred parameter


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that configs of default values give while they are built."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
