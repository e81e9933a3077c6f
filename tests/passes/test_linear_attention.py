"""Every way to write a recurrence of outer products is read; what only looks like one stays."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from attngraph.analysis.recurrence.terms import fused
from attngraph.frontend.capture import capture
from attngraph.ir import Graph, Node, clone, interpret, parse
from attngraph.ir.ops import attribute
from attngraph.passes import make
from attngraph.passes.attention.late_normalisers import late_normalisers
from attngraph.passes.loops.loop_bodies import LoopBodies
from examples import mamba2
from tests.passes import linear_attentions as written
from tests.passes.linear_near_misses import NEAR_MISSES
from tests.passes.switching_retentions import SWITCHING, ClampedDistance, ClampedScores

pytestmark = pytest.mark.wide

_PASSES = ["canonicalize", "cse", "dce", "fuse-linear-attention", "dce"]


def _graph(
    kind: type[written.Layer], *, state: bool = False, dynamic: bool | None = None
) -> tuple[Graph, Graph]:
    """The captured graph, and what the passes make of it."""
    args = [torch.randn(2, written.TOKENS, written.WIDTH)]
    shapes: list[dict[int, Dim]] = [{0: Dim("batch", min=1, max=64)}]
    if kind in written.OF_ANY_LENGTH if dynamic is None else dynamic:
        shapes[0][1] = Dim("seq", min=1, max=512)
    if state:
        args.append(torch.randn(2, written.HEADS, written.KEYS, written.VALUES))
        shapes.append({0: shapes[0][0]})
    graph = capture(kind().eval(), tuple(args), dynamic_shapes=tuple(shapes))
    graph = getattr(graph, "graph", graph)
    before = clone(graph)
    graph.settle_sizes()
    for item in (LoopBodies(tuple(make(_PASSES[:3]))), *make(_PASSES)):
        item.run(graph)
    return before, graph


def _sites(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == "attn.linear_attention"]


def _assert_same(before: Graph, after: Graph, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        sizes = {"batch": 3, "seq": length}
        inputs = [
            torch.randn([size if isinstance(size, int) else sizes[str(size)] for size in v.shape])
            for v in before.inputs
        ]
        pairs = zip(interpret(after, inputs), interpret(before, inputs), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", [*written.OF_ANY_LENGTH, *written.LOOPS])
def test_it_is_read(kind: type[written.Layer]) -> None:
    before, after = _graph(kind)
    sites = _sites(after)
    is_normalised = issubclass(kind, (written.Causal, written.Normalised))
    assert len(sites) == (2 if is_normalised else 1)
    assert not [n for n in after if [str(size) for size in n.outputs[0].shape[-2:]] == ["seq"] * 2]
    assert all(attribute(site, "kv_heads") == written.HEADS for site in sites)
    assert not [node for node in after if node.op in ("aten.cumsum", "aten.stack", "aten.pad")]
    dynamic = kind in written.OF_ANY_LENGTH
    _assert_same(before, after, (1, 2, 19) if dynamic else (written.TOKENS,))


@pytest.mark.parametrize("kind", [written.Loop, written.GatedDeltaLoop])
def test_a_state_is_handed_on(kind: type[written.Layer]) -> None:
    before, after = _graph(kind, state=True)
    (site,) = _sites(after)
    assert site.inputs[3] is not None
    assert after.outputs[1] in (site.outputs[1], *(n.output for n in site.outputs[1].users))
    _assert_same(before, after, (written.TOKENS,))


def test_as_many_tokens_as_a_head_has_features() -> None:
    """A state that chunks hand on has an axis of that size, which is none of tokens."""
    tokens = mamba2.INNER
    graph = capture(mamba2.Mamba2().eval(), (torch.randn(2, tokens, mamba2.WIDTH),)).graph
    for item in make(_PASSES):
        item.run(graph)
    assert len(_sites(graph)) == 1


def test_an_output_of_a_state_s_rank_is_no_state() -> None:
    graph = capture(written.LastToken().eval(), (torch.randn(2, 5, written.WIDTH),)).graph
    for item in make(_PASSES):
        item.run(graph)
    assert len(_sites(graph)) == 1


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_a_near_miss_stays(kind: type[written.Layer]) -> None:
    _, after = _graph(kind)
    assert not _sites(after)


def test_the_same_mask_without_a_switch_is_read() -> None:
    """The control of what follows."""
    _, after = _graph(written.SwitchingRetention, dynamic=True)
    assert len(_sites(after)) == 1


@pytest.mark.parametrize("kind", SWITCHING)
def test_what_switches_beyond_every_trial_stays(kind: type[written.Layer]) -> None:
    _, after = _graph(kind, dynamic=True)
    assert not _sites(after)


def test_chunks_of_any_number_are_read() -> None:
    """A scan over the chunks of a padded length."""
    before, after = _graph(written.Chunked, dynamic=True)
    assert [node for node in before if node.op == "attn.scan"]
    assert len(_sites(after)) == 1
    assert not [node for node in after if node.op == "attn.scan"]
    _assert_same(before, after, (5, 8, 9, 19))


def test_chunks_of_triangular_systems_are_read() -> None:
    """Where the system is one of the keys; what the state is part of is no linear function."""
    before, after = _graph(written.SolvedChunks, dynamic=True)
    assert len(_sites(after)) == 1
    _assert_same(before, after, (5, 8, 9, 19))
    _, stays = _graph(written.SystemOfState, dynamic=True)
    assert not _sites(stays)


@pytest.mark.parametrize("kind", written.CHUNKED)
def test_chunks_that_differ_beyond_every_trial_stay(kind: type[written.Layer]) -> None:
    _, after = _graph(kind, dynamic=True)
    assert not _sites(after)


def test_a_switch_of_numbers_stays_at_a_static_length_too() -> None:
    _, after = _graph(ClampedScores)
    assert not _sites(after)


def test_a_switch_of_positions_is_tried_whole_at_a_static_length() -> None:
    before, after = _graph(ClampedDistance)
    assert len(_sites(after)) == 1
    _assert_same(before, after, (written.TOKENS,))


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (written.Hidden, (torch.ones(2, 7, written.WIDTH), torch.zeros(2, 7, dtype=torch.bool))),
        (written.Counted, (torch.tensor([3, 5]),)),
    ],
)
def test_what_holds_where_nearly_all_is_hidden_is_not_proposed(
    kind: type[written.Layer], others: tuple[torch.Tensor, ...]
) -> None:
    graph = capture(kind().eval(), (torch.randn(2, 5, written.WIDTH), *others)).graph
    remarks = [remark for item in make(_PASSES) for remark in item.run(graph)]
    assert not [remark for remark in remarks if remark.code == "unequal"]
    assert not _sites(graph)


def test_layers_without_an_order_of_tokens_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a softmax weighs apart, no row of a transformer's other layers is a recurrence."""
    layer = torch.nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True).eval()
    graph = capture(layer, (torch.randn(2, 7, 24),)).graph

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("a region was run")

    monkeypatch.setattr("attngraph.analysis.recurrence.linear.Runs.__call__", fails)
    for item in make(_PASSES):
        item.run(graph)


def test_weights_are_normalised_late_only_where_their_last_axis_is_summed() -> None:
    def written(scores: str, factor: str, values: str, product: str) -> int:
        graph = parse(f"""graph @main {{
  input %s : f32[{scores}]
  input %d : f32[{factor}]
  input %v : f32[{values}]
  %w = aten.div.Tensor(%s, %d)
  %y = {product}
  return %y
}}""")
        found = list(late_normalisers(graph))
        assert all(first.type == second.type for _, (first, second) in found)
        return len(found)

    assert written("2, 5, 5", "2, 5, 1", "2, 5, 3", "aten.matmul(%w, %v)") == 1
    einsum = 'aten.einsum(%w, %v) {{equation = "{}"}}'.format
    assert written("2, 5, 5", "2, 5, 1", "2, 5, 3", einsum("bij,bjd->bid")) == 1
    assert written("2, 5, 5", "2, 5, 1", "2, 5, 3", einsum("bji,bjd->bid")) == 0
    assert written("2, 4, 3, 6", "2, 4, 3, 1", "2, 4, 3, 5", einsum("becd,bect->btd")) == 0
    assert written("5, 5", "5, 1", "5", "aten.mv(%w, %v)") == 0
    assert written("5, 5", "1, 5", "5, 3", "aten.matmul(%w, %v)") == 0


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("aten.sum.dim_IntList(%s) {dim = [-1], keepdim = true}", 1),
        ("aten.clamp_min(%total) {min = 1e-06}", 1),
        ("aten.clamp_min(%total) {min = 0.0}", 0),  # of a sum below 0, whose scores aren't 0
        ("aten.relu(%total)", 0),
        ("aten.mul.Tensor(%total, %shown)", 0),
    ],
)
def test_weights_are_normalised_late_only_by_what_nothing_cuts_to_0(made: str, found: int) -> None:
    """Infinite weights have another sum with values of both signs: NaN."""
    graph = parse(f"""graph @main {{
  input %s : f32[2, 5, 5]
  input %v : f32[2, 5, 3]
  input %shown : f32[2, 5, 1]
  %total = aten.sum.dim_IntList(%s) {{dim = [-1], keepdim = true}}
  %d = {made}
  %w = aten.div.Tensor(%s, %d)
  %y = aten.matmul(%w, %v)
  return %y
}}""")
    assert len(list(late_normalisers(graph))) == found


def test_channels_before_tokens_are_read_and_their_small_factors_permuted() -> None:
    before, after = _graph(written.ChannelsFirst)
    (site,) = _sites(after)
    assert attribute(site, "kv_heads") == written.HEADS * written.VALUES
    permuted = [node for node in after if node.op == "aten.permute"]
    assert all(len(node.output.shape) == 3 for node in permuted)
    _assert_same(before, after, (written.TOKENS,))


@pytest.mark.parametrize("count", [8, 64])
def test_a_state_for_each_channel_is_told_as_a_scan(count: int) -> None:
    """Which they are lowered to; a few channels are the operator's."""
    graph = parse(f"""graph @main {{
  input %q : f32[2, 7, 16]
  input %k : f32[2, 7, {count * 16}]
  input %v : f32[2, 7, {count}]
  %y, %s = attn.linear_attention(%q, %k, %v) {{heads = 1, kv_heads = {count}, scale = 1.0}}
  return %y
}}""")
    (node,) = graph
    assert ("Scan" in fused(node, node.loc).reason) == (count == 64)
