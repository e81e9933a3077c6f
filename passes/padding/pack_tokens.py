"""pack-tokens: row-wise ops run on the tokens that aren't padding.

The rows (b, t) of the valid tokens are gathered into one row of N tokens, (1, N, …). Attentions,
which mix rows, get them back in their places; what then stands at padding is a copy of another
token in the same element of the batch, which no valid token reads. Where the target has a kernel
for it, attentions whose mask hides just the padding read packed rows as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attngraph.analysis.masks.key_masks import Masked
from attngraph.analysis.masks.masking import masking_of
from attngraph.analysis.masks.predicates import TRUE, conjuncts
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.rows.padded_reads import Tokens
from attngraph.analysis.rows.padding import find_tokens
from attngraph.analysis.rows.row_wise import linked, row_operands
from attngraph.analysis.walks import made_of
from attngraph.ir import Builder, Graph, Node, Remark, Value, clone
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import same_shape
from attngraph.ir.effects import dim_definers
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.attention.mask_building import EarlyBuilder, Unbuildable, build
from attngraph.passes.padding.row_packer import RowPacker
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.findings import Packed, findings_of
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import ATTENTION

_WORTH = "aten.linear"  # a region without one costs less than gathering its rows


class PackTokens(GraphPass, name="pack-tokens", exact=True):
    """Runs regions of row-wise ops that hold a linear on valid tokens only.

    Which tokens those are is read from what masks the keys of attentions (padding.py). The rows of
    the others become unspecified, so the pass runs only where the user asks for it. With
    `attention` an attention that masks nothing but padding becomes an `attn.packed_attention`.
    """

    attention: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        remarks: list[Remark] = []
        for first in find_tokens(graph):
            # what was packed for others since then has changed the graph; without an attention
            # that is packed now, fewer would hide what is padding
            nodes = {site.node for site in first.sites}
            for tokens in find_tokens(graph):
                same = {site.node for site in tokens.sites} == nodes and tokens.shown == first.shown
                if same and same_shape(tokens.rows, first.rows):
                    remarks += _pack(graph, tokens, self.name, self.attention)
        return remarks


def _pack(graph: Graph, tokens: Tokens, pass_name: str, attention: bool) -> list[Remark]:
    site = tokens.first
    if tokens.readers or tokens.shown == TRUE:
        return _shown(graph, tokens)
    nodes = set(_worthwhile(tokens, [node for node in graph if _is_packable(node, tokens)]))
    kept = _kept_padded(graph, tokens)
    if not nodes:
        return kept
    make = EarlyBuilder(graph, dim_definers(graph))
    try:
        held = build(make, site.node.loc, tokens.shown, _joint(tokens))
    except Unbuildable as error:
        why = f"where tokens are hidden can't be computed from the masks: {error}".rstrip(".")
        return [*kept, _kept(graph, tokens, why)]
    if wrong := _seen_padding(graph, tokens, held, pass_name):
        return [*kept, *wrong]
    outputs = _reached(graph, tokens)
    mixing = {site.node for site in tokens.sites if attention and _is_over_tokens(site, tokens)}
    packer = RowPacker(graph, tokens, make, held, pass_name, only_valid=bool(mixing))
    done, attentions = [], 0
    for node in [node for node in graph if node in mixing or node in nodes]:
        if node in mixing:
            attentions += packer.pack_attention(node)
        elif packer.pack(node):
            done.append(node)
    packer.settle()
    if not done:
        return [*kept, *packer.remarks]
    linears = sum(node.op == _WORTH for node in done)
    others = f" and {len(done) - linears} other row-wise nodes"
    if attentions:
        others = f", {attentions} attentions{others}"
    findings_of(graph).packed.append(Packed(_alone(graph, packer.valid), outputs))
    said = Remark(
        "note",
        "packed",
        f"{linears} linears{others} run on the tokens that {_named(graph, packer.valid)} leaves "
        f"unmasked{_unspecified(graph, outputs)}",
        site.node.loc,
        site.node.op,
    )
    return [said, *kept, *packer.remarks]


def _seen_padding(graph: Graph, tokens: Tokens, held: Value, pass_name: str) -> list[Remark]:
    """What is said where a mask shows a key that `held`, (B, 1, 1, T), leaves out as padding.

    No comparison of rows tells that, since they are compared where `held` says so. The nodes that
    tell it are made in a copy: the graph's own names stay as they are.
    """
    copy = clone(graph)
    values = {value.name: value for value in copy.values()}
    checked = Checked(copy, pass_name, kinds=ATTENTION, exact=True, depth=None)
    for site in tokens.sites:
        mask = input_of(site.node, "mask")
        if mask is None:
            continue
        shown, is_token = values[mask.name], values[held.name]
        make = Builder(copy, loc=site.node.loc)
        always = make("aten.logical_or", is_token, make("aten.logical_not", is_token))
        pairs = [
            (make("aten.logical_and", shown, always), make("aten.logical_and", shown, is_token))
        ]
        if not checked.replace(pairs, leaves=copy.inputs, proved=True):
            break
    return checked.remarks


def _is_packable(node: Node, tokens: Tokens) -> bool:
    if node in tokens.singles or not all(value in tokens.linked for value in node.outputs):
        return False
    read = [value for value in node.outputs if value in tokens.full]
    return not read and row_operands(node, tokens.rows) is not None


def _is_over_tokens(site: Masked, tokens: Tokens) -> bool:
    """Whether queries and keys are the tokens, and nothing but padding changes their scores."""
    node, masking = site.node, masking_of(site.node)
    if site.parts != frozenset(conjuncts(tokens.shown)):
        return False
    if masking.causal or masking.is_bounded or masking.bias is not None:
        return False
    if input_of(node, "sinks") is not None:
        return False
    if attribute(node, "softcap") or len(node.outputs) > 1 or node.outputs[0] in tokens.full:
        return False
    return all(value in tokens.linked for value in node.inputs[:3])


def _worthwhile(tokens: Tokens, nodes: Sequence[Node]) -> list[Node]:
    """The nodes, but for regions that hand rows to each other and hold no linear."""
    inside = set(nodes)
    pairs = (
        [node, *(v.producer for v in row_operands(node, tokens.rows) or () if v.producer in inside)]
        for node in nodes
    )
    worth = [region for region in linked(pairs) if any(node.op == _WORTH for node in region)]
    return [node for node in nodes if any(node in region for region in worth)]


def _joint(tokens: Tokens) -> Reader:
    """A reader that knows what all attentions' masks are made of."""
    joint = tokens.first.reader
    for site in tokens.sites:
        joint.integers.update(site.reader.integers)
    return joint


def _shown(graph: Graph, tokens: Tokens) -> list[Remark]:
    """Why no token is padding, for the linears that might have been packed."""
    if not _linears(graph, tokens):
        return []
    if tokens.readers:
        by = min(tokens.readers, key=list(graph).index)
        return [_kept(graph, tokens, f"{by.op} at {by.loc} reads their rows there", by)]
    masks = [
        f"the mask of {site.node.op} at {site.node.loc} (from {_named(graph, mask)})"
        for site in tokens.sites
        if (mask := input_of(site.node, "mask")) is not None
    ]
    why = f"no token is hidden by all masks, which are {' and '.join(masks)}"
    return [_kept(graph, tokens, why)]


def _linears(graph: Graph, tokens: Tokens) -> int:
    return sum(node.op == _WORTH and node.output in tokens.linked for node in graph)


def _kept(graph: Graph, tokens: Tokens, why: str, by: Node | None = None) -> Remark:
    """Tells that none of the linears over the tokens is packed."""
    site = tokens.first.node
    blamed = site if by is None else by
    return Remark(
        "note",
        "kept-padded",
        f"{_linears(graph, tokens)} linears run at padding too: {why}",
        site.loc,
        site.op,
        blamed=f"{blamed.op} at {blamed.loc}",
    )


def _kept_padded(graph: Graph, tokens: Tokens) -> list[Remark]:
    """One remark for each node that reads rows of padding, and keeps linears from being packed."""
    held: dict[Node, int] = {}
    for node in graph:
        value = node.outputs[0] if node.op == _WORTH else None
        by = tokens.full.get(value) if value in tokens.linked and value is not None else None
        if by is not None:
            held[by] = held.get(by, 0) + 1
    return [
        Remark(
            "note",
            "kept-padded",
            f"{count} linears run at padding too: {by.op} at {by.loc} reads their rows there",
            by.loc,
            by.op,
            blamed=f"{by.op} at {by.loc}",
        )
        for by, count in held.items()
    ]


def _named(graph: Graph, valid: Value) -> str:
    """The inputs that say what is padding."""
    read = set(made_of(valid))
    return " and ".join(value.name for value in graph.inputs if value in read)


def _unspecified(graph: Graph, outputs: Mapping[int, tuple[int, ...] | None]) -> str:
    """What is left unsaid, output by output."""
    said: dict[str, list[str]] = {}
    for position, places in outputs.items():
        if places is None:
            kind = "the rows of the others"
        elif places:
            which = " or ".join(map(str, places))
            kind = f"elements of the batch of which token {which} is masked"
        else:
            kind = "elements of the batch without an unmasked token"
        said.setdefault(kind, []).append(graph.output_names[position])
    parts = [f"{kind} in {' and '.join(names)}" for kind, names in said.items()]
    return f"; unspecified are {', and '.join(parts)}" if parts else ""


def _alone(graph: Graph, value: Value) -> Graph:
    """A graph of the same inputs that returns only this value."""
    copy = clone(graph)
    copy.set_outputs([v for v in copy.values() if v.name == value.name], [value.name])
    eliminate_dead_code(copy)
    return copy


def _reached(graph: Graph, tokens: Tokens) -> dict[int, tuple[int, ...] | None]:
    """The outputs that are rows of the tokens, or are pooled from them."""
    read: dict[Value, frozenset[int]] = {}
    for node in graph:
        if node in tokens.singles:
            read[node.outputs[0]] = frozenset([tokens.singles[node]])
            continue
        above = [read[value] for value in node.inputs if value in read]
        if above or node in tokens.pooling:
            read.update((value, frozenset().union(*above)) for value in node.outputs)
    found: dict[int, tuple[int, ...] | None] = {}
    for position, value in enumerate(graph.outputs):
        if value in tokens.linked and value not in tokens.full:
            found[position] = None
        elif value in read:
            found[position] = tuple(sorted(read[value]))
    return found
