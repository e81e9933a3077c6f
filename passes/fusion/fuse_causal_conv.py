"""fuse-causal-conv: a short convolution of each channel that looks back becomes one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.analysis.layout.moves import Cut, Permuted, move_of
from attngraph.analysis.values.matching import only_read_by
from attngraph.analysis.values.scalars import uniform
from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value
from attngraph.ir.dead import erase_dead
from attngraph.ir.dims import as_dim, same, same_shape
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import CONVOLUTION, JOIN, MULTIPLICATIVE, PAD, PERMUTE, RESHAPE, SUM
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LOGITS

_KERNELS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EINSUM = "aten.einsum"


class FuseCausalConv(GraphPass, name="fuse-causal-conv", exact=True):
    """Reads where each place of a convolution over time looks, whatever puts zeros before it.

    Of y[t] = Σ_j w_j z[t + j·d − p], z being x behind L places of zeros or of a state, and of the
    cut of y from place s on, place t reads x up to t + s + (k − 1)·d − p − L. It is causal where
    that is t, and as long as x: `F.pad` and a convolution, padding on both sides and a cut, a state
    that is joined to x. The state may be longer than the convolution reaches. SiLU behind it, and
    the cut of the joined places that is the next state, are part of the op. A step of one place is
    often written without a convolution, as the sum over the joined places times a weight for each
    channel and place. What looks ahead, or mixes channels, stays.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LOGITS)
        for node in list(graph):
            if node.graph is graph and node.op in CONVOLUTION:
                _fuse(graph, checked, node)
            elif node.graph is graph and (node.op in SUM or node.op == _EINSUM):
                _fuse_step(graph, checked, node)
        return checked.remarks


@dataclass(frozen=True)
class _Before:
    """What a convolution reads: x behind `length` places of zeros or of a `state`, and `joined`,
    the value that has both. With an `order` it reads these permuted so, and no cut of `joined` is
    the next state.
    """

    x: Value
    length: int
    state: Value | None = None
    joined: Value | None = None
    order: tuple[int, ...] | None = None

    @property
    def places(self) -> Dim:
        """How many x has."""
        return self.x.shape[2 if self.order is None else self.order[2]]


def _fuse(graph: Graph, checked: Checked, node: Node) -> None:
    z, weight, bias = inputs_of(node, "input", "weight", "bias")
    if len(z.shape) != 3 or len(weight.shape) != 3:
        return
    padding, dilation = _padding(node), _one(attribute(node, "dilation"))
    if padding is None or dilation is None or _one(attribute(node, "stride")) != 1:
        return
    if z.dtype not in _KERNELS or attribute(node, "groups") != z.shape[1]:
        return
    width = weight.shape[2]
    if not same(weight.shape[0], z.shape[1]) or not isinstance(width, int) or width < 2:
        return
    reach = (width - 1) * dilation
    for before in _befores(z):
        start = before.length + padding - reach  # of the cut
        if start >= 0 and (before.state is None or before.length >= reach):
            found = _cuts(node.output, start, before.places)
            if found:
                _write(graph, checked, node, before, found[0], weight, bias, dilation)
                return


def _fuse_step(graph: Graph, checked: Checked, node: Node) -> None:
    """Fuses Σ_j w[c, j] z[b, c, j], where z is a state and one place behind it."""
    first, second = _factors(node)
    for z, weight in ((first, second), (second, first)):
        if z is None or weight is None or not _is_of_each(weight, z.shape[1:]):
            continue
        for before in _joined(z, 2):
            is_step = before.state is not None and before.length and same(before.places, 1)
            if is_step and z.dtype == weight.dtype and z.dtype in _KERNELS:
                result, bias = _with_bias(graph, node)
                _write(graph, checked, node, before, result, weight, bias, 1)
                return


def _factors(node: Node) -> tuple[Value | None, Value | None]:
    """The factors whose products a node sums over the last of three axes; None where it doesn't.

    An einsum's weight (C, k) is the second of its factors, or the first.
    """
    if node.op == _EINSUM:
        values = input_of(node, "tensors")
        terms, output = einsum_terms(node)
        for at in (0, 1) if len(values) == 2 else ():
            whole, weighted = terms[at], terms[1 - at]
            plain = len({*whole}) == len(whole) == 3
            if plain and weighted == whole[1:] and output == whole[:2]:
                return values[at], values[1 - at]
        return None, None
    product, places = input_of(node, "self").producer, attribute(node, "dim")
    if product is None or "mul" not in product.op or product.op not in MULTIPLICATIVE:
        return None, None
    is_last = [at % 3 for at in places or ()] == [2] and attribute(node, "dtype") is None
    return (product.inputs[0], product.inputs[1]) if is_last else (None, None)


def _with_bias(graph: Graph, node: Node) -> tuple[Value, Value | None]:
    """The sum (B, C) of a step, or what adds a number for each channel to it, with these."""
    result = node.output
    user = result.users[0] if len(result.users) == 1 else None
    if user is None or user.op != "aten.add.Tensor" or not only_read_by(graph, result, user):
        return result, None
    bias = next((each for each in user.inputs if each is not result), None)
    plain = attribute(user, "alpha") == 1 and len(result.shape) == 2
    if bias is None or bias.dtype != result.dtype or not plain:
        return result, None
    return (user.output, bias) if _is_of_each(bias, result.shape[1:]) else (result, None)


def _is_of_each(factor: Value, sizes: Sequence[Dim]) -> bool:
    """Whether it has a number for each place of the last axes of a tensor, and all rows share it.

    One that is shared by channels or places too isn't a convolution's as it is.
    """
    rows = factor.shape[: -len(sizes)]
    return same_shape(factor.shape[-len(sizes) :], sizes) and all(same(size, 1) for size in rows)


def _write(
    graph: Graph,
    checked: Checked,
    node: Node,
    before: _Before,
    result: Value,
    weight: Value,
    bias: Value | None,
    dilation: int,
) -> None:
    chain, silu = _activation(graph, result)
    last = silu or (result.producer if result.producer is not None else node)
    build = Builder(graph, last, fuse_locs([n for n in (node, last) if n], last))
    if (rank := len(weight.shape)) != 3 or weight.shape[1] != 1:
        channels, width = weight.shape[rank - 2 :]
        weight = build("aten.reshape", weight, shape=[channels, 1, width])
    if bias is not None and len(bias.shape) != 1:
        bias = build("aten.reshape", bias, shape=[bias.shape[-1]])
    reach = (int(weight.shape[2]) - 1) * dilation
    x, state = before.x, before.state
    if before.order is not None:
        x = build("aten.permute", x, dims=list(before.order))
        state = state and build("aten.permute", state, dims=list(before.order))
    if state is not None and before.length > reach:
        state = build("aten.slice.Tensor", state, dim=2, start=before.length - reach)
    activation = "none" if silu is None else "silu"
    made = build.node(
        "attn.causal_conv",
        *(x, weight, bias, state),
        dilation=dilation,
        activation=activation,
    )
    y = made.outputs[0]
    if len(result.shape) != 3:  # a step without an axis of places
        y = build("aten.reshape", y, shape=list(result.shape))
    for link in chain:
        y = build(link.op, y, **link.attrs)
    pairs = [(result if silu is None else silu.output, y)]
    if before.joined is not None:
        following = as_dim(before.joined.shape[2] - reach)
        pairs += [(cut, made.outputs[1]) for cut in _cuts(before.joined, following, reach)]
    if checked.replace(pairs):
        erase_dead(graph, [old.producer for old, _ in pairs])
        graph.sort()


def _befores(z: Value) -> list[_Before]:
    """The ways to read z as x behind something: a part of it is x, or all."""
    found = [_Before(z, 0), *_joined(z, 2)]
    if isinstance(move := move_of(z), Permuted):
        joined = _joined(move.source, move.order[2])
        found += [replace(before, joined=None, order=move.order) for before in joined]
    return found[::-1]


def _joined(z: Value, time: int) -> list[_Before]:
    """What lies before places along an axis that are padded, or joined to others."""
    node = z.producer
    if node is None:
        return []
    if node.op in PAD:
        return _padded(node, time)
    if node.op not in JOIN or node.op == "aten.stack" or attribute(node, "dim") % 3 != time:
        return []
    parts = input_of(node, "tensors")
    if len(parts) != 2 or not isinstance(length := parts[0].shape[time], int):
        return []
    if uniform(parts[0]) == 0:
        return [_Before(parts[1], length)]
    return [_Before(parts[1], length, parts[0], z)]


def _padded(node: Node, time: int) -> list[_Before]:
    pad = [*attribute(node, "pad"), 0, 0, 0, 0, 0, 0][:6]
    constant = node.op != "aten.pad" or attribute(node, "mode") == "constant"
    is_zero = attribute(node, "value") in (None, 0, 0.0)
    ends = all(isinstance(end, int) and end >= 0 for end in pad)
    at = 2 * (2 - time)  # the last axis comes first
    if not (constant and is_zero and ends) or any(pad[:at]) or any(pad[at + 2 :]):
        return []
    x = node.inputs[0]
    return [] if x is None else [_Before(x, pad[at])]


def _cuts(whole: Value, start: Dim, length: Dim) -> list[Value]:
    """What has the places of a value from `start` on, `length` of them: a cut, or one of a cut."""
    found = [whole] if same(start, 0) and same(whole.shape[2], length) else []
    for user in whole.users:
        move = move_of(user.outputs[0]) if user.op == "aten.slice.Tensor" else None
        if isinstance(move, Cut) and move.dim == 2 and move.step == 1:
            at = _from_front(move.start, whole.shape[2])
            found += _cuts(user.output, as_dim(start - at), length)
    return found


def _from_front(start: Dim, size: Dim) -> Dim:
    """Where a cut begins that may be counted from the end; a size with a minus is."""
    if isinstance(start, int):
        return start if start >= 0 else as_dim(start + size)
    return as_dim(start + size) if start.could_extract_minus_sign() else start


def _activation(graph: Graph, value: Value) -> tuple[list[Node], Node | None]:
    """SiLU of the value, which nothing else reads, and the layout ops before it."""
    chain: list[Node] = []
    while len(value.users) == 1 and only_read_by(graph, value, value.users[0]):
        user = value.users[0]
        if user.op == "aten.silu":
            return chain, user
        if user.op not in PERMUTE | RESHAPE:
            break
        chain.append(user)
        value = user.output
    return [], None


def _padding(node: Node) -> int | None:
    padding = attribute(node, "padding")
    if isinstance(padding, str):
        return 0 if padding == "valid" else None
    return _one(padding)


def _one(value: object) -> int | None:
    found = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    return found if isinstance(found, int) else None
