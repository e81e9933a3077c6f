"""Scores that something besides their softmax reads: what reads them, and what to do."""

from __future__ import annotations

from attngraph.analysis.attention.decline import is_product
from attngraph.analysis.attention.exponentials import SOFTMAXES
from attngraph.analysis.attention.logits import Declined
from attngraph.ir import Node

_PRODUCTS = frozenset(["aten.matmul", "aten.bmm", "aten.einsum"])
_FAR = 64  # nodes between scores and softmax; a reader further off is outside the attention


def escapes(node: Node, until: set[Node]) -> bool:
    """Whether a node's result reaches the graph's outputs other than through `until`."""
    outputs = set(node.graph.outputs) if node.graph else set()
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        if outputs & set(current.outputs) or len(seen) > _FAR:
            return True
        users = {user for value in current.outputs for user in value.users} - seen - until
        seen |= users
        queue.extend(users)
    return False


def reused(scores: Node, anchor: Node) -> Declined:
    """What else reads the scores: another softmax, a later layer's scores, their logsumexp."""
    queue, seen = [scores], {scores, anchor}
    while queue and len(seen) < _FAR:
        node = queue.pop()
        for user in (user for value in node.outputs for user in value.users):
            if user in seen:
                continue
            if user.op in SOFTMAXES:
                return Declined(
                    "scores-reused",
                    f"Another softmax, at {user.loc}, reads the scores too: their product is "
                    "computed once for both.",
                    scores,
                    "It is kept as it is; with one of the two softmaxes alone it would fuse.",
                )
            if user.op == "aten.logsumexp":
                return Declined(
                    "scores-reused",
                    "The sum of the exponentials (logsumexp) is read too, as where results for "
                    "blocks of keys are merged; no attention op gives it.",
                    user,
                    "Take one softmax over all keys: the fused operator works in blocks by itself.",
                )
            others = [value for value in user.inputs if value and value.producer is not node]
            if user.op == "aten.add.Tensor" and any(map(is_product, others)):
                return Declined(
                    "scores-reused",
                    "The scores are added to those of another attention (residual attention), at "
                    f"{user.loc}, so their product can't go away.",
                    scores,
                    "It is kept as it is; it would fuse if no other attention took its scores.",
                )
            seen.add(user)
            if user.op in _PRODUCTS:
                return Declined(
                    "scores-reused",
                    f"The scores are multiplied with other tensors too, at {user.loc}, without the "
                    "softmax, so their product can't go away.",
                    scores,
                    "It is kept as it is; without that second product it would fuse.",
                )
            queue.append(user)
    return Declined(
        "scores-reused",
        "The scores are read elsewhere too, so the product can't go away.",
        scores,
        "Return the attention weights instead of the scores.",
    )
