"""A recurrence runs from its operands, wherever their axes are: held against the formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.recurrence.mixing import Trace
from attngraph.analysis.recurrence.terms import Decay, Operand, Recurrence, State, as_state, fused
from attngraph.ir import TensorType, Value, parse

BATCH, TOKENS, KEYS, FEATURES = 2, 5, 3, 4
Numbers = dict[Value, torch.Tensor]


def _value(x: torch.Tensor) -> Value:
    return Value("x", TensorType(x.dtype, tuple(x.shape)))


def _operand(numbers: Numbers, x: torch.Tensor, axes: str = "bthd") -> Operand:
    """`x` (B, T, H, D), stored in the order of `axes`, which leaves out those of size 1."""
    stored = x.permute(["bthd".index(axis) for axis in axes if axis in "bthd"] + [
        at for at, axis in enumerate("bthd") if axis not in axes
    ]).reshape([x.shape["bthd".index(axis)] for axis in axes])  # fmt: skip
    value = _value(stored)
    numbers[value] = stored
    order = [axes.index(axis) if axis in axes else None for axis in "bthd"]
    batch, tokens, head, feature = order
    assert tokens is not None
    return Operand(value, (batch, tokens, head, feature))


def _drawn(heads: int, width: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = BATCH, TOKENS, heads, width
    return torch.randn(shape, generator=random, dtype=torch.float64)


def _expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None,
    gain: torch.Tensor | None,
    past: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and S, element by element, of as many heads each."""
    heads = k.shape[2]
    shape = BATCH, heads, KEYS, v.shape[-1]
    states = torch.zeros(shape, dtype=torch.float64) if past is None else past.clone()
    o = torch.zeros(BATCH, TOKENS, heads, v.shape[-1], dtype=torch.float64)
    for b, h, t in itertools.product(range(BATCH), range(heads), range(TOKENS)):
        state = states[b, h]
        if gain is not None:
            state = gain[b, t, h].reshape(-1, 1) * state
        new = v[b, t, h]
        if beta is not None:
            new = beta[b, t, h] * (new - k[b, t, h] @ state)
        states[b, h] = state + torch.outer(k[b, t, h], new)
        o[b, t, h] = q[b, t, h] @ states[b, h]
    return o, states


@pytest.mark.parametrize("axes", ["bthd", "bhtd", "htbd", "dbth"])
@pytest.mark.parametrize("with_beta", [False, True])
@pytest.mark.parametrize("decay", ["none", "log", "number", "features", "constant"])
@pytest.mark.parametrize("turned", [None, False, True])
def test_it_is_the_formula(axes: str, with_beta: bool, decay: str, turned: bool | None) -> None:
    numbers: Numbers = {}
    q, k, v = _drawn(2, KEYS, 0), _drawn(2, KEYS, 1), _drawn(2, FEATURES, 2)
    beta = _drawn(2, 1, 3).sigmoid() if with_beta else None
    gain = _drawn(2, KEYS if decay == "features" else 1, 4).sigmoid()
    read: Decay | None = None
    given: torch.Tensor | None = gain
    match decay:
        case "none":
            given = None
        case "number":
            read = Decay(_operand(numbers, gain, axes), is_log=False)
        case "constant":
            constant = torch.tensor([0.5, 0.9], dtype=torch.float64)
            given = constant[None, None, :, None].expand(BATCH, TOKENS, 2, 1)
            read = Decay(constant=constant)
        case _:
            read = Decay(_operand(numbers, gain.log(), axes))
    past, state = None, None
    if turned is not None:
        past = torch.randn(BATCH, 2, KEYS, FEATURES, dtype=torch.float64)
        stored = past.mT if turned else past
        state = State(_value(stored), turned)
        numbers[state.value] = stored
    found = Recurrence(
        _operand({}, _drawn(2, FEATURES, 9), axes),
        *(_operand(numbers, x, axes) for x in (q, k, v)),
        None if beta is None else _operand(numbers, beta, axes),
        read,
        0.5,
        state,
    ).run(Trace({}, numbers))
    assert found is not None
    o, last = _expected(q, k, v, beta, given, past)
    torch.testing.assert_close(found[0], 0.5 * o, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], last, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys", "values"), [(4, 2, 2), (4, 1, 1), (1, 2, 2), (2, 1, 2),
                                                         (1, 1, 2), (6, 2, 1)])  # fmt: skip
def test_a_head_of_the_smaller_serves_as_many_of_the_larger(
    queries: int, keys: int, values: int
) -> None:
    numbers: Numbers = {}
    q, k, v = _drawn(queries, KEYS, 0), _drawn(keys, KEYS, 1), _drawn(values, FEATURES, 2)
    parts = [_operand(numbers, x, "btd" if x.shape[2] == 1 else "bthd") for x in (q, k, v)]
    output = _operand({}, _drawn(max(queries, keys, values), FEATURES, 9))
    recurrence = Recurrence(output, *parts, None, None, 1.0)
    assert recurrence.kv_heads == max(keys, values)
    found = recurrence.run(Trace({}, numbers))
    assert found is not None
    most = max(queries, keys, values)
    whole = [x.repeat_interleave(most // x.shape[2], 2) for x in (q, k, v)]
    o, states = _expected(*whole, None, None, None)
    torch.testing.assert_close(found[0], o, rtol=0, atol=1e-12)
    served = states[:, :: most // max(keys, values)]
    torch.testing.assert_close(found[1], served, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys", "values"), [(3, 2, 2), (2, 2, 3), (2, 3, 3)])
def test_heads_that_dont_divide_are_no_recurrence(queries: int, keys: int, values: int) -> None:
    numbers: Numbers = {}
    parts = [
        _operand(numbers, _drawn(heads, width, width))
        for heads, width in ((queries, KEYS), (keys, KEYS), (values, FEATURES))
    ]
    recurrence = Recurrence(parts[0], *parts, None, None, 1.0)
    assert recurrence.run(Trace({}, numbers)) is None


def test_what_a_run_has_no_number_for_is_unknown() -> None:
    numbers: Numbers = {}
    q, k, v = (_operand(numbers, _drawn(1, width, width)) for width in (KEYS, KEYS, FEATURES))
    gate = _operand({}, _drawn(1, 1, 5))
    for missing in (
        Recurrence(v, gate, k, v, None, None, 1.0),
        Recurrence(v, q, k, gate, None, None, 1.0),
        Recurrence(v, q, k, v, gate, None, 1.0),
        Recurrence(v, q, k, v, None, Decay(gate), 1.0),
    ):
        assert missing.run(Trace({}, numbers)) is None
    assert Recurrence(v, q, k, v, None, None, 1.0).run(Trace({}, numbers)) is not None


def test_values_that_lack_are_ones() -> None:
    numbers: Numbers = {}
    q, k = (_operand(numbers, _drawn(2, KEYS, seed)) for seed in (0, 1))
    found = Recurrence(q, q, k, None, None, None, 1.0).run(Trace({}, numbers))
    assert found is not None
    ones = torch.ones(BATCH, TOKENS, 2, 1, dtype=torch.float64)
    o, _ = _expected(_drawn(2, KEYS, 0), _drawn(2, KEYS, 1), ones, None, None, None)
    torch.testing.assert_close(found[0], o, rtol=0, atol=1e-12)


def test_a_state_has_its_heads_beside_its_rows_or_merged_with_them() -> None:
    x = torch.arange(48.0).reshape(2, 2, 3, 4)
    for given in (x, x.flatten(0, 1)):
        found = as_state(given, False, 2, 2)
        assert found is not None
        assert found.equal(x)
    turned = as_state(x, True, 2, 2)
    assert turned is not None
    assert turned.equal(x.mT)
    assert as_state(x, False, 2, 3) is None  # too few heads
    assert as_state(x[0, 0], False, 2, 1) is None
    assert as_state(None, False, 2, 2) is None


@pytest.mark.parametrize(
    ("operands", "name"),
    [
        ("", "Linear attention is one operator."),
        (", none, none, %g", "A delta rule is one operator."),
        (", %z, %g", "Linear attention with a decay is one operator."),
        (", %p", "Linear attention, from a given state on, is one operator."),
    ],
)
def test_what_it_is_called(operands: str, name: str) -> None:
    graph = parse(f"""graph @main {{
  input %q : f32[2, 7, 6]
  input %v : f32[2, 7, 8]
  input %g : f32[2, 7, 2]
  input %p : f32[2, 2, 3, 4]
  %z = aten.full() {{size = [2, 2, 3, 4], fill_value = 0.0, dtype = f32}}
  %y, %s = attn.linear_attention(%q, %q, %v{operands}) {{heads = 2, kv_heads = 2, scale = 1.0}}
  return %y
}}""")
    node = next(each for each in graph if each.op == "attn.linear_attention")
    assert fused(node, node.loc).reason == name
