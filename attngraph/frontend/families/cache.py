"""Which inputs and outputs of a decoder are its tokens, its mask and its cache."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import sympy
import torch

from attngraph.errors import LoadError, UsageError
from attngraph.ir import Dim, Graph, Value
from attngraph.ir.dims import same, same_shape
from attngraph.ir.traits import CAST, COPY, EMBEDDING, INDEX, PERMUTE, RESHAPE
from attngraph.metadata import record

METADATA_KEY = "attngraph.decoder"


@dataclass(frozen=True)
class Layout:
    """Names of a decoder's inputs and outputs, and of the dims of its inputs.

    `ids` is (batch, seq); `mask` is (batch, past + seq), 1 where there is a token; `positions` is
    (batch, seq) or (seq,); `logits` ends in (seq or 1, vocabulary). Output `presents[i]` is what
    input `pasts[i]` is at the next step. In a static cache the pasts are buffers of `max_length`
    tokens, along `axes[i]` for the i-th that is no state. How many they hold follows from the mask,
    and is the input `length` where there is no mask, or where the file is older. `vocabulary` is
    how many ids there are, where the graph looks them up in a table. What a cache of at most
    `switches` tokens holds is to be computed anew for a longer sequence, and behind `last` tokens
    for each (attngraph/decoding/lengths.py). `most` and `most_positions` are how many tokens the
    tables have rows for, with padding and without it. `memory` are the inputs that stay the same in
    all steps, as what a decoder attends to of an encoder.

    `states` are those of `pasts` that have one size however many tokens came, as recurrences and
    convolutions keep; rows are then padded on the left alone. A step makes new ones, in a static
    cache too. Where all are, `past` is empty and `mask` is (batch, seq). A call takes at most
    `piece` tokens, with None any number. One of fewer than `compared` isn't what the module
    computes of so few, but what it does without a cache.

    With `embeds`, what `ids` names are embeddings (batch, seq, width) of ids, and `vocabulary` is
    that of their table. `kinds` (batch, seq) is 1 at an image's tokens, and `added` (layers, batch,
    seq, width) what first layers add to each token, 0 where it is none of an image. `layered`
    (batch, seq, layers, width) are inputs of each layer for each token.
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
    vocabulary: int | None = None
    switches: tuple[int, ...] = ()
    last: int | None = None
    most: int | None = None
    most_positions: int | None = None
    memory: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    piece: int | None = None
    compared: int = 1
    embeds: bool = False
    kinds: str | None = None
    added: str | None = None
    layered: str | None = None

    @property
    def growing(self) -> dict[str, str]:
        """The present of each past that counts tokens."""
        pairs = zip(self.pasts, self.presents, strict=True)
        return {past: present for past, present in pairs if past not in self.states}

    @property
    def replaced(self) -> dict[str, str]:
        """The present of each state."""
        pairs = zip(self.pasts, self.presents, strict=True)
        return {past: present for past, present in pairs if past in self.states}

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | None, source: str) -> Layout:
        """Raises LoadError where a file doesn't say, as one that wasn't compiled as a decoder."""
        try:
            return record(cls, text)
        except ValueError as error:
            raise LoadError(
                f"{source} doesn't say which of its inputs are the cache: it wasn't compiled with "
                "attngraph optimize --decode."
            ) from error


def find_layout(
    graph: Graph,
    presents: Mapping[str, str] | None,
    source: str,
    memory: Collection[str] = (),
) -> Layout:
    """Reads the parts of a decoder from its graph; `presents` names that of each past.

    `memory` are the inputs that stay the same in all steps.

    Without `presents`, an input is a past where an output has its shape with `past` replaced by
    `past + seq`: by descent if that output is a cat of the input, else in the order of both. It is
    a state where an output has its very shape, of which the batch alone is dynamic.
    Raises UsageError where no cache is found, or an input has no part in decoding.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    pairs = _named(inputs, outputs, presents) if presents else None
    moving = [value for value in graph.inputs if value.name not in memory]
    ids = _token_ids(moving, source)
    batch, seq = ids.shape
    pairs = pairs if pairs is not None else _found(moving, outputs, seq, batch)
    if not pairs:
        raise UsageError(
            f"The cache of {source} can't be found: no output is an input made longer by seq, or a "
            "state of an input's shape. Take the past as input tensors and return them joined to "
            'what is new, or name them: presents={"past": "present"}, or --present past=present.'
        )
    states = [n for n in pairs if _replaced(inputs[n], outputs[pairs[n]], batch)]
    growing = [inputs[name] for name in pairs if name not in states]
    past = _past_dim(growing, seq, batch, source) if growing else sympy.Integer(0)
    mask = positions = None
    for value in moving:
        if value is ids or value.name in pairs:
            continue
        last = value.shape[-1] if value.shape else None
        is_whole = last is not None and same(last, past + seq) and len(value.shape) == 2
        if is_whole and (growing or _called(value, "mask")):
            mask = value.name
        elif positions is None and _is_positions(value, batch, seq):
            positions = value.name
        else:
            if growing and len(value.shape) == 2 and _is_free(last, ids, inputs, pairs):
                first = growing[0].name
                axis = growing[0].shape.index(past)
                raise UsageError(
                    f"The input {value.name} of {source} has a length of its own. If it is the "
                    "mask (batch, past + seq), say so where forward begins: torch._check("
                    f"{value.name}.shape[1] == {first}.shape[{axis}] + {ids.name}.shape[1])."
                )
            raise UsageError(
                f"The input {value.name} of {source} is neither token ids nor a mask (batch, past "
                "+ seq), positions (batch, seq) called so, a cache, or a state that an output of "
                "its shape replaces: wrap the model in a module that computes it, or call "
                "positions position_ids."
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
        str(past) if growing else "",
        mask,
        positions,
        vocabulary=rows_looked_up(ids),
        memory=tuple(value.name for value in graph.inputs if value.name in memory),
        states=tuple(states),
    )


def _token_ids(inputs: Sequence[Value], source: str) -> Value:
    """The input of token ids. Where several could be, a name must tell positions apart."""
    found = [
        value
        for value in inputs
        if _is_integer(value) and len(value.shape) == 2 and _seq(value) is not None
    ]
    if not found:
        raise UsageError(
            f"{source} has no input of token ids: decoding needs an integer input (batch, seq) "
            "whose two dims are dynamic."
        )
    others = [value for value in found if not _called(value, "pos", "place", "mask")]
    if len(found) == 1 or len(others) == 1:
        return found[0] if len(found) == 1 else others[0]
    raise UsageError(
        f"Which input of {source} is the token ids can't be told: "
        f"{' and '.join(value.name for value in others or found)} are all (batch, seq). Call "
        "positions position_ids, and wrap the model in a module that computes what else it takes."
    )


def _called(value: Value, *parts: str) -> bool:
    return any(part in value.name.lower() for part in parts)


def _is_free(
    dim: Dim | None, ids: Value, inputs: Mapping[str, Value], pairs: Iterable[str]
) -> bool:
    """Whether a dim is one that neither the token ids nor the cache have."""
    others = {*ids.shape, *(size for name in pairs for size in inputs[name].shape)}
    return isinstance(dim, sympy.Symbol) and dim not in others


def _is_positions(value: Value, batch: Dim, seq: Dim) -> bool:
    """Whether an input is integers (batch, seq), (1, seq) or (seq,) that are called positions.

    Shape alone doesn't tell positions from token types.
    """
    if not (_is_integer(value) and _called(value, "pos", "place") and value.shape):
        return False
    *rows, last = value.shape
    return same(last, seq) and (not rows or (len(rows) == 1 and rows[0] in (1, batch)))


_KEEPING_IDS = CAST | COPY | RESHAPE | PERMUTE


def rows_looked_up(ids: Value) -> int | None:
    """The rows of the smallest table that ids are looked up in as they are; None without one."""
    reached, sizes = [ids], []
    for value in reached:
        for node in value.users:
            if node.op in _KEEPING_IDS:
                reached.append(node.output)
            table = node.inputs[0]
            if node.op not in INDEX | EMBEDDING or table is None:
                continue
            if table is not value and value is node.inputs[1]:
                sizes.append(table.shape[0])
    return min((size for size in sizes if isinstance(size, int)), default=None)


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


def _found(
    inputs: Sequence[Value], outputs: Mapping[str, Value], seq: Dim, batch: Dim
) -> dict[str, str]:
    def joined(value: Value, output: Value) -> bool:
        return value in _first_parts(output) and grown(value, output)

    def grown(value: Value, output: Value) -> bool:
        return _grown(value.shape, output.shape, seq, batch) is not None

    def replaced(value: Value, output: Value) -> bool:
        return _replaced(value, output, batch)

    left = dict(outputs)
    pairs: dict[str, str] = {}
    floats = [value for value in inputs if value.dtype.is_floating_point]
    for follows in (joined, grown, replaced):
        for value in floats:
            if value.name in pairs:
                continue
            present = next((name for name, output in left.items() if follows(value, output)), None)
            if present is not None:
                pairs[value.name] = present
                del left[present]
    return {value.name: pairs[value.name] for value in floats if value.name in pairs}


def _replaced(value: Value, output: Value, batch: Dim) -> bool:
    """Whether an output can be what a state is at the next step: of its type, and as many rows."""
    open_ = [size for size in value.shape if not isinstance(size, int)]
    is_alike = same_shape(value.shape, output.shape) and value.dtype == output.dtype
    return is_alike and len(open_) == 1 and same(open_[0], batch)


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
