"""The inputs on which a decoder is compared with its model: steps, and generated tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngraph.analysis.recurrence.mixing import sizes_around
from attngraph.checks.check import Cases
from attngraph.checks.roles import roles_of
from attngraph.checks.rounded import flipped, rounded_linears, without_rounding
from attngraph.checks.weight_only import Evaluated
from attngraph.decoding.caches import Cache, GrowingCache
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.lengths import Lengths
from attngraph.decoding.step_outputs import joined_steps, last_logits
from attngraph.decoding.stream import Step
from attngraph.decoding.tokens import pieces, positions
from attngraph.errors import UsageError
from attngraph.export.formats import Precision
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.export.precision import own_precision
from attngraph.export.runtime.tensors import to_torch
from attngraph.frontend.capture import Captured
from attngraph.frontend.families.cache import Layout
from attngraph.frontend.families.stateful_lm import Stateful
from attngraph.frontend.model import Model
from attngraph.ir import Graph
from attngraph.ir.conditions import shown
from attngraph.ir.dims import substitute
from attngraph.ir.ranges import Ranges
from attngraph.mapped import release_large

# (batch, seq, past) of prompts, of a later part of one, and of a step. A dozen tokens or more each:
# the rounding errors of one token go together, and those of a few are no measure for a budget.
_SIZES = ((5, 6, 0), (1, 13, 0), (4, 5, 3), (12, 1, 7))
_ONE_TOKEN = ((12, 1, 7), (14, 1, 3), (13, 1, 0))  # where a call takes no more
PROMPT = 5
_ROWS, _STEPS = 4, 3
_OTHER_SIZES = (9, 1, 24)  # of what is attended to


@dataclass(frozen=True)
class Encoded:
    """What the steps of a check attend to, and what the eager model computes without a cache.

    `cache` is the decoder's without a token, of `rows` rows. `whole(*given, ids)` are the logits of
    ids (rows, S), of all of them; `label` says what was encoded. The ids have no `pad`: one may
    count no position, so that what follows is placed otherwise with a cache than without.

    Where images are joined to the ids, `step` is called in the decoder's place, `fed` gives its
    inputs for all tokens of ids and mask of which so many come at first, and `whole` takes the mask
    and that number too. `prompt` is then the ids and the mask (rows, T) to check with, and how many
    of them come at first; else they are drawn.
    """

    label: str
    rows: int
    cache: Cache | None
    whole: torch.nn.Module
    given: tuple[Any, ...]
    pad: int | None = None
    step: Step | None = None
    fed: Callable[[torch.Tensor, torch.Tensor, int], dict[str, torch.Tensor]] | None = None
    prompt: tuple[torch.Tensor, torch.Tensor, int] | None = None


class _Inputs:
    """Inputs of a decoder at any size, from the samples it was captured with."""

    def __init__(self, captured: Captured, layout: Layout) -> None:
        self.layout = layout
        self.graph: Graph = captured.graph
        self.shapes = {value.name: value.shape for value in captured.graph.inputs}
        self.dtypes = {value.name: value.dtype for value in captured.graph.inputs}
        samples = dict(zip(captured.input_names, captured.args, strict=True))
        ids, self.sample = captured.input_names.index(layout.ids), samples[layout.ids]
        rows = layout.vocabulary or roles_of(captured.graph, captured.args)[ids].rows
        self.tokens = rows or max(int(self.sample.max()) + 1, 2)
        self.random = torch.Generator().manual_seed(0)

    def ids(self, batch: int, length: int) -> torch.Tensor:
        drawn = torch.randint(self.tokens, (batch, length), generator=self.random)
        return drawn if self.layout.embeds else drawn.to(self.dtypes[self.layout.ids])

    def taken(self, batch: int, length: int) -> torch.Tensor:
        """What the graph takes of new tokens: their ids, or embeddings like the sample's."""
        if not self.layout.embeds:
            return self.ids(batch, length)
        shape = (batch, length, self.sample.shape[-1])
        drawn = torch.randn(shape, generator=self.random) * float(self.sample.float().std())
        return drawn.to(self.sample.dtype)

    def mask(self, batch: int, length: int) -> torch.Tensor:
        """Row b is padded on the left by b, as far as it has room; the last of three or more rows
        has a hole behind its first token as well, but where states can't be without one.
        """
        hidden = length if self.layout.piece == 1 else length - 1  # all of a row, where one is new
        padding = torch.arange(batch)[:, None].clamp_max(hidden)
        mask = torch.arange(length)[None] >= padding
        if batch > 2 and length > batch + 2 and not self.layout.states:
            mask[-1, batch + 1] = False
        return mask

    def mask_of_steps(self, batch: int, length: int) -> torch.Tensor:
        """One that `Decoder` takes: without a mask no row is padded, and with one row of positions
        all are alike."""
        layout = self.layout
        if layout.mask is None:
            return torch.ones(batch, length, dtype=torch.bool)
        mask = self.mask(batch, length)
        return mask[:2][-1:].expand(batch, length) if self.shares_positions else mask

    @property
    def shares_positions(self) -> bool:
        """Whether the model takes one row of positions for the whole batch."""
        name = self.layout.positions
        return name is not None and [*map(str, self.shapes[name][:-1])][-1:] != [self.layout.batch]

    def all(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        past: int,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Every input of the graph, in its order; the past and what is attended to are random.

        `sizes` are those of the other dims, by default as they were traced. States are zero where
        nothing is past.
        """
        layout = self.layout
        hints = {name: info.hint for name, info in self.graph.dims.items()}
        sizes = {**hints, **(sizes or {}), layout.batch: ids.shape[0], layout.past: past}
        given = {layout.ids: ids}
        if layout.mask is not None:
            shown = mask if layout.past else mask[:, past:]
            given[layout.mask] = shown.to(self.dtypes[layout.mask])
        if layout.positions is not None:
            places = positions(mask, past, ids.shape[1])
            if self.shares_positions:
                is_alike = bool((places == places[0]).all())
                row = places[:1] if is_alike else positions(None, past, ids.shape[1])
                places = row if len(self.shapes[layout.positions]) == 2 else row[0]
            if len(self.shapes[layout.positions]) == 3:  # on grids of images, ahead by a little
                ahead = torch.randint(3, (3, *ids.shape[:2]), generator=self.random)
                places = places + ahead.cumsum(-1)
            given[layout.positions] = places.to(self.dtypes[layout.positions])
        if layout.kinds is not None:  # images of a few tokens, with one between them
            kinds = mask[:, past:] & (torch.arange(past, mask.shape[1]) % 4 != 0)
            given[layout.kinds] = kinds.to(self.dtypes[layout.kinds])
        if layout.added is not None:
            layers, *_, width = (self.shapes[layout.added][axis] for axis in (0, -1))
            drawn = torch.randn(int(layers), *ids.shape[:2], int(width), generator=self.random)
            drawn = drawn * (torch.arange(past, mask.shape[1]) % 4 != 0)[:, None]
            given[layout.added] = drawn.to(self.dtypes[layout.added])
        if layout.layered is not None:
            own = [int(each) for each in self.shapes[layout.layered][2:]]
            drawn = torch.randn(*ids.shape[:2], *own, generator=self.random)
            given[layout.layered] = drawn.to(self.dtypes[layout.layered])
        for name in (*layout.pasts, *layout.memory):
            shape = [int(substitute(dim, sizes)) for dim in self.shapes[name]]
            if name in layout.states and past == 0:
                drawn = torch.zeros(shape)
            elif self.dtypes[name].is_floating_point:
                drawn = torch.randn(shape, generator=self.random)
            else:
                drawn = self.mask(shape[0], shape[1]).flip(-1)
            given[name] = drawn.to(self.dtypes[name])
        return tuple(given[value.name] for value in self.graph.inputs)


def decoding_cases(captured: Captured, layout: Layout, lengths: Lengths) -> Cases:
    """A prompt, a part of one and steps, padded on the left, of sizes that the model takes.

    And the same on both sides of, and across, each length at which something changes.
    """
    inputs = _Inputs(captured, layout)
    seq = str(inputs.shapes[layout.ids][1])
    limits = Ranges.of(captured.graph)
    cases = {}
    names = (layout.batch, seq, layout.past)
    across = lengths.across(captured.graph, layout)
    others = sorted(limits.dims.keys() - {*names})  # the lengths of what is attended to
    own: tuple[tuple[int, int, int], ...] = _ONE_TOKEN if layout.piece == 1 else _SIZES
    if layout.states and layout.piece != 1:
        own = own[::-1]  # a state of zeros shows little of the weights
    for place, sizes in enumerate((*own, *across)):
        rest = {name: _OTHER_SIZES[place % len(_OTHER_SIZES)] for name in others}
        rest = rest if not limits.broken(rest) else {n: captured.graph.dims[n].hint for n in others}
        batch, length, past = sizes
        sizes = batch, max(min(length, layout.piece or length), layout.compared), past
        fitting = _fitting(limits, names, sizes, rest, layout.compared)
        if fitting is None or (place >= len(own) and fitting != sizes):
            continue
        batch, length, past = fitting
        padding = inputs.mask(batch, past + length)
        named = {**dict(zip(names, fitting, strict=True)), **rest}
        label = ", ".join(f"{name}={size}" for name, size in named.items())
        cases[label] = inputs.all(inputs.taken(batch, length), padding, past, rest)
    if not cases:
        required = ", ".join(map(shown, limits.limits()))
        raise UsageError(
            f"The model can't be decoded with: its sizes must have {required}, which neither a "
            "prompt nor a step of a few tokens has."
        )
    return cases


def _fitting(
    limits: Ranges,
    names: tuple[str, str, str],
    sizes: tuple[int, int, int],
    rest: Mapping[str, int],
    least: int,
) -> tuple[int, int, int] | None:
    """(batch, seq, past), each no larger than given, or None where the model takes none of them.

    A seq of fewer than `least` is none.
    """
    batch, length, past = sizes
    lengths = range(length, least - 1, -1)
    smaller = itertools.product(range(batch, 0, -1), range(past, -1, -1), lengths)
    for rows, before, new in smaller:
        if not limits.broken({**rest, **dict(zip(names, (rows, new, before), strict=True))}):
            return rows, new, before
    return None


def inputs_at(
    captured: Captured, layout: Layout
) -> Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]]:
    """A function from sizes of the batch, the new tokens and the past to inputs."""
    inputs = _Inputs(captured, layout)
    seq = str(inputs.shapes[layout.ids][1])

    def at(sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        batch, length = sizes[layout.batch], max(sizes[seq], layout.compared)
        past = sizes[layout.past]
        mask = inputs.mask(batch, past + length)
        return inputs.all(inputs.taken(batch, length), mask, past, sizes)

    return at


def generated_parity(
    model: Model,
    captured: Captured,
    decoder: Decoder,
    precision: Precision,
    changes: Lengths,
    stored: Graph | None = None,
    encoded: Encoded | None = None,
) -> Parity:
    """The last logits of a prompt and of a few steps, against the eager model on all tokens so far.

    The steps go on across each length at which something changes; across a far one, or the end of a
    table, those of one row behind a prompt that ends there. The eager model computes each without a
    cache, so that a cache handed on wrongly shows. With quantized weights the graph that has them,
    `stored`, takes its place; where it rounds activations, steps may differ by codes that flipped
    (checks/rounded.py). A decoder that attends to something is given what is `encoded`, and all of
    the model computes it anew in the comparison.
    """
    steps = _Steps(model, captured, decoder, precision, stored, encoded)
    if encoded is not None and encoded.prompt is not None:
        ids, _, first = encoded.prompt
        return steps.parity(len(ids), range(first, ids.shape[1] + 1))
    graph, layout, takes = captured.graph, decoder.layout, decoder.extent.takes
    rows = _ROWS if encoded is None else encoded.rows
    most = changes.end(graph, layout)
    end = min(PROMPT + _STEPS, most)
    fitting = (n for n in range(2, end + 1) if takes(rows, min(PROMPT, n - 1), n))
    end = max(fitting, default=end)
    first = min(PROMPT, end - 1)
    further = changes.steps(graph, layout, rows, first)
    further |= _around_chunks(graph, layout, first, most)
    taken = {n for n in further if takes(rows, first, n) and takes(rows, n, n)}
    found = {"": steps.parity(rows, sorted({*range(first, end + 1)} | taken))}
    attends = encoded is not None and encoded.step is None
    far = {} if attends else changes.far(graph, layout)
    for change, near in far.items():
        if takes(1, near[0], near[-1]):
            found[f"at {change} tokens"] = steps.parity(1, near)
    return merge(found)


class _Steps:
    """Prompts and steps of a decoder, against the model on all tokens so far."""

    def __init__(
        self,
        model: Model,
        captured: Captured,
        decoder: Decoder,
        precision: Precision,
        stored: Graph | None,
        encoded: Encoded | None,
    ) -> None:
        self.captured, self.decoder, self.precision = captured, decoder, precision
        self.stored, self.encoded = stored, encoded
        self.layout, self.inputs = decoder.layout, _Inputs(captured, decoder.layout)
        module = model.runnable if encoded is None else encoded.whole
        if isinstance(module, Stateful):
            module = module.without_cache
        self.converted = precision != own_precision(captured.graph)
        converted = self.converted and stored is None
        module = module if stored is None else self._evaluated(stored).eval()
        self.reference = Reference(module, precision=precision, converted=converted)

    def _evaluated(self, stored: Graph) -> torch.nn.Module:
        evaluated: torch.nn.Module = Evaluated(stored)
        if self.layout.piece is not None:
            evaluated = _InPieces(evaluated, stored, self.layout)
        return evaluated

    def parity(self, rows: int, lengths: Sequence[int]) -> Parity:
        """The last logits of a prompt of the first length, and of steps to each of the others."""
        captured, layout, inputs = self.captured, self.layout, self.inputs
        stored, encoded = self.stored, self.encoded
        whole, mask = inputs.ids(rows, lengths[-1]), inputs.mask_of_steps(rows, lengths[-1])
        if encoded is not None and encoded.prompt is not None:
            whole, mask, _ = encoded.prompt
        elif encoded is not None and encoded.pad is not None:
            whole = whole.where(whole != encoded.pad, (encoded.pad + 1) % inputs.tokens)
        expected: list[ReferenceOutputs] = []
        tried: list[tuple[torch.Tensor, ...]] = []
        for length in lengths:
            if encoded is not None and stored is None:
                shown = () if encoded.step is None else (mask[:, :length].long(), lengths[0])
                eager = self.reference((*encoded.given, whole[:, :length], *shown), {})
                expected.append(last_logits(eager, 0, layout.logits))
                continue
            given_all = self._given(whole[:, :length], mask[:, :length], lengths[0])
            tried.append(given_all)
            args, kwargs = captured.call(given_all) if stored is None else (given_all, {})
            place = captured.output_names.index(layout.logits)
            expected.append(last_logits(self.reference(args, kwargs), place, layout.logits))
        release_large(self.reference.module)  # before the session has a copy of them
        state, done = None if encoded is None else encoded.cache, 0
        step = self.decoder if encoded is None or encoded.step is None else encoded.step
        found: list[torch.Tensor] = []
        for length in lengths:
            given = mask[:, :length] if layout.mask is not None else None
            logits, state = step(whole[:, done:length], given, state)
            found.append(logits[:, -1:])
            done = length
        outputs: tuple[torch.Tensor, ...] = (torch.cat(found, 1),)
        joined = joined_steps(expected)
        if stored is not None and rounded_linears(stored):
            plain, place = without_rounding(stored), captured.output_names.index(layout.logits)
            rerun = self._evaluated(plain)
            others = [rerun(*given_all)[place][:, -1:] for given_all in tried]
            return Parity(flipped(joined, outputs, [torch.cat(others, 1)]), self.precision)
        outputs = joined.in_its_dtypes(outputs) if self.converted else outputs
        return compare(joined, outputs, self.precision)

    def _given(self, ids: torch.Tensor, mask: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
        """The graph's inputs for ids (B, S) and mask (B, S), with nothing before them."""
        graph, encoded = self.captured.graph, self.encoded
        if encoded is None:
            return self.inputs.all(ids, mask, 0)
        if encoded.fed is None:
            assert encoded.cache is not None
            return _attending(graph, self.inputs.all(ids, mask, 0), encoded.cache)
        fed = encoded.fed(ids, mask, first)
        drawn = self.inputs.all(fed[self.layout.ids], mask, 0)
        return tuple(
            fed.get(value.name, each) for value, each in zip(graph.inputs, drawn, strict=True)
        )


_LONGEST_CHUNK = 300  # tokens without a cache, in which the eager model is run


def _around_chunks(graph: Graph, layout: Layout, first: int, most: int) -> set[int]:
    """Lengths on both sides of the chunks that a model with states computes a prompt by."""
    if not layout.states:
        return set()
    dims = (dim for node in graph for value in node.outputs for dim in value.shape)
    sizes = {*sizes_around(dims), *(layout.piece + n for n in (0, 1) if layout.piece)}
    return {n for n in sizes if first <= n <= min(most, _LONGEST_CHUNK)}


class _InPieces(torch.nn.Module):
    """A graph with states that takes some tokens a call, run on all of them from the first on."""

    def __init__(self, evaluated: torch.nn.Module, graph: Graph, layout: Layout) -> None:
        super().__init__()
        self.evaluated, self.layout = evaluated, layout
        self.inputs = [value.name for value in graph.inputs]
        self.outputs = graph.output_names

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        layout, given = self.layout, dict(zip(self.inputs, tensors, strict=True))
        ids, mask = given[layout.ids], given.get(layout.mask or "")
        results: tuple[Any, ...] = ()
        for start, stop in pieces(0, ids.shape[1], layout.piece):
            given[layout.ids] = ids[:, start:stop]
            if mask is not None and layout.mask is not None:
                given[layout.mask] = mask[:, 0 if layout.past else start : stop]
            results = self.evaluated(*(given[name] for name in self.inputs))
            present = dict(zip(self.outputs, results, strict=True))
            given.update(
                (past, present[name])
                for past, name in zip(layout.pasts, layout.presents, strict=True)
            )
        return results


def _attending(
    graph: Graph, inputs: Sequence[torch.Tensor], cache: Cache
) -> tuple[torch.Tensor, ...]:
    """Inputs of a graph with those in a cache's memory."""
    memory = cache.memory if isinstance(cache, GrowingCache) else cache.slots.memory
    pairs = zip(graph.inputs, inputs, strict=True)
    return tuple(
        tensor
        if value.name not in memory
        else each
        if isinstance(each := memory[value.name], torch.Tensor)
        else to_torch(each, value.dtype)
        for value, tensor in pairs
    )
