"""What is written into a part of a tensor, as a tensor with that part replaced.

`table[:, i, :i] = row` writes into a view of a view. Here a write makes a new value of the part,
and of each tensor up to the one that owns the memory: by slice_scatter for a slice, and
select_scatter for a row. What reads a view later reads the same view of the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from attngraph.ir.ops import op_name
from attngraph.ir.traits import PERMUTE, SLICE, SPLIT

_aten = torch.ops.aten
Twin = Callable[[fx.Node], torch._ops.OpOverload | None]
"""The operator that computes what an in-place one writes; None where there is none."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_SCATTERS: dict[Any, torch._ops.OpOverload] = {
    _aten.select.int: _aten.select_scatter.default,
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
    _aten.narrow.default: _aten.slice_scatter.default,
}
"""For a view, what replaces it in the tensor that it is of. The same arguments are behind both, but
for narrow, which has a length in the place of an end."""
_INVERSES: dict[Any, torch._ops.OpOverload] = {
    _aten.transpose.int: _aten.transpose.int,
    _aten.unsqueeze.default: _aten.squeeze.dim,
}
"""For a view of every element, what takes it back, with the same arguments."""


@dataclass
class Owned:
    """The nodes that share one memory. `owner` made it; of every other one `sources` has the node
    that it is a view of, or writes into."""

    owner: fx.Node
    sources: dict[fx.Node, fx.Node]
    writes: dict[fx.Node, torch._ops.OpOverload]
    _current: fx.Node = field(init=False)
    _version: int = field(default=0, init=False)
    _known: dict[str, tuple[int, fx.Node]] = field(default_factory=dict, init=False)
    """By the way from the owner, the version that a view was last seen at, and its value there."""

    def __post_init__(self) -> None:
        self._current = self.owner

    def way(self, node: fx.Node) -> list[fx.Node]:
        """The views from a node to the owner, without what is written into them on the way."""
        found = []
        while node is not self.owner:
            if node not in self.writes:
                found.append(node)
            node = self.sources[node]
        return found

    def meet(self, view: fx.Node) -> None:
        """The trace comes to a view, which is one of what its source is now."""
        if self._known.get(self._place(view), (-1, view))[0] != self._version:
            self._known[self._place(view)] = self._version, view

    def _place(self, view: fx.Node) -> str:
        """A text that is equal for views taken of the owner in the same way."""
        return " ".join(f"{each.target}{each.args[1:]}{each.kwargs}" for each in self.way(view))

    def now(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """What a node's tensor holds when the node `before` runs."""
        value = self._current
        for view in reversed(self.way(node)):
            version, known = self._known.get(self._place(view), (-1, view))
            if version != self._version:
                known = _made(before, view.target, (value, *view.args[1:]), view)
                self._known[self._place(view)] = self._version, known
            value = known
        return value

    def write(self, node: fx.Node) -> None:
        """Makes the new value of a part, and of every tensor that the part is of."""
        way = self.way(node)
        part = way[0] if way else self.owner
        value = self.now(part, node)
        if self.writes[node] is _aten.copy.default and node.args[1] is value:
            return  # `part += x` in Python writes back what it holds already
        value = _made(node, self.writes[node], (value, *node.args[1:]), part, node)
        value.kwargs = node.kwargs
        for view, source in zip(way, [*way, self.owner][1:], strict=True):
            if view.target in _SCATTERS:
                given = (self.now(source, node), value, *_place(view, node))
                value = _made(node, _SCATTERS[view.target], given, source, node)
            else:
                value = _made(node, _INVERSES[view.target], (value, *view.args[1:]), source, node)
        self._current = value
        self._version += 1


def _made(
    before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node, at: fx.Node | None = None
) -> fx.Node:
    """A node of the shape that another one has, and of the same line, or of that of `at`."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, {} if at else dict(like.kwargs))
    made.meta = {**(at or like).meta, "val": like.meta.get("val")}
    return made


def _place(view: fx.Node, before: fx.Node) -> tuple[Any, ...]:
    """Where a view lies in its source, as the arguments of what replaces it there."""
    if view.target is not _aten.narrow.default:
        return view.args[1:]
    given: Sequence[Any] = view.args[1:]
    axis, start, length = given
    if start == 0:
        return axis, start, length
    if not isinstance(length, fx.Node):
        return axis, start, start + length
    with before.graph.inserting_before(before):
        end = before.graph.call_function(operator.add, (start, length))
    end.meta = {**before.meta, "val": start + length.meta["val"]}
    return axis, start, end


def _is_told(view: fx.Node) -> bool:
    """Whether what replaces a view is known; a narrow's start may be counted from the end."""
    if view.target is _aten.narrow.default:
        start = view.args[2]
        return isinstance(start, int) and start >= 0
    return view.target in _SCATTERS or view.target in _INVERSES


def replace_written(graph: fx.Graph, groups: Iterable[Sequence[fx.Node]], twin: Twin) -> None:
    """Has what is written into parts of these groups, each of one memory, give new values.

    A group stays as it is where that can't be told: if an input or a buffer owns the memory, if the
    part is another kind of view, or if an operator before the last write may return a copy.
    """
    owned = {}
    for each in groups:
        group = _with_rows_selected(each)
        if (found := _owned(group, twin)) is not None:
            owned.update(dict.fromkeys(group, found))
    if not owned:
        return
    for node in list(graph.nodes):
        mine = owned.get(node)
        is_write = mine is not None and node in mine.writes

        def now(other: fx.Node, node: fx.Node = node) -> fx.Node:
            return owned[other].now(other, node) if other in owned else other

        kept = node.args[:1] if is_write else ()
        node.args = (*kept, *fx.map_arg(node.args[len(kept) :], now))
        node.kwargs = fx.map_arg(node.kwargs, now)
        if mine is not None and is_write:
            mine.write(node)
        elif mine is not None and node is not mine.owner:
            mine.meet(node)
    for node in reversed(list(graph.nodes)):
        if node in owned and node in owned[node].writes:
            graph.erase_node(node)


def _with_rows_selected(group: Sequence[fx.Node]) -> list[fx.Node]:
    """The group with each row of `unbind` taken by itself, which is a view that can be replaced.

    torch's own functionalization makes constants of the sizes where such a row is written to.
    """
    unbound = [node for node in group if node.target is _aten.unbind.int]
    for node in unbound:
        source, axis = (*node.args, *node.kwargs.values(), 0)[:2]
        for row in list(node.users):
            row.target, row.args = _aten.select.int, (source, axis, row.args[1])
        node.graph.erase_node(node)
    return [node for node in group if node not in unbound]


def _owned(group: Sequence[fx.Node], twin: Twin) -> Owned | None:
    """None for a group in which no part is written to, or none that can be followed."""
    members = set(group)
    writing = [node for node in group if _is_in_place(node)]
    if not writing or any(node.op != "call_function" for node in group):
        return None
    last = group.index(writing[-1])
    owner, *others = [node for node in group if not members & set(node.all_input_nodes)]
    if others or not isinstance(owner.meta.get("val"), torch.Tensor):
        return None
    sources: dict[fx.Node, fx.Node] = {}
    writes: dict[fx.Node, torch._ops.OpOverload] = {}
    for at, node in enumerate(group):
        if node is owner:
            continue
        first = node.args[0] if node.args else None
        if at > last:  # a copy is as good as a view then
            first = next(each for each in node.all_input_nodes if each in members)
        elif first not in members or not (_is_in_place(node) or _is_view(node)):
            return None
        assert isinstance(first, fx.Node)
        sources[node] = first
        if _is_in_place(node):
            found = twin(node)
            if found is None:
                return None
            writes[node] = found
    made = Owned(owner, sources, writes)
    views = {view for node in writes for view in made.way(node)}
    if not views or not all(map(_is_told, views)):
        return None  # where all is written into the whole, the twin alone will do
    return made


def _is_in_place(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether it is a view of its first argument alone, whatever the sizes are."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.kwargs:
        return False
    first, *_ = node.target._schema.arguments
    if first.alias_info is None or node.target is _aten.as_strided.default:
        return False  # strides are of the memory, which a value doesn't keep
    # What torch writes in terms of others may copy, as reshape and contiguous do.
    is_composite = node.target.has_kernel_for_dispatch_key(_COMPOSITE)
    return not is_composite or op_name(node.target) in PERMUTE | SPLIT | SLICE
