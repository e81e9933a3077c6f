"""A recurrence of outer products, by its terms: which values of a graph are q, k, v, β and a."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attngraph.analysis.recurrence.chunks import CHUNK, lacking
from attngraph.analysis.recurrence.mixing import Trace
from attngraph.analysis.values.intervals import Intervals
from attngraph.dialect.states import linear_attention
from attngraph.ir import Dim, Loc, Node, Remark, Value, remark_on
from attngraph.ir.ops import attribute, input_of

_MANY = 1024
"""Numbers in the states of all channels from which on a Scan is faster than the operator."""


@dataclass(frozen=True)
class Operand:
    """A value as (B, T, H, D): `order` is where these axes lie in it, None being one of size 1.

    `merged` heads, where there are more than one, lie beside each other in the axis of features.
    """

    value: Value
    order: tuple[int | None, int, int | None, int | None]
    merged: int = 1

    def heads(self) -> Dim:
        return self.merged if self.order[2] is None else self.value.shape[self.order[2]]

    def features(self) -> Dim:
        size = 1 if self.order[3] is None else self.value.shape[self.order[3]]
        return size // self.merged if isinstance(size, int) else size

    def axis(self, place: int) -> int | None:
        """Where in the value B, T, H or D lies; None where it has no such axis."""
        at = self.order[place]
        return self.order[3] if place == 2 and self.merged > 1 else at

    def spread(self, place: int, chosen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Which places along that axis are meant by some of the heads, features or elements: bools
        of the axis's length in x, the value's numbers. Heads in groups are runs.
        """
        axis = self.axis(place)
        assert axis is not None
        times = self.merged if place == 3 else 1
        return chosen.repeat_interleave(x.shape[axis] // times // len(chosen)).repeat(times)

    def of(self, trace: Trace) -> torch.Tensor | None:
        """Its numbers in a run, (B, T, H, D)."""
        found = trace[self.value]
        if found is None or found.ndim != len(self.value.shape):
            return None
        kept = [at for at in self.order if at is not None]
        shaped = found.permute(kept)
        for place, at in enumerate(self.order):
            shaped = shaped.unsqueeze(place) if at is None else shaped
        if self.merged == 1:
            return shaped
        width = shaped.shape[3] // self.merged
        return shaped.reshape(*shaped.shape[:2], self.merged, width)


@dataclass(frozen=True)
class Decay:
    """e^g of an operand, the operand itself if not `is_log`, or `constant` numbers of each head.

    `tables` are the constants that hold powers of these, as they were before they were rounded.
    """

    operand: Operand | None = None
    is_log: bool = True
    constant: torch.Tensor | None = None
    tables: Mapping[Value, torch.Tensor] = field(default_factory=dict)

    def of(self, trace: Trace, length: int) -> torch.Tensor | None:
        """g in a run, (1 or B, T, H, 1 or D)."""
        if self.constant is not None:
            return self.constant.log()[None, None, :, None].expand(1, length, -1, 1)
        found = None if self.operand is None else self.operand.of(trace)
        return found if found is None or self.is_log else found.log()


@dataclass(frozen=True)
class State:
    """A value (B, H, dk, dv), or (B, H, dv, dk) if `turned`, or without its one head."""

    value: Value
    turned: bool


@dataclass(frozen=True)
class Recurrence:
    """What `output` is: the operands of `attn.linear_attention`. `value` None stands for ones."""

    output: Operand
    query: Operand
    key: Operand
    value: Operand | None
    beta: Operand | None
    decay: Decay | None
    scale: float
    past: State | None = None
    present: State | None = None

    @property
    def tables(self) -> Mapping[Value, torch.Tensor]:
        """The exact numbers of the constants that hold powers of its decay."""
        return {} if self.decay is None else self.decay.tables

    @property
    def kv_heads(self) -> Dim:
        """Those of the state: of the operand that has most."""
        own = [self.key.heads(), *(part.heads() for part in (self.value, self.beta) if part)]
        if self.decay is not None:
            constant = self.decay.constant
            own += [len(constant)] if constant is not None else []
            own += [self.decay.operand.heads()] if self.decay.operand is not None else []
        return max(own, key=lambda size: size if isinstance(size, int) else 0)

    def run(self, trace: Trace) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(B, T, H, dv) and the state (B, H, dk, dv), from the operands' numbers in a run."""
        q, k = self.query.of(trace), self.key.of(trace)
        if q is None or k is None:
            return None
        length, count = q.shape[1], self.kv_heads
        v = torch.ones_like(k[..., :1]) if self.value is None else self.value.of(trace)
        beta = None if self.beta is None else self.beta.of(trace)
        decay = None if self.decay is None else self.decay.of(trace, length)
        if v is None or not isinstance(count, int):
            return None
        if (self.beta is not None and beta is None) or (self.decay is not None and decay is None):
            return None
        past = None
        if self.past is not None:
            past = as_state(trace[self.past.value], self.past.turned, q.shape[0], count)
        heads = q.shape[2]
        own = [part.shape[2] for part in (k, v, decay, beta) if part is not None]
        if (heads % count and count % heads) or any(count % each for each in own):
            return None
        try:
            parts = [_spread(part, q.shape[0], count) for part in (k, v, decay, beta)]
            flat = [None if part is None else part.flatten(2) for part in parts]
            o, state = linear_attention(
                *(q.flatten(2), flat[0], flat[1], past, flat[2], flat[3]),
                heads=heads,
                kv_heads=count,
                scale=self.scale,
            )
        except RuntimeError:  # sizes that don't fit are no recurrence
            return None
        return o.unflatten(2, (max(heads, count), -1)), state


@dataclass(frozen=True)
class Unread:
    """A recurrence whose terms were found but for one; `what` says which, `node` gives it."""

    node: Node
    what: str


def fused(made: Node, loc: Loc, updates: int = 1) -> Remark:
    """What a remark says of an `attn.linear_attention`, or an `attn.generalized_delta_rule`, of so
    many updates of each token."""
    is_general = made.op == "attn.generalized_delta_rule"
    rule = "A generalized delta rule"
    if not is_general:
        rule = "Linear attention" if input_of(made, "beta") is None else "A delta rule"
    decaying = "" if input_of(made, "decay") is None else " with a decay"
    past = input_of(made, "past")
    state = "" if past is None or Intervals().of(past) == (0, 0) else ", from a given state on,"
    end = "" if state else ","
    several = "" if updates == 1 else f", of {updates} updates of each token{end}"
    what = "is one operator"
    if is_general:
        over = f"chunks of {CHUNK} tokens"
        if (asked := lacking(made)) is not None:
            over = f"tokens: chunks ask for {asked}"
        what = f"is products of matrices, in a Scan over {over}"
    elif is_by_channel(made):
        what = "has a state for each channel, and is a Scan over tokens, the faster form of these"
    reason = f"{rule}{decaying}{several}{state} {what}."
    return remark_on(made, "fused", "recurrence", reason, loc=loc)


def is_by_channel(node: Node) -> bool:
    """Whether an `attn.linear_attention` has values of one feature and many channels, as Mamba's
    scan has: onnxruntime's operator goes through them one by one.

    Measured on one thread of a CPU, 256 tokens, in ms, the operator and a Scan: 64 channels of 4
    numbers 0.5 and 0.8, 64 of 16 1.7 and 1.2, 64 of 64 10.6 and 5.0, 128 of 16 3.2 and 2.0, and
    1536 of 16, at 64 tokens, 9.8 and 5.4. Values of 2 features and more: the operator is 2 to 10
    times as fast.
    """
    query, value = input_of(node, "query"), input_of(node, "value")
    heads, count = attribute(node, "heads"), attribute(node, "kv_heads")
    is_plain = input_of(node, "beta") is None and value.dtype == torch.float32
    numbers = count * (query.shape[2] // heads)
    return is_plain and value.shape[2] == count and count % heads == 0 and numbers >= _MANY


def _spread(x: torch.Tensor | None, batch: int, heads: int) -> torch.Tensor | None:
    if x is None:
        return None
    x = x.expand(batch, *x.shape[1:])
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def as_state(x: torch.Tensor | None, turned: bool, batch: int, heads: int) -> torch.Tensor | None:
    """A value's numbers as (B, H, dk, dv); None where it can be no state."""
    if x is None or x.ndim not in (3, 4):
        return None
    if x.numel() and x.shape[0] in (batch, batch * heads):
        if x.shape[:-2].numel() != batch * heads:
            return None
        x = x.reshape(batch, heads, *x.shape[-2:])
    return x.mT if turned else x
