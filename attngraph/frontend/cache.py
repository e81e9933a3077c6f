"""Which inputs and outputs of a decoder are its tokens, its mask and its cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch

from attngraph.errors import LoadError, UsageError
from attngraph.ir import Dim, Graph, Value
from attngraph.ir.dims import same, same_shape

METADATA_KEY = "attngraph.decoder"


@dataclass(frozen=True)
class Layout:
    """Names of a decoder's inputs and outputs, and of the dims of its inputs.

    `ids` is (batch, seq); `mask` is (batch, past + seq), 1 where there is a token; `positions` is
    (batch, seq) or (seq,); `logits` ends in (seq or 1, vocabulary). Output `presents[i]` is what
    input `pasts[i]` is at the next step. In a static cache the pasts are buffers of `max_length`
    tokens along `axes[i]`, of which the input `length` says how many they hold.
    """

    ids: str
    logits: str
    pasts: tuple[str, ...]
    presents: tuple[str, ...]
    batch: str
    past: str
    mask: str | None = None
    positions: str | None = None
    length: str | None = None
    max_length: int | None = None
    axes: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | None, source: str) -> Layout:
        """Raises LoadError where a file doesn't say, as one that wasn't compiled as a decoder."""
        try:
            fields: dict[str, Any] = json.loads(text or "")
            for name in ("pasts", "presents", "axes"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise LoadError(
                f"{source} doesn't say which of its inputs are the cache: it wasn't compiled with "
                "attngraph optimize --decode."
            ) from error


def find_layout(graph: Graph, presents: Mapping[str, str] | None, source: str) -> Layout:
    """Reads the parts of a decoder from its graph; `presents` names that of each past.

    Without `presents`, an input is a past where an output has its shape with `past` replaced by
    `past + seq`: by descent if that output is a cat of the input, else in the order of both.
    Raises UsageError where no cache is found, or an input has no part in decoding.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    integers = [v for v in graph.inputs if _is_integer(v) and len(v.shape) == 2]
    pairs = _named(inputs, outputs, presents) if presents else None
    ids = next((v for v in integers if _seq(v) is not None), None)
    if ids is None:
        raise UsageError(
            f"{source} has no input of token ids: decoding needs an integer input (batch, seq) "
            "whose two dims are dynamic."
        )
    batch, seq = ids.shape
    pairs = pairs if pairs is not None else _found(graph, outputs, seq, batch)
    if not pairs:
        raise UsageError(
            f"The cache of {source} can't be found: no output is an input made longer by seq. "
            "Take the past as input tensors and return them joined to what is new, or name them: "
            'presents={"past": "present"}, or --present past=present.'
        )
    past = _past_dim([inputs[name] for name in pairs], seq, batch, source)
    mask = positions = None
    for value in graph.inputs:
        if value is ids or value.name in pairs:
            continue
        last = value.shape[-1] if value.shape else None
        if last is not None and same(last, past + seq) and len(value.shape) == 2:
            mask = value.name
        elif last is not None and same(last, seq) and _is_integer(value):
            positions = value.name
        else:
            raise UsageError(
                f"The input {value.name} of {source} is neither token ids nor a mask (batch, past "
                "+ seq), positions (batch, seq) or a cache: wrap the model in a module that "
                "computes it."
            )
    rest = [name for name in outputs if name not in pairs.values()]
    logits = [n for n in rest if len(outputs[n].shape) == 3 and outputs[n].dtype.is_floating_point]
    if len(logits) != 1:
        raise UsageError(
            f"{source} returns {', '.join(rest) or 'nothing'} beside its cache, where decoding "
            "needs logits (batch, seq, vocabulary) alone."
        )
    return Layout(
        ids.name,
        logits[0],
        tuple(pairs),
        tuple(pairs.values()),
        str(batch),
        str(past),
        mask,
        positions,
    )


def _is_integer(value: Value) -> bool:
    return value.dtype in (torch.int64, torch.int32)


def _seq(value: Value) -> Dim | None:
    batch, seq = value.shape
    return seq if isinstance(seq, sympy.Symbol) and isinstance(batch, sympy.Symbol) else None


def _named(
    inputs: Mapping[str, Value], outputs: Mapping[str, Value], cache: Mapping[str, str]
) -> dict[str, str]:
    for name, known, what in (
        *((past, inputs, "input") for past in cache),
        *((present, outputs, "output") for present in cache.values()),
    ):
        if name not in known:
            raise UsageError(f"There is no {what} {name}; there are {', '.join(known)}.")
    return {name: cache[name] for name in inputs if name in cache}


def _found(graph: Graph, outputs: Mapping[str, Value], seq: Dim, batch: Dim) -> dict[str, str]:
    left = dict(outputs)
    pairs: dict[str, str] = {}
    floats = [value for value in graph.inputs if value.dtype.is_floating_point]
    for by_descent in (True, False):
        for value in floats:
            if value.name in pairs:
                continue
            for name, output in left.items():
                if by_descent and value not in _first_parts(output):
                    continue
                if _grown(value.shape, output.shape, seq, batch) is not None:
                    pairs[value.name] = name
                    del left[name]
                    break
    return {value.name: pairs[value.name] for value in floats if value.name in pairs}


def _first_parts(output: Value) -> tuple[Value | None, ...]:
    node = output.producer
    return node.inputs[:1] if node is not None and node.op == "aten.cat" else ()


def _grown(past: Sequence[Dim], present: Sequence[Dim], seq: Dim, batch: Dim) -> Dim | None:
    """The dim that is longer by seq in the present, all others being equal."""
    if len(past) != len(present):
        return None
    other = [axis for axis, (a, b) in enumerate(zip(past, present, strict=True)) if not same(a, b)]
    if len(other) != 1:
        return None
    dim = past[other[0]]
    is_free = isinstance(dim, sympy.Symbol) and not same_shape([dim], [batch])
    return dim if is_free and same(present[other[0]], dim + seq) else None


def _past_dim(pasts: Sequence[Value], seq: Dim, batch: Dim, source: str) -> sympy.Symbol:
    found = {
        dim
        for value in pasts
        for dim in value.shape
        if isinstance(dim, sympy.Symbol) and dim not in (seq, batch)
    }
    if len(found) != 1:
        raise UsageError(
            f"The pasts of {source} have the dynamic lengths {', '.join(map(str, found)) or 'none'}"
            "; all of them must have the same one, given as one Dim."
        )
    return found.pop()
