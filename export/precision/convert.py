"""A float32 graph rewritten to a half dtype, as a plan says; the graph it is made of stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from attngraph.analysis.walks import made_of
from attngraph.export.formats import Precision
from attngraph.export.precision.policy import (
    FOLLOWS,
    TAKES,
    Group,
    Plan,
    fits_numbers,
    group_of,
    holds,
    narrows,
    narrows_scores,
)
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.loc import UNKNOWN, Loc
from attngraph.ir.ops import input_of
from attngraph.ir.storage import address_of, identity_of, place_of
from attngraph.ir.traits import CAST, CHOICE, EMBEDDING, INDEX, JOIN, LAYOUT

_PASTS = ("past_key", "past_value")
_NAMES: dict[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_STORED_FROM = 256  # elements; smaller constants gain nothing from a half dtype


@dataclass(frozen=True)
class Converted:
    """The new graph; `halves` counts the nodes of each group that compute in the half dtype.

    `notes` are sentences on attentions that stay in float32 because of their masks.
    """

    graph: Graph
    halves: Counter[Group]
    notes: list[str]


def own_precision(graph: Graph) -> Precision:
    """The precision of most of the weights of a captured graph; of its inputs, without weights."""
    sizes: Counter[torch.dtype] = Counter()
    values = [v for v in graph.constants.values() if isinstance(v.type, TensorType)]
    for value in values or graph.inputs:
        if isinstance(value.type, TensorType) and value.dtype.is_floating_point:
            static = [dim for dim in value.shape if isinstance(dim, int)]
            sizes[value.dtype] += torch.Size(static).numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return _NAMES.get(most, "fp32")


def half_inside(graph: Graph) -> tuple[Precision, frozenset[int]] | None:
    """The coarsest half that some nodes compute in, as under torch.autocast, and the positions of
    the outputs that come of these nodes; None without any.

    A half that is only stored or moved isn't computed in.
    """
    computed = [
        value
        for node in graph
        for value in node.outputs
        if isinstance(value.type, TensorType)
        and value.dtype in _NAMES
        and node.op not in LAYOUT | CAST | JOIN | CHOICE | INDEX | EMBEDDING
    ]
    if not computed:
        return None
    coarsest = max((value.dtype for value in computed), key=lambda dtype: torch.finfo(dtype).eps)
    halves = set(computed)
    reached = [at for at, out in enumerate(graph.outputs) if halves & {*made_of(out)}]
    return _NAMES[coarsest], frozenset(reached)


def stored_bytes(graph: Graph) -> int:
    """The bytes of a graph's constants; memory that several share counts once."""
    sizes = {}
    for value in graph.constants.values():
        if value.data is not None:
            sizes[identity_of(value.data)] = value.data.nbytes
    return sum(sizes.values())


def convert(
    graph: Graph, plan: Plan, weights: dict[Hashable, torch.Tensor] | None = None
) -> Converted:
    """The graph with what the plan allows in its half dtype.

    Inputs and outputs keep their dtypes, with a cast at the edge, except a cache: pasts that only
    attentions read, and their presents, are of the half dtype. Values of other dtypes than float32
    are left alone. `weights` keeps converted weights from one conversion of a graph to the next.
    """
    return _Conversion(graph, plan, {} if weights is None else weights).run()


class _Conversion:
    def __init__(self, graph: Graph, plan: Plan, weights: dict[Hashable, torch.Tensor]) -> None:
        self.old, self.plan, self.weights = graph, plan, weights
        self.new = Graph(graph.name)
        self.halves: Counter[Group] = Counter()
        self.notes: list[str] = []
        self.is_half: set[Value] = set()  # values of the old graph that are half in the new one
        self.made: dict[tuple[Value, torch.dtype], Value] = {}
        self.here: Node | None = None

    def run(self) -> Converted:
        half_nodes = {node for node in self.old if self._decide(node)}
        caches = self._caches(half_nodes)
        self.new.dims = dict(self.old.dims)
        for value in self.old.inputs:
            kind = value.type
            if value in caches:
                kind = TensorType(self.plan.dtype, value.shape)
                self.is_half.add(value)
            self.made[value, _dtype(value, self.is_half, self.plan)] = self.new.add_input(
                value.name, kind
            )
        for node in self.old:
            self._rebuild(node, node in half_nodes)
        outputs = []
        self.here = None
        presents = _presents(half_nodes, caches)
        for value in self.old.outputs:
            kept = self.plan.dtype if value in presents else _plain(value)
            outputs.append(self._as(value, kept))
        self.new.set_outputs(outputs, self.old.output_names)
        return Converted(self.new, self.halves, self.notes)

    def _decide(self, node: Node) -> bool:
        """Whether a node computes in half, given what was decided of those before it."""
        half = self._may(node)
        if half:
            self.is_half.update(value for value in node.outputs if _is_single(value))
            if any(_is_single(value) for value in node.outputs):
                self.halves[group_of(node)] += 1
        return half

    def _may(self, node: Node) -> bool:
        if group_of(node) in self.plan.keep or not any(map(_is_single, node.outputs)):
            return False
        if self.plan.provider == "cpu":
            return node.op == "aten.embedding" and self._held(node)
        if not fits_numbers(node, self.plan.dtype) or not self._held(node):
            return False
        if node.op in TAKES:
            return self._takes(node)
        if node.op not in FOLLOWS:
            return False
        singles = [value for value in node.operands if _is_single(value)]
        if not any(value in self.is_half for value in singles):
            return False
        return all(v in self.is_half or narrows(v, self.plan.dtype) for v in singles)

    def _held(self, node: Node) -> bool:
        constants = [v for v in node.operands if _is_single(v)]
        return all(v.data is None or holds(v.data, self.plan.dtype) for v in constants)

    def _takes(self, node: Node) -> bool:
        if node.op == "attn.attention":
            biases = [input_of(node, "bias")]
        elif node.op == "aten.scaled_dot_product_attention":
            mask = input_of(node, "attn_mask")
            biases = [mask if mask is not None and _is_single(mask) else None]
        else:
            return True
        for bias in biases:
            if bias is None or bias in self.is_half or narrows_scores(bias, self.plan.dtype):
                continue
            name = str(self.plan.dtype).removeprefix("torch.")
            self.notes.append(
                f"The attention at {node.loc} stays in float32: its mask is added to the scores, "
                f"and may hold fills too large for {name}. A bool mask has none."
            )
            return False
        return True

    def _caches(self, half_nodes: set[Node]) -> set[Value]:
        """Float inputs that are read as pasts of attentions in half, and by nothing else."""
        found = set()
        for value in self.old.inputs:
            if not _is_single(value) or not value.uses or value in self.old.outputs:
                continue
            if all(node in half_nodes and _is_past(node, value) for node in value.users):
                found.add(value)
        return found

    def _rebuild(self, node: Node, half: bool) -> None:
        self.here = node
        dtype = self.plan.dtype if half else torch.float32
        inputs: list[Value | None] = []
        for value in node.inputs:
            if value is None or not _is_single(value):
                inputs.append(None if value is None else self._other(value))
            else:
                inputs.append(self._as(value, dtype))
        types = [
            TensorType(dtype, value.shape) if _is_single(value) else value.type
            for value in node.outputs
        ]
        names = [value.name for value in node.outputs]
        twin = self.new.create(node.op, inputs, node.attrs, types=types, names=names, loc=node.loc)
        for value, output in zip(node.outputs, twin.outputs, strict=True):
            self.made[value, dtype if _is_single(value) else _plain(value)] = output

    def _other(self, value: Value) -> Value:
        """A value that isn't float32, as it is."""
        key = (value, _plain(value))
        if key not in self.made:
            self.made[key] = self.new.add_constant(value.name, value.data, value.type)
        return self.made[key]

    def _as(self, value: Value, dtype: torch.dtype) -> Value:
        """A value of the old graph in that dtype, cast or converted once."""
        key = (value, dtype)
        if key in self.made:
            return self.made[key]
        if value.is_constant:
            self.made[key] = self._constant(value, dtype)
        else:
            other = self.made[value, _dtype(value, self.is_half, self.plan)]
            self.made[key] = other if other.dtype == dtype else self._cast(other, dtype)
        return self.made[key]

    def _constant(self, value: Value, dtype: torch.dtype) -> Value:
        if not _is_single(value):
            return self._other(value)
        if dtype == self.plan.dtype:
            return self._half_constant(value)
        if self._is_stored(value):
            half = self.made.get((value, self.plan.dtype)) or self._half_constant(value)
            self.made[value, self.plan.dtype] = half
            return self._cast(half, dtype)
        return self.new.add_constant(value.name, value.data, value.type)

    def _is_stored(self, value: Value) -> bool:
        """Whether a weight that is computed with in float32 is stored in half, as on the CPU."""
        if self.plan.provider != "cpu" or value.data is None or len(value.shape) < 2:
            return False
        kept = any(group_of(node) in self.plan.keep for node in value.users)
        large = value.data.numel() >= _STORED_FROM
        return large and not kept and holds(value.data, self.plan.dtype)

    def _half_constant(self, value: Value) -> Value:
        data = value.data
        if data is not None:
            key = (place_of(data), self.plan.dtype)
            known = self.weights.get(key) if address_of(data) else None
            if known is None:
                known = data.detach().to(self.plan.dtype)
                self.weights[key] = known
            data = known
        return self.new.add_constant(value.name, data, TensorType(self.plan.dtype, value.shape))

    def _cast(self, value: Value, dtype: torch.dtype) -> Value:
        loc: Loc = self.here.loc if self.here is not None else UNKNOWN
        types = [TensorType(dtype, value.shape)]
        return self.new.create(
            "aten._to_copy", [value], {"dtype": dtype}, types=types, names=[value.name], loc=loc
        ).output


def _is_single(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype == torch.float32


def _plain(value: Value) -> torch.dtype:
    """The dtype that a value has in the old graph; that of a number only serves as a key."""
    return value.dtype if isinstance(value.type, TensorType) else torch.int64


def _dtype(value: Value, halves: set[Value], plan: Plan) -> torch.dtype:
    return plan.dtype if value in halves else _plain(value)


def _is_past(node: Node, value: Value) -> bool:
    if node.op != "attn.attention":
        return False
    reads = [v for v in node.inputs if v is value]
    return len(reads) == sum(input_of(node, name) is value for name in _PASTS)


def _presents(half_nodes: set[Node], caches: set[Value]) -> set[Value]:
    """All keys and values that attentions with such pasts return."""
    found: set[Value] = set()
    for node in half_nodes:
        if node.op == "attn.attention" and input_of(node, "past_key") in caches:
            found.update(node.outputs[-2:])
    return found
