"""Which softmaxes may have windows, and the windows that are read alike at all of some sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from attngraph.analysis.attention.window_reader import WindowReader
from attngraph.analysis.attention.windows import Below, Windows, read_product
from attngraph.analysis.layout.digits import UnreadError
from attngraph.analysis.values.scalars import fill_of, is_cast, scale_of
from attngraph.analysis.walks import ahead, walk
from attngraph.errors import IRError
from attngraph.ir import Node, Value
from attngraph.ir.hashing import structure
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.storage import identity_of
from attngraph.ir.traits import (
    ADDITIVE,
    CHOICE,
    GATHER,
    JOIN,
    LAYOUT,
    MULTIPLICATION,
    PAD,
    SCATTER,
    SOFTMAX,
    SUM,
    UNFOLD,
)

_MOST = 1 << 20  # elements that are followed at once
_ROWS = 16  # of scores, by which most that are none are told
_FEW = 1 << 16  # of a layout that was followed before
_FAILURES = (UnreadError, IRError, LookupError, RuntimeError, TypeError, ValueError)
_SHOWN = 16  # elements of a constant that tell a layout from others
_APART = SCATTER | PAD | JOIN | GATHER | UNFOLD  # that no reading of whole axes follows
_MOVES = LAYOUT | _APART
_THROUGH = _MOVES | ADDITIVE | CHOICE | MULTIPLICATION


def may_be_windows(softmax: Node) -> bool:
    """Whether elements of queries, keys or their products change places before a softmax over a
    number of them.
    """
    scores = softmax.inputs[0] if softmax.op in SOFTMAX else None
    if scores is None or len(scores.shape) < 2:
        return False
    count = scores.shape[attribute(softmax, "dim")]
    if not isinstance(count, int) or count < 2:
        return False

    def above(place: tuple[Value, bool]) -> Iterable[tuple[Value, bool]]:
        """The sources of a value, which is a score or, past a product, of a query or key."""
        value, is_score = place
        node = value.producer
        if node is None:
            return ()
        if is_score and (product := read_product(node)) is not None:
            return [(side.value, False) for side in product[0].sides]
        passes = node.op in (_THROUGH if is_score else _MOVES)
        return [(source, is_score) for source in node.operands] if passes else ()

    found = list(walk([(scores, True)], above, limit=None))
    makers = [(node, is_score) for value, is_score in found if (node := value.producer) is not None]
    has_product = any(is_score and read_product(node) for node, is_score in makers)
    return has_product and any(node.op in _APART for node, _ in makers)


def read_windows(
    softmax: Node, sizes: Sequence[Mapping[str, int]], known: set[Hashable]
) -> Windows | None:
    """The windows that are read alike at all `sizes` of the graph's dims; None if they aren't.

    `known` are layouts that were read of many elements, as those of the layers of a model are after
    the first; of others few are enough.
    """
    if not may_be_windows(softmax) or (below := _below(softmax)) is None:
        return None
    if not sizes or not _moves(softmax, below, sizes[0]):
        return None
    found = _alike(softmax, below, sizes, _FEW)
    if found is None or (layout := _layout(found)) in known:
        return found
    found = _alike(softmax, below, sizes, _MOST)
    if found is not None:
        known.add(layout)
    return found


def _moves(softmax: Node, below: Below, sizes: Mapping[str, int]) -> bool:
    """Whether in a few rows the keys along the window move with the query, as few do that are read
    from a cache or turned in halves.
    """
    try:
        return WindowReader(softmax, below, sizes, _ROWS).moves()
    except _FAILURES:
        return False


def _alike(
    softmax: Node, below: Below, sizes: Sequence[Mapping[str, int]], most: int
) -> Windows | None:
    """Read at the first of the sizes, and found again at the others."""
    try:
        found = WindowReader(softmax, below, sizes[0], most).read()
        is_so = all(WindowReader(softmax, below, at, most).has(found) for at in sizes[1:])
    except _FAILURES:
        return None
    return found if is_so else None


def _layout(found: Windows) -> Hashable:
    """Equal for windows between which nothing differs but the names of what is computed."""
    ends = [*found.cleared, found.value.value]
    ends += [end.value for each in found.scores for end in (each.query, each.key) if end]
    leaves, nodes = backward_slice([found.root.output], {*ends}.__contains__)
    number = {value: place for place, value in enumerate(leaves)}
    head = tuple((value.type, value in ends, _content(value)) for value in leaves)
    return head, structure(nodes, number)


def _content(value: Value) -> Hashable:
    data = value.data
    if data is None or data.is_meta:
        return None
    if data.numel() > _SHOWN:
        return identity_of(data)
    return tuple(data.flatten().tolist())


def _below(softmax: Node) -> Below | None:
    """The product with the values; None where the weights are read in another way too."""
    chain, cleared, gain = [softmax], list[Value](), 1.0
    dim = attribute(softmax, "dim") % len(softmax.output.shape)
    while len(users := list(dict.fromkeys(chain[-1].output.users))) == 1:
        node, weights = users[0], chain[-1].output
        if (scaling := scale_of(node)) is not None and scaling[0] is weights:
            gain *= scaling[1]
        elif (filling := fill_of(node)) is not None and filling[0] is weights and filling[3] == 0:
            predicate, keeps = filling[1], filling[2]
            is_of_rows = len(predicate.shape) == len(weights.shape) and predicate.shape[dim] == 1
            if keeps or not is_of_rows:
                return None
            cleared.append(predicate)
        elif not is_cast(node):
            break
        chain.append(node)
    roots = dict.fromkeys(
        user
        for value in ahead(chain[-1].output, lambda node: node.op in _MOVES, None)
        for user in value.users
    )
    ends = [_summed(node) for node in roots if node.op not in _MOVES]
    if len(ends) != 1 or read_product(ends[0]) is None or softmax.graph is None:
        return None
    returned = {*softmax.graph.outputs}
    inner = [*chain, *(node for node in roots if node.op in _MOVES)]
    if any(value in returned for node in inner for value in node.outputs):
        return None
    return Below(ends[0], tuple(chain), tuple(cleared), gain)


def _summed(node: Node) -> Node:
    """The sum over a product of elements, where that is all that reads it."""
    users = dict.fromkeys(node.output.users) if node.op == "aten.mul.Tensor" else ()
    return next((user for user in users if user.op in SUM), node) if len(users) == 1 else node
