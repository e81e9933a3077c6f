"""The lengths at which a decoder's tables, masks or branches change, read from its graph.

What a cache holds of a token must not depend on the tokens after it. A softmax or a norm can't make
it do so in a causal model, but what is computed from positions, masks and sizes alone can: LongRoPE
turns *all* keys by other angles once the sequence is longer than a limit. That part of the graph,
which no token id and no past reaches, is small. So it is evaluated for the same tokens in sequences
of T and T + 1, at each length that a number in it may single out: next to every constant, where a
predicate changes its value, and at powers of two. Where it differs, the whole graph is run both
ways, for a difference that cancels, as a shift of all scores of a row does, is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.decoding.placing import LONGEST, POWERS, WINDOW, Placing, around, cut
from attngraph.errors import ParityError
from attngraph.frontend.families.cache import Layout
from attngraph.ir import Graph, Value, interpret
from attngraph.ir.dims import substitute

# Of a model that is run on all tokens, once a step: of several rows, and of one row beyond.
_LONGEST_RUN, _OPERATIONS = 512, 4e11
_ONE_ROW, _SCORES = 4e10, 1 << 26


@dataclass(frozen=True)
class Lengths:
    """`switches`: what a cache of up to so many tokens holds is of no use to a longer sequence.

    Behind `last` tokens that is so at each length, as far as can be told. `most` is how many tokens
    a table has rows for, `most_positions` the same of tables that are indexed by positions, which
    padding doesn't count in. `singled_out` are all lengths at which something changes.
    """

    singled_out: tuple[int, ...] = ()
    switches: tuple[int, ...] = ()
    last: int | None = None
    most: int | None = None
    most_positions: int | None = None

    def told(self, layout: Layout) -> Layout:
        """What a decoder's file says of them."""
        return replace(
            layout,
            switches=self.switches,
            last=self.last,
            most=self.most,
            most_positions=self.most_positions,
        )

    def require_told(self, layout: Layout, file: str, source: str) -> None:
        """Raises ParityError where a decoder's file says otherwise."""
        names = ("switches", "last", "most", "most_positions")
        found = [(name, getattr(layout, name), getattr(self, name)) for name in names]
        if other := [(name, said, true) for name, said, true in found if said != true]:
            raise ParityError(
                f"{file} and {source} keep their caches differently: the file has "
                f"{', '.join(f'{name}={said}' for name, said, _ in other)}, and the model has "
                f"{', '.join(f'{name}={true}' for name, _, true in other)}. Compile it again."
            )

    def end(self, graph: Graph, layout: Layout) -> int:
        """The longest sequence that steps can reach."""
        high = graph.dims[layout.past].high if layout.past else None
        ends = (self.last, self.most, self.most_positions, layout.max_length, high)
        return min([LONGEST, *(end for end in ends if end is not None)])

    def across(self, graph: Graph, layout: Layout) -> list[tuple[int, int, int]]:
        """(batch, seq, past) of steps to and behind each length, and of a part of a prompt across.

        As many rows as there is room for the past of.
        """
        found = []
        for length in self.singled_out:
            for batch, seq, past in ((12, 1, length - 1), (12, 1, length), (1, 13, length - 6)):
                size = bytes_of_past(graph, layout, max(past, 0))
                rows = min(batch, room_for_past(graph) // max(size, 1))
                if past >= 0 and rows and past + seq <= self._rows(layout):
                    found.append((rows, seq, past))
        return found

    def notes(self, graph: Graph, layout: Layout) -> list[str]:
        """Notes on the lengths beyond which no step, and no generated token, is checked."""
        room, notes = room_for_past(graph), []
        far = [n for n in self.singled_out if bytes_of_past(graph, layout, n) > room]
        if far:
            notes.append(
                f"Steps at {_listed(far)} tokens, where something changes or ends, are not "
                "checked: a cache of so many is large beside the weights."
            )
        reached = {*self.far(graph, layout), *far}
        if alone := [n for n in self.singled_out if n > _LONGEST_RUN and n not in reached]:
            notes.append(
                f"Steps at {_listed(alone)} tokens, where something changes or ends, are checked "
                "from a drawn cache, and not from the decoder's own: running the whole model on so "
                "many would take too long."
            )
        return notes

    def steps(self, graph: Graph, layout: Layout, rows: int, first: int) -> set[int]:
        """The lengths on both sides of each change that `rows` can be run at without a cache."""
        weights = sum(math.prod(map(int, value.shape)) for value in graph.constants.values())
        end, found = self.end(graph, layout), set()
        for length in self.singled_out:
            near = {n for n in range(length - 1, length + 3) if first <= n <= end}
            if length <= _LONGEST_RUN and 2 * weights * rows * sum(near) <= _OPERATIONS:
                found |= near
        return found

    def far(self, graph: Graph, layout: Layout) -> dict[int, list[int]]:
        """The same, by the change or the end of a table, behind those, at which one row is run."""
        weights = sum(math.prod(map(int, value.shape)) for value in graph.constants.values())
        end, found = self.end(graph, layout), {}
        token = [*_shapes_of_past(graph, layout, 1).values()]
        width = sum(map(math.prod, token))
        heads = max((math.prod(shape[:-1]) for shape in token), default=1)
        for change in self.singled_out:
            near = [n for n in range(change - 1, change + 3) if n <= end]
            operations = 2 * sum(n * (weights + n * width) for n in near)
            is_small = operations <= _ONE_ROW and heads * change**2 <= _SCORES
            if change > _LONGEST_RUN and len(near) > 1 and is_small:
                found[change] = near
        return found

    def _rows(self, layout: Layout) -> int:
        ends = (self.most, self.most_positions, layout.max_length)
        return min([LONGEST, *(end for end in ends if end is not None)])


def lengths_of(graph: Graph, layout: Layout) -> Lengths:
    """Derived from the graph as captured; its past may be empty.

    What keeps states alone, of one size, has no places to count.
    """
    if not layout.past:
        return Lengths()
    part = Placing(graph, layout)
    limits = list(part.tables())
    most = min((rows for rows, by_position in limits if not by_position), default=None)
    most_positions = min((rows for rows, by_position in limits if by_position), default=None)
    bounds = [LONGEST, most or LONGEST, most_positions or LONGEST]
    if (high := graph.dims[layout.past].high) is not None:
        bounds.append(high)
    if layout.max_length is not None:
        bounds.append(layout.max_length)
    longest = min(bounds)
    flips = part.flips(longest)
    stepped = part.numbers(longest, only_limits=True)
    written = around([*flips, *part.numbers(longest)], longest)
    tried = sorted({1, *written, *(power for power in POWERS if power < longest)})
    changing = _changing(part, graph, layout, tried)
    switches, last = _sorted_out(changing, tried, longest)
    ends = [bound for bound in (most, most_positions) if bound is not None and bound <= longest]
    found = {*flips, *stepped, *switches, *ends, *([] if last is None else [last])}
    singled_out = tuple(sorted(length for length in found if 2 <= length <= longest))
    return Lengths(singled_out, switches, last, most, most_positions)


def bytes_of_past(graph: Graph, layout: Layout, length: int) -> int:
    """Bytes of a growing cache of one row."""
    shapes = _shapes_of_past(graph, layout, length)
    return sum(math.prod(shape) * value.dtype.itemsize for value, shape in shapes.items())


def _shapes_of_past(graph: Graph, layout: Layout, length: int) -> dict[Value, list[int]]:
    sizes = {layout.batch: 1, layout.past: length}
    pasts = [value for value in graph.inputs if value.name in layout.pasts]
    return {value: [int(substitute(dim, sizes)) for dim in value.shape] for value in pasts}


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def room_for_past(graph: Graph) -> int:
    """The most bytes of a cache that are tried: a quarter of the weights', or 64 MiB."""
    weights = (value.data for value in graph.constants.values() if value.data is not None)
    return max(1 << 26, sum(data.numel() * data.element_size() for data in weights) // 4)


def _sorted_out(
    changing: Sequence[int], tried: Sequence[int], longest: int
) -> tuple[tuple[int, ...], int | None]:
    """(the lengths that stand alone, the first from which they don't).

    One stands alone if the lengths tried just before and behind it are none. Of more than two that
    do, as multiples of a number are, the next is not known.
    """
    if not changing:
        return (), None
    known, known_tried = set(changing), set(tried)
    alone = [
        length
        for length in changing
        if not {length - 1, length + 1} & known
        and (length + 1 in known_tried or length + 1 >= longest)
    ]
    if alone == [*changing] and len(alone) <= 2:
        return tuple(alone), None
    return (), changing[0]


def _changing(part: Placing, graph: Graph, layout: Layout, tried: Sequence[int]) -> list[int]:
    """The lengths T for which a cache of T tokens holds something else than the same tokens do in
    a sequence of T + 1."""
    harmless: set[Value] = set()
    found = []
    for length in tried:
        differing = part.differing(length)
        if not differing or differing <= harmless:
            continue
        if bytes_of_past(graph, layout, length) > room_for_past(graph):
            found.append(length)  # too large to be run
        elif _presents_differ(part, graph, layout, length):
            found.append(length)
        else:
            harmless |= differing
    return found


def _presents_differ(part: Placing, graph: Graph, layout: Layout, length: int) -> bool:
    """Whether keys and values of the same tokens differ, in sequences of `length` and one more."""
    past = max(length - WINDOW, 0)
    places = [graph.output_names.index(name) for name in layout.growing.values()]
    short, long = (
        interpret(graph, [part.input(value, total - past, past) for value in graph.inputs])
        for total in (length, length + 1)
    )
    for place in places:
        a, b = short[place], long[place]
        b = cut(b, a.shape)
        scale = float(b.abs().max()) if b.numel() else 0.0
        tolerance = 64 * torch.finfo(a.dtype).eps * scale
        if not bool(((a - b).abs() <= tolerance).all()):
            return True
    return False
