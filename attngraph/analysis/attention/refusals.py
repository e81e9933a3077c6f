"""Every reason for leaving an attention as it is: a code, a sentence and a hint, in one table.

Which row a graph gets is decided where it is read: in logits.py and site.py as far as the algebra
carries, in shapes.py where it doesn't, in without_softmax.py where there is no softmax at all, and
in the pass. docs/remarks.md explains the codes to a user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attngraph.ir import Node


@dataclass(frozen=True, slots=True)
class Declined:
    """Why a site stays as it is: a code of docs/remarks.md, a sentence, the blamed node, a hint."""

    code: str
    reason: str
    node: Node | None = None
    hint: str = ""


_LOWER_HINT = "Fill with -inf or torch.finfo(dtype).min, or mask last."
_MASK_HINT = "Mask the scores before the softmax instead."
_HEADS_HINT = "No attention op mixes heads; the layer stays as it is."
_BLOCKS_HINT = "Take one softmax over all keys: the fused operator works in blocks by itself."
_NO_OP_HINT = "It is kept as it is; no attention op computes it."
_JOIN_HINT = "Concatenate the keys and the values instead of the scores."
_PRODUCT_HINT = "It is kept as it is; scores that are a product of queries and keys would fuse."
_NO_VALUES_HINT = "Only the weights are used: there is no attention to fuse."
_DEFECT_HINT = "This is a defect of fuse-attention: please report it with the model's source line."


class Refusal(Enum):
    """A row: a code, a sentence with places for words, and a hint."""

    # Another kind of attention, or none.
    ADDITIVE = (
        "additive",
        "This is additive (Bahdanau) attention: the scores are a nonlinear function of a sum of "
        "queries and keys, for which onnxruntime has no attention op.",
        "It is kept as it is; scaled dot-product attention would fuse.",
    )
    POOLING = (
        "pooling",
        "The softmax weighs values that each row has of its own: pooling, a mixture, or attention "
        "to neighbours that were gathered for the row.",
    )
    OF_KEYS_ALONE = (
        "pooling",
        "Values are weighed by exponentials of scores that meet no queries, and divided by their "
        "sum: pooling, as in an attention-free transformer.",
    )
    DISTRIBUTION = ("distribution", "No attention is read at this softmax: {why}.")
    SOFTMAX_OF_PROJECTION = (
        "linear-attention",
        "This is linear attention: the softmax is taken of a projection, not of a product of "
        "queries and keys.",
        _NO_OP_HINT,
    )
    LINEAR = (
        "linear-attention",
        "This is linear attention: {what}, without a softmax over keys.",
        _NO_OP_HINT,
    )
    LINEAR_MASKED = (
        "linear-attention",
        "This is linear attention: scores with a mask or a decay, without a softmax over keys.",
        "It is kept as it is; under a causal mask, with products of one factor of each token as "
        "decays and its own sum as normaliser, it would be one operator.",
    )
    LINEAR_RUNNING = (
        "linear-attention",
        "This is linear attention: queries meet a running sum of products of keys and values.",
        "It is kept as it is; in float32, with nothing between the sum and the queries but "
        "products of one factor of each token as decays, it would be one operator.",
    )
    GRAPH = (
        "graph-attention",
        "This is attention over the edges of a graph: an index says which edges each softmax is "
        "over, and its sums are scattered.",
        "It is kept as it is; in a dense form, with a mask for the edges, it would fuse.",
    )
    ONLINE = (
        "online-softmax",
        "The softmax is taken over the keys in blocks, with a running maximum and sum, and is not "
        "read as one over all keys: sums may be rescaled otherwise, or rows become NaN whose first "
        "blocks are masked by -inf.",
        _BLOCKS_HINT,
    )
    NO_SOFTMAX = (
        "no-softmax",
        "The values are weighed by {weights}, not by a softmax over the keys.",
        "Use softmax(scores, -1), if attention with weights that sum to one is meant.",
    )
    EPSILON = (
        "epsilon-in-softmax",
        "{epsilon:g} {does} the sum that normalises the weights, so this is no softmax.",
        "Subtract the row maximum and leave the number out: the sum is then at least 1.",
    )
    NO_QUERIES = (
        "no-queries",
        "The scores are biases and a projection of the keys alone, one for each feature of the "
        "values: there are no queries.",
        _PRODUCT_HINT,
    )
    SYNTHESIZER = (
        "synthesizer",
        "Each score is a projection of one token alone, as in Synthesizer and Soft MoE, and no "
        "product of a query and a key.",
        _PRODUCT_HINT,
    )
    CONVOLVED = (
        "talking-heads",
        "The {what} are mixed {across} by a convolution.",
        "No attention op mixes them; the layer stays as it is.",
    )
    SCORES_MIXED = (
        "talking-heads",
        "The scores are mixed across heads before the softmax.",
        _HEADS_HINT,
    )
    WEIGHTS_MIXED = (
        "talking-heads",
        "The attention weights are mixed across heads before they meet the values.",
        _HEADS_HINT,
    )
    AXES = ("axes-not-attention", "This is no attention op: {why}.")
    HEADS_DYNAMIC = ("heads-dynamic", "The number of heads is only known at run time.")
    NO_VALUES = (
        "no-values",
        "The attention weights are not multiplied with values over the key axis.",
        _NO_VALUES_HINT,
    )
    NO_VALUES_OF_ADDITIVE = (
        "no-values",
        "The weights of an additive attention are not multiplied with values over the key axis.",
        _NO_VALUES_HINT,
    )
    JOINED_SCORES = (
        "joined-scores",
        "The scores of several products are joined along the keys for one softmax, and are not "
        "read as those of one attention over all of these keys.",
        _JOIN_HINT,
    )
    JOINED_QUERIES = (
        "joined-scores",
        "Scores are joined along the keys for one softmax, but these are of other queries than "
        "the first, as where one part alone is rotated.",
        "Give every part the same queries: what one part adds to them can be a bias of its scores.",
    )
    JOINED_CAPS = (
        "joined-scores",
        "Scores are joined along the keys for one softmax, of which some are capped by tanh and "
        "others aren't, or by another number.",
        "Cap the scores after they are joined.",
    )
    JOINED_FACTORS = (
        "joined-scores",
        "Scores are joined along the keys for one softmax, of which a part is multiplied by "
        "factors of its own that differ from query to query.",
        "Multiply all scores, or the queries, by the same factors.",
    )
    JOINED_APART = (
        "joined-scores",
        "Scores are joined along the keys for one softmax, but no query shares all of its keys "
        "with another one, as in criss-cross attention: joined, they would be a copy per query.",
        "It is kept as it is; scores of all pairs, with a mask for the others, would fuse.",
    )
    OTHER_AXIS = (
        "softmax-axis",
        "The weights are normalised over one axis and multiplied with values over another.",
        "If this is meant to be attention, take the softmax over the keys.",
    )
    RENORMALISED = (
        "softmax-axis",
        "The weights are normalised by the softmax over one axis, and by their sum over another, "
        "as in slot attention: no attention op does both.",
        "It is kept as it is; weights from one softmax over the keys would fuse.",
    )

    # Scores that are no product of queries and keys, or not that alone.
    SCORES_GIVEN = (
        "logits-not-a-product",
        "The logits are an input or a constant, not a product.",
    )
    NOT_A_PRODUCT = (
        "logits-not-a-product",
        "The logits come from {op}, which is not read as a product of Q and K.",
        "Write the scores as a matrix product of queries and keys.",
    )
    LAID_OUT = (
        "logits-not-a-product",
        "The scores are products of queries and keys that {op} lays out anew, as for windows "
        "around each query, so which values the weights belong to is not read.",
        "It is kept as it is; scores of all pairs, with a mask for the others, would fuse.",
    )
    WRITTEN_OVER = (
        "logits-not-a-product",
        "Some of the scores are written over by {op}, so not all of them are products of queries "
        "and keys.",
        "It is kept as it is; where that hides keys, masked_fill with -inf and a mask of these "
        "places would fuse.",
    )
    NOT_OF_PAIRS = (
        "logits-not-a-product",
        "The product behind the logits doesn't pair queries with keys.",
    )
    TWO_PRODUCTS = (
        "logits-not-a-product",
        "The logits are two products that are multiplied element by element.",
    )
    NOT_UNDERSTOOD = ("logits-not-a-product", "{op} is not understood here.")
    COARSE = (
        "logits-not-a-product",
        "{number:g} is added to the scores, next to which they have no digits behind the point.",
        "Leave it out: a softmax doesn't see a number that is added to every score.",
    )
    ALPHA_SYMBOLIC = ("logits-not-a-product", "The alpha of a sum is symbolic.")
    PICKED = (
        "logits-not-a-product",
        "The softmax is over scores picked by {op}, so each query has values of its own.",
        "Fill the scores that are not picked with -inf and keep all values: that mask fuses.",
    )
    COMPARED = (
        "logits-not-a-product",
        "The scores are a sum over differences, or sums, of queries and keys, not a product.",
        "Write -|q - k|² as 2 q·k - |k|²: they differ by |q|², which a softmax doesn't see.",
    )
    SCALE_UNKNOWN = ("scale-unknown", "The scores are scaled by {scale}.")
    HEAD_SIZE_UNKNOWN = ("scale-unknown", "The head size is only known at run time.")
    SCALED_LATE = (
        "scores-times-tensor",
        "Scores that already hold a bias or mask are multiplied by {what}.",
        "Multiply the queries by it instead, before the scores are computed.",
    )
    SCALED_BY_PAIRS = (
        "scores-times-tensor",
        "The scores are multiplied by a tensor that differs from query to query and from key to "
        "key.",
        "Multiply the queries and the keys by a factor of their own instead.",
    )
    NARROWED = (
        "scores-narrowed",
        "The scores are rounded from {before} to {after}, in which they may overflow.",
        "Compute the scores, the softmax and the values in one dtype.",
    )
    ROUNDED = (
        "scores-narrowed",
        "A bias is computed from the scores as {dtype} rounds them, and an operator adds it to "
        "scores that it doesn't round.",
        "Multiply queries and keys in float32.",
    )
    CLAMPED = (
        "logits-clamped",
        "The scores are clamped, which no attention op does.",
        "Drop the clamp, or cap the scores smoothly: c * tanh(scores / c) fuses.",
    )
    CAPPED_LATE = (
        "softcap-after-mask",
        "The scores are capped by tanh after a bias or mask was applied.",
        "Cap the scores first, then add the bias and the mask.",
    )
    READ_BY_SOFTMAX = (
        "scores-reused",
        "Another softmax, at {loc}, reads the scores too, and is no attention that would fuse, so "
        "their product is computed anyway.",
        "It is kept as it is; it would fuse if the other softmax did, or had scores of its own.",
    )
    READ_BY_LOGSUMEXP = (
        "scores-reused",
        "The logsumexp of the scores is read too, as it is to merge results for blocks of keys; "
        "no attention op returns it.",
        _BLOCKS_HINT,
    )
    READ_BY_RESIDUAL = (
        "scores-reused",
        "The scores are added to those of another attention (residual attention), at {loc}, so "
        "their product is computed anyway.",
        "It is kept as it is; it would fuse if no other attention took its scores.",
    )
    READ_BY_PRODUCT = (
        "scores-reused",
        "The scores are multiplied with other tensors too, at {loc}, without the softmax, so their "
        "product is computed anyway.",
        "It is kept as it is; without that second product it would fuse.",
    )
    READ_ELSEWHERE = (
        "scores-reused",
        "The scores are read elsewhere too, so their product is computed anyway.",
        "Return the attention weights instead of the scores.",
    )

    # Masks and biases of the scores.
    WEAK_FILL = (
        "fill-not-a-mask",
        "Scores are replaced by {fill:g}, which is not low enough to mask them.",
        "Fill masked scores with -inf or torch.finfo(dtype).min.",
    )
    FILL_UNKNOWN = (
        "fill-not-a-mask",
        "Scores are replaced by a tensor, which may not be low enough to mask them.",
        "Fill masked scores with -inf or torch.finfo(dtype).min.",
    )
    FILL_OF_SCORES = (
        "fill-not-a-mask",
        "In some places the scores are those of another product of queries and keys.",
        _NO_OP_HINT,
    )
    MASK_NEGATED = ("mask-negated", "A masked score is multiplied by a negative number.")
    MASK_SHIFTED = ("mask-shifted", "A number is added to masked scores.")
    FILL_CHANGED = (
        "weak-fill",
        "Scores are filled with {fill:g} and then changed again, so a row in which everything is "
        "masked depends on both.",
        _LOWER_HINT,
    )
    FILL_REACHED = (
        "weak-fill",
        "A fill of {fill:g} counts as -inf, as if no score or bias came near it.",
        _LOWER_HINT,
    )
    FILL_SCALED = (
        "weak-fill",
        "Scores are scaled before {fill:g} is added to those that are masked, not after, so a "
        "row in which everything is masked is rounded otherwise.",
        "Scale the query, or the scores before they are masked, or mask with -inf.",
    )
    FILL_SUMMED = (
        "weak-fill",
        "{fill:g} is added to scores that are masked, and another bias besides, which an operator "
        "adds up first, so a row in which everything is masked is rounded otherwise.",
        "Mask with -inf or torch.finfo(dtype).min; or, if each row has a key, --assume "
        "no-fully-masked-rows.",
    )
    KEYS_MAY_BE_NAN = (
        "nan-keys",
        "A row of zeros, as padding is, becomes NaN at {where}. The mask writes a number over the "
        "scores of such keys; the operator adds its mask, which leaves NaN.",
        "Divide by no zero: use F.normalize, or add a small number to the divisor.",
    )
    TIMES_INFINITE = (
        "weak-fill",
        "A bias that a mask multiplies by 0 counts as finite: of -inf, that would be NaN.",
        "Fill masked scores with torch.where.",
    )
    BIASES_CANCEL = (
        "biases-cancel",
        "Biases are added up before they are added to the scores, though they may cancel.",
        "Give one of them as a bool mask, or add them up before the scores.",
    )

    # Weights on their way to the values.
    WEIGHTS_CHANGED = (
        "weights-changed",
        "The attention weights go through {op} before they meet the values.",
        "Multiply the weights with the values as they come from the softmax.",
    )
    WEIGHTS_CUT = (
        "weights-masked",
        "The attention weights outside of a triangle are set to zero, where the scores were not "
        "masked.",
        _MASK_HINT,
    )
    WEIGHTS_REFILLED = (
        "weights-masked",
        "The attention weights are set to zero where the scores were not masked.",
        _MASK_HINT,
    )
    WEIGHTS_REFILLED_BIASED = (
        "weights-masked",
        "The attention weights are set to zero in rows that a bias may hide as well.",
        _MASK_HINT,
    )
    WEIGHTS_SCALED_BY_PAIRS = (
        "weights-times-tensor",
        "The attention weights are multiplied by a tensor that differs from query to query and "
        "from key to key.",
        _MASK_HINT,
    )
    WEIGHTS_UNGUARDED = (
        "weights-unguarded",
        "The attention weights are returned before their NaN rows are replaced.",
        "Return the weights after the guard.",
    )
    VALUES_FROM_WEIGHTS = (
        "values-from-weights",
        "The values are computed from the very weights that they are multiplied with.",
        "It is kept as it is; values that don't depend on the weights would fuse.",
    )

    # The fused form was made, and taken back.
    UNEQUAL = (
        "unequal",
        "The fused form is not equal, so it was taken back: {why}.",
        _DEFECT_HINT,
    )
    UNWRITABLE = ("unequal", "The fused form can't be written down: {why}", _DEFECT_HINT)
    NOT_EVALUATED = (
        "not-evaluated",
        "No trial could tell whether the fused form is equal, so it was left out: {why}.",
    )

    def __init__(self, code: str, sentence: str, hint: str = "") -> None:
        self.code = code
        self.sentence = sentence
        self.hint = hint

    def at(self, node: Node | None = None, **words: object) -> Declined:
        """This refusal, of a site that `node` is to blame for, with words in their places."""
        return Declined(self.code, self.sentence.format(**words), node, self.hint)
