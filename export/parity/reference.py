"""The eager module's outputs, as it computes them and in float64.

The float64 run is the same module on the same weights. Models pin float32 inside (norms, rotary
tables, `softmax(dtype=torch.float32)`), which would round the exact run too, so every floating
dtype that is asked for during that run becomes float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.errors import UsageError
from attngraph.export.formats import Precision
from attngraph.export.parity.eager_loops import plain_loops
from attngraph.export.parity.half_rounding import is_as_finite, narrow, rounded, rounding
from attngraph.export.parity.nudging import SMALLER, Slacks, nudging
from attngraph.export.parity.saturation import BOUNDED
from attngraph.export.parity.summation import SUMS
from attngraph.inference import each_leaf, inference, is_named, named_in, restored
from attngraph.ir.storage import as_pairs, wraps

Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Nudged: TypeAlias = Callable[[], tuple[tuple[tuple[torch.Tensor, ...], ...], ...]]
"""Makes pairs of runs in float64, the second with a 16th of what the first is off."""

_HALVES: dict[Precision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

SAMPLES = 8

_TO_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


_MOST_BYTES = 1 << 28
"""The most bytes of parameters in float64."""


@dataclass(frozen=True)
class ReferenceOutputs:
    """What one input gives; `exact[i]` is None where float64 can't be had, and `note` says why.

    Integer and bool outputs have no float64 form: theirs is the eager tensor. `sample` runs the
    module again, SAMPLES times, on weights and inputs that differ by one rounding: what eager could
    as well have returned. `single` are the outputs in float32 where `eager` are those in a half.
    `said` is what `eager` returned beside tensors, as `said_by` gives it.
    `gates` runs it in float64 with bounded functions as far off as a kernel's are, and with less of
    that (saturation.py), `sums` with sums over rows (summation.py).
    """

    names: tuple[str, ...]
    eager: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor | None, ...]
    note: str = ""
    sample: Callable[..., tuple[tuple[torch.Tensor, ...], ...]] = tuple
    single: tuple[torch.Tensor, ...] = ()
    gates: Nudged = tuple
    sums: Nudged = tuple
    said: tuple[tuple[str, Any], ...] = ()

    def cut(self, part: Callable[[Sequence[Any]], tuple[Any, ...]]) -> ReferenceOutputs:
        """Part of what each run returns; `part` is given None where float64 can't be had."""
        return dataclasses.replace(
            self,
            eager=part(self.eager),
            exact=part(self.exact),
            sample=lambda *eps: tuple(map(part, self.sample(*eps))),
            single=part(self.single) if self.single else (),
            gates=lambda: tuple(tuple(map(part, pair)) for pair in self.gates()),
            sums=lambda: tuple(tuple(map(part, pair)) for pair in self.sums()),
        )

    def in_its_dtypes(self, candidate: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of a converted model, which keep the dtypes of the original, as eager's."""
        if len(candidate) != len(self.eager):
            return tuple(candidate)
        pairs = zip(candidate, self.eager, strict=True)
        return tuple(
            tensor.to(eager.dtype) if tensor.is_floating_point() else tensor
            for tensor, eager in pairs
        )


class Reference:
    """Runs a module eagerly as it is and again in float64, leaving the module as it was found.

    By default `module` is in `precision`: its weights are taken as exact, so that converting them
    is no part of the error budget. With `converted` it is in float32, and is run eagerly with its
    parameters and float inputs in `precision`; the float64 run has the original ones, so that what
    the conversion of weights costs counts on both sides.

    All runs are in eval mode, without gradients and without the fused path of
    nn.MultiheadAttention. Buffers and inputs are copied, so a module that writes into them doesn't
    change what the next run sees. A converted copy of the weights lives for one call; in float64,
    above `_MOST_BYTES`, each operator converts what it reads, where the module runs so. `numbers`
    are those of `flatten_outputs`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        precision: Precision,
        converted: bool = False,
        numbers: Collection[int] = (),
    ) -> None:
        self.module = module
        self._numbers = numbers
        self.precision = precision
        self.converted = converted and precision != "fp32"

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> ReferenceOutputs:
        """Outputs for one input, flattened; see `flatten_outputs` for what raises UsageError."""
        sample = functools.partial(self._sample, args, kwargs or {})
        with inference(self.module), plain_loops():
            with restored(self.module):
                output = self._run(args, kwargs or {}, _copy)
                said = said_by(output, self._numbers)
                eager = [(n, t.clone()) for n, t in flatten_outputs(output, self._numbers)]
            names = tuple(name for name, _ in eager)
            tensors = tuple(tensor for _, tensor in eager)
            single = tensors if self.converted else ()
            if self.converted:
                tensors = self._halved(tensors, args, kwargs or {}, _same)
            try:
                exact = self._exact(args, kwargs or {})
            except (
                Exception
            ) as error:  # a model may contain anything that works in its own dtype only
                reason = " ".join(str(error).split()) or type(error).__name__
                note = f"the module doesn't run in float64: {reason[:200]}"
                return ReferenceOutputs(
                    names, tensors, _only_exact(tensors), note, sample, said=said
                )
        if [(n, t.shape) for n, t in exact] != [(n, t.shape) for n, t in eager]:
            note = "the module returns other outputs in float64"
            return ReferenceOutputs(names, tensors, _only_exact(tensors), note, sample, said=said)
        pairs = zip(tensors, exact, strict=True)
        doubled = tuple(e if t.is_floating_point() else t for t, (_, e) in pairs)
        gates, sums = (
            functools.partial(self._nudged, slacks, args, kwargs or {})
            for slacks in (BOUNDED, SUMS)
        )
        return ReferenceOutputs(names, tensors, doubled, "", sample, single, gates, sums, said)

    def eager(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The outputs of one run of the module as it is."""
        with inference(self.module), plain_loops():
            return self._tensors(args, kwargs, _copy)

    def _exact(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[str, torch.Tensor]]:
        at_once = 8 * sum(each.numel() for each in self.module.parameters()) <= _MOST_BYTES
        with _Float64():
            if not at_once:
                # What looks at a parameter's dtype may fail: it is the module's own.
                with contextlib.suppress(Exception):
                    return self._flat(args, kwargs, _double, weights=False)
            return self._flat(args, kwargs, _double)

    def _sample(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], eps: float = 0.0
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """`eps` is that of a half which the module computes in inside, if it does."""
        random = torch.Generator().manual_seed(0)
        nudge = functools.partial(_nudged, random=random, eps=eps)
        with inference(self.module), plain_loops():
            if self.converted:
                single = self._tensors(args, kwargs, _copy)
                return tuple(self._halved(single, args, kwargs, nudge) for _ in range(SAMPLES))
            return tuple(self._tensors(args, kwargs, nudge) for _ in range(SAMPLES))

    def _nudged(
        self, slacks: Slacks, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[tuple[torch.Tensor, ...], ...], ...]:
        def run(seed: int, size: float) -> tuple[torch.Tensor, ...]:
            with inference(self.module), plain_loops(), nudging(slacks, size, seed):
                return tuple(tensor for _, tensor in self._exact(args, kwargs))

        eps = torch.finfo(torch.float32).eps
        pairs = []
        for seed in range(SAMPLES):
            # What fails took another branch, and shows nothing.
            with contextlib.suppress(Exception):
                pairs.append((run(seed, eps), run(seed, eps / SMALLER)))
        return tuple(pairs)

    def _halved(
        self,
        single: tuple[torch.Tensor, ...],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        nudge: Convert,
    ) -> tuple[torch.Tensor, ...]:
        """The module's outputs in the half dtype, given those in float32.

        Buffers (rotary tables, positions) stay in float32 where the module runs so. One that runs
        in half in no way, or overflows, is run in float32 with the results of its operators
        rounded. Integers are those of float32.
        """
        dtype = _HALVES[self.precision]

        def half(tensor: torch.Tensor) -> torch.Tensor:
            return nudge(narrow(tensor, dtype))

        def few_digits(tensor: torch.Tensor) -> torch.Tensor:
            return rounded(tensor, dtype, nudge)

        found: tuple[torch.Tensor, ...] | None = None
        for buffers in (_copy, half):
            try:
                found = self._tensors(args, kwargs, half, buffers)
            except Exception:  # a model may contain anything that works in its own dtype only
                continue
            if is_as_finite(found, single):
                break
        else:
            with rounding(dtype):
                found = self._tensors(args, kwargs, few_digits, _copy)
        pairs = zip(found or (), single, strict=True)
        return tuple(half if each.is_floating_point() else each for half, each in pairs)

    def _tensors(self, *run: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for _, tensor in self._flat(*run))

    def _flat(self, *run: Any, weights: bool = True) -> list[tuple[str, torch.Tensor]]:
        """Each run begins with the state that the module has; an output may be a part of that."""
        with restored(self.module):
            outputs = flatten_outputs(self._run(*run, weights=weights), self._numbers)
            return [(name, tensor.clone()) for name, tensor in outputs]

    def _run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        convert: Convert,
        buffers: Convert | None = None,
        *,
        weights: bool = True,
    ) -> Any:
        """The module's output, with each weight, input and buffer as `convert` makes it.

        `buffers` converts the buffers in its place. Without `weights` the parameters are the
        module's own.
        """

        def converted(value: Any) -> Any:
            return convert(value) if isinstance(value, torch.Tensor) else value

        inputs, keywords = each_leaf(converted, (tuple(args), dict(kwargs)))
        plain = convert is _copy  # then nothing is written to the weights, nor are they copied
        if isinstance(self.module, torch.jit.ScriptModule):  # which functional_call refuses
            module = self.module if plain else copy.deepcopy(self.module)
            if not plain:
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = convert(tensor)
            return module(*inputs, **keywords)
        each = buffers or convert
        state = {name: each(buffer) for name, buffer in self.module.named_buffers()}
        for name, parameter in self.module.named_parameters():
            state[name] = _converted(parameter, convert) if weights and not plain else parameter
        return functional_call(self.module, state, inputs, keywords)


@contextlib.contextmanager
def in_float64() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Within it every floating operator computes in float64; gives what converts an operand."""
    with torch.no_grad(), _Float64():
        yield _double


def flatten_outputs(output: Any, numbers: Collection[int] = ()) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module's output with their path, such as "logits" or "hidden_states.3".

    None, numbers and such as dtypes, which no ONNX output stands for, are dropped, but for the
    leaves at the positions `numbers`: what is computed from sizes or values is a tensor without
    axes. Complex numbers are pairs of reals. Raises UsageError for an object that pytree can't open
    (a cache, say) and for an output without any tensor.
    """
    found = []
    leaves = [pair for pair in _named_leaves(output) if not is_named(pair[1])]
    for at, (name, leaf) in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            found.append((name, as_pairs(leaf)))
        elif at in numbers:
            found.append((name, torch.tensor(leaf)))
        elif leaf is not None and not isinstance(leaf, bool | int | float | str):
            raise UsageError(
                f"Output {name!r} of the module is a {type(leaf).__name__}, which can't be "
                "compared: return tensors, or for a cache pass use_cache=False."
            )
    if not found:
        raise UsageError("The module returns no tensor, so there is nothing to compare.")
    return found


def said_by(output: Any, numbers: Collection[int] = ()) -> tuple[tuple[str, Any], ...]:
    """What a module returns beside tensors, leaf by leaf with its path, and `...` for each tensor.

    So are the leaves at the positions `numbers`, which don't count such as dtypes. Behind them come
    such as Enums in attributes.
    """
    found: list[tuple[str, Any]] = []
    at = 0
    for path, leaf in _named_leaves(output):
        is_computed = not is_named(leaf) and (isinstance(leaf, torch.Tensor) or at in numbers)
        found.append((path, ... if is_computed else leaf))
        at += not is_named(leaf)
    return (*found, *(("", each) for each in named_in(pytree.tree_structure(output))))


def _named_leaves(output: Any) -> list[tuple[str, Any]]:
    """Each leaf with its path; with its position where a type is known to pytree without keys."""
    try:
        leaves, _ = pytree.tree_flatten_with_path(output)
    except ValueError:
        return [(str(place), leaf) for place, leaf in enumerate(pytree.tree_leaves(output))]
    return [(".".join(map(_key, path)) or "output", leaf) for path, leaf in leaves]


def _dispatch_in_float64(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run one operator in float64: the dtypes it is asked for, its operands and its results."""
    if func is torch.ops.aten._assert_tensor_metadata.default:  # an exported module's guard
        return None
    if func is torch.ops.aten.embedding.default:  # rows as they are: the table isn't computed on
        return _promote(func(*args, **(kwargs or {})))
    # An operand that is written to must stay the tensor it is.
    promote = _promote_dtype if func._schema.is_mutable else _promote
    args, kwargs = pytree.tree_map(promote, (args, kwargs or {}))
    if func is torch.ops.aten._grouped_mm.default:
        func = _grouped_mm
    return pytree.tree_map(_promote, func(*args, **kwargs))


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *unused: Any
) -> torch.Tensor:
    """torch's own has no float64: (S, K) × (G, K, N), offsets[g-1] to offsets[g] by matrix g."""
    if offs is None:
        return left @ right
    if left.dim() != 2 or right.dim() != 3:
        raise NotImplementedError("_grouped_mm has a float64 form only where rows are grouped")
    result = left.new_zeros(left.shape[0], right.shape[2])
    start = 0
    for matrix, end in zip(right, offs.tolist(), strict=True):
        result[start:end] = left[start:end] @ matrix
        start = end
    return result


# Built by type(): TorchDispatchMode has no annotations, and strict mypy takes no such base class.
_Float64 = type("_Float64", (TorchDispatchMode,), {"__torch_dispatch__": _dispatch_in_float64})


def _promote_dtype(value: Any) -> Any:
    return _TO_DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


def _promote(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _TO_DOUBLE:
        return value.to(_TO_DOUBLE[value.dtype])
    return _promote_dtype(value)


def _converted(parameter: torch.Tensor, convert: Convert) -> torch.Tensor:
    """A weight as `convert` makes it; one that wraps others may lack the operators, and stays."""
    try:
        return convert(parameter)
    except Exception:
        if not wraps(parameter):
            raise
        return parameter


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _nudged(tensor: torch.Tensor, random: torch.Generator, eps: float = 0.0) -> torch.Tensor:
    """Each element times 1 ± up to half an eps, rounded: that of its dtype or the one given.

    Whole numbers and infinities stay: a mask's 1 is no result of rounding, and models compare it.
    """
    if not tensor.is_floating_point():
        return _copy(tensor)
    tensor = tensor.detach()
    drawn = torch.rand(tensor.shape, generator=random, dtype=torch.float64).to(tensor.device)
    moved = tensor.double() * (1 + max(eps, torch.finfo(tensor.dtype).eps) * (drawn - 0.5))
    return torch.where(tensor == tensor.round(), tensor, moved.to(tensor.dtype))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_TO_DOUBLE.get(tensor.dtype, tensor.dtype), copy=True)


def _only_exact(eager: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if tensor.is_floating_point() else tensor for tensor in eager)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
