"""What an op is: a layout, a softmax, pointwise. Each trait is stated here, and nowhere else.

`node.op in SOFTMAX` asks, and `node.op in LAYOUT | CAST` asks for either. A trait holds for an ATen
op if it is listed here, or where torch says so itself (by its tags and schemas); an op of the
`attn` dialect states its own where it is defined.

A trait says what an op *is*. What a reading makes of each op, how it transposes an index or scales
an interval, is the reading's own, in its registry of rules. OPAQUE ops have no other trait: each
analysis stops at them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from attngraph.errors import IRError
from attngraph.ir.ops import OpDef, op_def, registered_ops


class Trait:
    """A property of ops. `op in trait` asks for it by an op's name; `|` combines traits."""

    def __init__(self, name: str, holds: Callable[[OpDef], bool], listed: frozenset[str]) -> None:
        self.name = name
        self._holds = holds
        self._listed = listed
        self._known: dict[str, bool] = {}

    def __contains__(self, op: object) -> bool:
        if not isinstance(op, str):
            return False
        known = self._known.get(op)
        if known is not None:
            return known
        try:
            definition = op_def(op)
        except IRError:  # of a library that isn't loaded; it may be later
            return op in self._listed
        known = op in self._listed or self in definition.traits or self._holds(definition)
        self._known[op] = known
        return known

    def __iter__(self) -> Iterator[str]:
        """The ops that state it, for registries; those that torch's tags add are not among them."""
        yield from sorted(self._listed)
        yield from sorted(name for name in registered_ops() if name in self)

    def __or__(self, other: Trait) -> Trait:
        return _either(self, other)

    def __repr__(self) -> str:
        return self.name


@functools.cache
def _either(one: Trait, other: Trait) -> Trait:
    return Trait(
        f"{one} | {other}",
        lambda definition: definition.name in one or definition.name in other,
        one._listed | other._listed,
    )


def _never(definition: OpDef) -> bool:
    return False


def _stem(definition: OpDef) -> str:
    return definition.name.split(".")[1]


def _tagged(tag: torch.Tag) -> Callable[[OpDef], bool]:
    return lambda definition: tag in getattr(definition.function, "tags", ())


def _trait(name: str, aten: str = "", holds: Callable[[OpDef], bool] = _never) -> Trait:
    """A trait of the ATen ops that are listed, and of those whose definition says so."""
    if name in TRAITS:
        raise ValueError(f"There is a trait {name!r} already.")
    trait = Trait(name, holds, frozenset(f"aten.{op}" for op in aten.split()))
    TRAITS[name] = trait
    return trait


TRAITS: dict[str, Trait] = {}
"""Each trait by its name."""

# Layouts: each element of a result is an element of the first input.
RESHAPE = _trait(  # the same elements in the same order
    "reshape",
    "reshape view _unsafe_view view_as reshape_as _reshape_copy view_copy unsqueeze squeeze "
    "squeeze.dim squeeze.dims flatten.using_ints unflatten.int ravel",
)
DROPOUT = _trait("dropout", "dropout feature_dropout alpha_dropout feature_alpha_dropout")
COPY = DROPOUT | _trait(  # the same tensor: dropout is off where a graph is compiled
    "copy",
    "clone contiguous alias detach lift_fresh lift_fresh_copy positive resolve_conj resolve_neg",
)
PERMUTE = _trait(
    "permute",
    "permute transpose.int t mT numpy_T swapaxes swapdims movedim.int movedim.intlist moveaxis.int "
    "moveaxis.intlist",
)
EXPAND = _trait("expand", "expand expand_as expand_copy broadcast_to")
REPEAT = _trait("repeat", "repeat tile repeat_interleave.self_int")
SELECT = _trait("select", "select.int unbind.int")  # one place of an axis, which is left out
SLICE = _trait("slice", "slice.Tensor narrow")  # some places of an axis
SPLIT = _trait(  # all places of an axis, one after the other
    "split",
    "split.Tensor split.sizes split_with_sizes chunk unsafe_chunk unsafe_split.Tensor "
    "unsafe_split_with_sizes tensor_split.sections tensor_split.indices",
)
PART = SELECT | SLICE | SPLIT
FLIP = _trait("flip", "flip")
ROLL = _trait("roll", "roll")
LAYOUT = RESHAPE | COPY | PERMUTE | EXPAND | REPEAT | PART | FLIP

# Elements that are chosen, joined or cut by their places.
JOIN = _trait("join", "cat concat concatenate stack")
PAD = _trait("pad", "pad constant_pad_nd")
UNFOLD = _trait("unfold", "unfold")  # windows of an axis, which may overlap
TRIANGLE = _trait("triangle", "tril triu")  # zeros off a triangle
INDEX = _trait("index", "index_select index.Tensor _unsafe_index.Tensor")  # whole rows, by place
EMBEDDING = _trait("embedding", "embedding")
GATHERED = INDEX | _trait("gathered", "gather")  # elements by computed places
GATHER = GATHERED | EMBEDDING
SCATTER = _trait(
    "scatter",
    "scatter_add index_add scatter_reduce.two scatter.src scatter.value scatter.reduce "
    "scatter.value_reduce index_put index_reduce select_scatter slice_scatter put "
    "diagonal_scatter",
)

# Pointwise: an element of the result depends on the elements at its place, after broadcasting.
CAST = _trait(
    "cast", "_to_copy to.dtype to.dtype_layout to.device to.other type_as"
)  # the numbers in another dtype
COMPARISON = _trait(
    "comparison",
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor "
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar",
)
FLOAT_TEST = _trait("float test", "isnan isinf isfinite isneginf isposinf")
CHOICE = _trait(  # elements of one operand or another, by a predicate
    "choice",
    "where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar "
    "masked_fill.Tensor",
)
LOGICAL = _trait(
    "logical",
    "__and__.Tensor __or__.Tensor __xor__.Tensor __and__.Scalar __or__.Scalar __xor__.Scalar "
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar "
    "bitwise_xor.Scalar bitwise_not logical_and logical_or logical_xor logical_not",
)
COMPLEMENT = _trait("complement", "bitwise_not logical_not")  # one and the same of bools
ADDITIVE = _trait("additive", "add.Tensor sub.Tensor")  # of two tensors
SHIFT = _trait("shift", "add.Scalar sub.Scalar")  # by a number
MULTIPLICATIVE = _trait("multiplicative", "mul.Tensor div.Tensor")  # of two tensors
SCALE = _trait("scale", "mul.Scalar div.Scalar")  # by a number
QUOTIENT = _trait(  # of two numbers, or what is left of it
    "quotient",
    "div.Tensor div.Scalar floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar "
    "fmod.Tensor fmod.Scalar",
)
ROUNDED_DIVISION = _trait("rounded division", "div.Tensor_mode div.Scalar_mode")
MAGNITUDE = _trait("magnitude", "abs")
NEGATION = _trait("negation", "neg")
POWER = _trait("power", "pow.Tensor_Scalar pow.Tensor_Tensor square")
ROOT = _trait("root", "sqrt")
RECIPROCAL = _trait("reciprocal", "reciprocal rsqrt")
REVERSED = _trait("reversed difference", "rsub.Scalar rsub.Tensor")  # y − x
ADDITION = ADDITIVE | SHIFT | REVERSED  # of two tensors, or of one and a number
MULTIPLICATION = MULTIPLICATIVE | SCALE  # the same
ARITHMETIC = ADDITION | MULTIPLICATION | NEGATION
CLAMP = _trait("clamp", "clamp clamp_min clamp_max clip")
MAXIMUM = _trait("maximum", "maximum max.other")
MINIMUM = _trait("minimum", "minimum min.other")
EXPONENTIAL = _trait("exponential", "exp exp2 pow.Scalar")
LOGARITHM = _trait("logarithm", "log log2 log10 log1p")
COMMUTATIVE = _trait(  # in its two operands
    "commutative",
    "add.Tensor mul.Tensor maximum minimum logical_and logical_or logical_xor __and__.Tensor "
    "__or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor",
)
ROUNDING = _trait("rounding", "floor ceil round trunc")
WAVE = _trait("wave", "sin cos")
GELU = _trait("gelu", "gelu")
ACTIVATION = _trait("activation", "gelu silu relu sigmoid tanh leaky_relu hardswish prelu")
SMOOTH = _trait(  # analytic where they are defined, beside those of arithmetic
    "smooth",
    "sigmoid tanh silu gelu log_sigmoid erf expm1 sinh cosh atan asinh sin cos sqrt rsqrt "
    "reciprocal lerp.Scalar lerp.Tensor addcmul addcdiv mean.dim softmax.int log_softmax.int",
)
POINTWISE = _trait(
    "pointwise",
    "__and__.Tensor __or__.Tensor __and__.Scalar __or__.Scalar where.ScalarSelf where.ScalarOther "
    "where.Scalar masked_fill.Tensor rsub.Tensor hardswish fill.Scalar fill.Tensor floor_divide "
    "floor_divide.Scalar isclose log_sigmoid special_digamma special_erfinv special_exp2 "
    "special_logit special_sinc _to_copy to.dtype",
    _tagged(torch.Tag.pointwise),
)

# Sums over axes.
MATMUL = _trait("matmul", "matmul bmm mm mv dot einsum")  # of operands and nothing else
SOLVE = _trait("solve", "linalg_solve_triangular")  # the inverse of one operand times the other
INVERSE = _trait("inverse", "linalg_inv inverse linalg_solve")  # an error where there is none
CHOLESKY = _trait("cholesky", "linalg_cholesky")  # an error unless positive definite
MATRIX = _trait(  # of a matrix as a whole: factors, what is solved with them, determinants, powers
    "matrix",
    "linalg_lu linalg_qr linalg_cholesky_ex linalg_inv_ex _linalg_solve_ex cholesky_inverse "
    "cholesky_solve _linalg_slogdet logdet linalg_matrix_exp",
)
LINEAR = _trait("linear", "linear")  # x Wᵀ + b
QUANTIZED = _trait("quantized")  # of these, those with a weight in codes
DEQUANTIZED = _trait("dequantized")  # the numbers that codes stand for
ADDMM = _trait("addmm", "addmm baddbmm")  # a tensor and a product
PRODUCT = MATMUL | LINEAR | ADDMM  # of matrices, whatever is added to it
CONVOLUTION = _trait(
    "convolution",
    "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding",
)
ANY_CONVOLUTION = CONVOLUTION | _trait(  # of any layout, transposed ones too
    "any convolution",
    "convolution conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
)
CAUSAL_CONVOLUTION = _trait("causal convolution")  # of each channel, with a state
WEIGHTED = _trait(  # a product with a weight (N, …), which has a row for each feature of the result
    "weighted", "linear conv1d conv2d conv3d"
)
SUM = _trait("sum", "sum.dim_IntList")
MEAN = _trait("mean", "mean.dim")
REDUCTION = _trait("reduction", "median nanmedian histc", _tagged(torch.Tag.reduction))
MAXIMUM_ALONG = _trait("maximum along an axis", "amax max.dim")
PLAIN_SOFTMAX = _trait("plain softmax", "softmax.int _softmax")  # exp(x) / Σ exp(x) in every row
SOFTMAX = _trait("softmax", "softmax.int _softmax _safe_softmax")
LOG_SUM = _trait("log of a sum of exponentials", "logsumexp")
LOG_ADD = _trait("log of the exponentials of two values, added", "logaddexp")
LOG_SOFTMAX = _trait("log softmax", "log_softmax.int _log_softmax")
CENTRED_NORM = _trait("centred norm", "layer_norm")  # subtracts the mean
FEATURE_NORM = _trait(  # over the last axes, with a weight for each feature
    "feature norm", "layer_norm rms_norm"
)
NORM = FEATURE_NORM | _trait("norm", "group_norm")
BATCH_NORM = _trait("batch norm", "batch_norm _native_batch_norm_legit_no_training")
ATTENTION = _trait("attention", "scaled_dot_product_attention")
ROTARY = _trait("rotary")
RECURRENCE = _trait("recurrence")  # one step after the other
RUNNING_SUM = _trait("running sum", "cumsum cumprod")  # or product
CUMULATIVE = RUNNING_SUM | _trait("cumulative", "cummax cummin logcumsumexp")
EXPERTS = _trait("experts")  # a few of many functions of a row, weighted
FOURIER = _trait(
    "Fourier transform",
    "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn "
    "fft_ifftn fft_rfftn fft_irfftn _fft_c2c _fft_r2c _fft_c2r",
)

# Tensors that are made of sizes and numbers.
FILL = _trait(  # one number everywhere
    "fill",
    "full full_like new_full scalar_tensor zeros zeros_like new_zeros ones ones_like new_ones",
)
RANGE = _trait("range", "arange arange.start arange.start_step")
UNSET = _trait(  # whatever the memory holds
    "unset", "", lambda definition: _stem(definition).startswith(("empty", "new_empty"))
)
RANDOM = _trait("random", "", _tagged(torch.Tag.nondeterministic_seeded))
MUTATING = _trait("mutating", "", lambda definition: definition.mutates)

LARGEST = _trait("largest", "topk max.dim argmax")  # the places of the largest along an axis
SORTED = _trait("sorted", "sort sort.stable argsort argsort.stable")
PLACED = _trait("placed", "where nonzero")  # the places of what is true
ONE_HOT = _trait("one-hot", "one_hot")
COUNTED = _trait("counted", "bincount histc")  # how often each number occurs
TRUTH = _trait("truth", "any any.dim any.dims all all.dim all.dims")

# Ops that no reading sees through, whose other traits nobody asks for.
OPAQUE = _trait(
    "opaque",
    "_adaptive_avg_pool3d _cdist_forward cdist _grouped_mm _int_mm _local_scalar_dense "
    "_pdist_forward _prelu_kernel "
    "_native_batch_norm_legit_functional native_batch_norm instance_norm "
    "adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
    "as_strided avg_pool1d avg_pool2d avg_pool3d bucketize.Scalar bucketize.Tensor conj "
    "cosine_similarity "
    "cross_entropy_loss diag diag_embed diagonal diagonal_copy diff embedding_bag "
    "embedding_bag.padding_idx eye eye.m grid_sampler_3d hamming_window isin.Tensor_Scalar "
    "isin.Tensor_Tensor item kthvalue "
    "linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor "
    "masked_select max_pool2d max_unpool2d max_unpool3d mode nonzero_static "
    "pixel_shuffle take trace "
    "median.dim nanmedian.dim pad_sequence quantile searchsorted.Scalar searchsorted.Tensor "
    "tril_indices unique_consecutive _unique2 upsample_bicubic2d upsample_bilinear2d "
    "upsample_nearest2d vander view.dtype view_as_complex view_as_real "
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec "
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec "
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec",
)
