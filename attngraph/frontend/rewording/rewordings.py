"""Code that torch.export can't trace as it is written, put into words of the same meaning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attngraph.frontend.rewording.contiguity import Copies, lies_contiguous
from attngraph.frontend.rewording.cut_for_memory import CUTS, place
from attngraph.frontend.rewording.fixed_sizes import with_open_sizes
from attngraph.frontend.rewording.hit_loops import Hits
from attngraph.frontend.rewording.logarithms import as_tensors
from attngraph.frontend.rewording.loop_lists import JOINS, Steps, axis_of_join
from attngraph.frontend.rewording.scalars import MAKERS, of_sizes
from attngraph.frontend.rewording.scaled_images import scaled
from attngraph.frontend.rewording.tied_sizes import Ties
from attngraph.frontend.watching.asked import Place
from attngraph.ir.dims import divide

_DATA: Any = torch.Tensor.data
_DATA_OF = _DATA.__get__
_ASSIGN: Any = torch.Tensor.__setitem__
_TAKE: Any = torch.Tensor.__getitem__
_CHUNKS = (torch.chunk, torch.Tensor.chunk)
_MAY_COPY = (
    torch.Tensor.contiguous,
    *(getattr(of, name) for of in (torch, torch.Tensor) for name in ("reshape", "flatten")),
)
"""What gives the same memory where a tensor is contiguous, and a copy where it isn't."""
_SLICES = (torch.ops.aten.slice, torch.ops.aten.slice.Tensor)
"""As torch.export writes `x[a:b]` where an end is open: tensor, axis, start, end and step."""


class Rewordings(TorchFunctionMode):
    """Within it, `x.data` is `x.detach()`: the same memory, which a trace would lose sight of.

    `arange(n - 1, -1, -1.0)` counts in integers before it is floating: a length that is rounded
    from floats is no size that others can be compared with. `split` and `chunk` of an axis that is
    a known multiple of a size, such as heads laid along the batch, are told how many parts;
    sizes in it that one Dim names are one. A
    `one_hot` of as many classes as a size is compared with these, which the operator makes a
    constant of. The end of `x[:-padding]` is counted from the start, which is right for no padding
    as well. A place that is a size, as in `x[:, n // 2] = 1`, is a row that is taken first; torch
    makes a number of it, as it does of what scalars.py and fixed_sizes.py compute. A `cdist` of
    more than 25 rows is computed as one of fewer. What copies at some sizes, as
    `contiguous()` does of an axis that is cut, does so at all with `copies`. Any other call that
    cuts an open axis is added to `cuts`, or at these places gives it `whole`. With `hits` a loop
    over the places where a mask is true has a turn for each place.
    """

    def __init__(
        self,
        cuts: set[Place],
        whole: Collection[Place],
        hits: Hits | None,
        ties: Ties,
        copies: Copies | None,
    ) -> None:
        super().__init__()
        self._cuts, self._whole, self._hits, self._ties = cuts, whole, hits, ties
        self._copies = copies

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func == _DATA_OF:
            return args[0].detach()
        if func in MAKERS:
            args, named = as_tensors((args, named))
        if func is torch.arange and _counts_in_floats(args):
            named.setdefault("dtype", torch.get_default_dtype())
            args = [int(arg) if isinstance(arg, float) else arg for arg in args]
        if func is one_hot and isinstance(_classes(args, named), torch.SymInt):
            ids = args[0] if args else named["input"]
            classes: Any = _classes(args, named)
            return (ids.unsqueeze(-1) == torch.arange(classes, device=ids.device)).long()
        if func is scaled_dot_product_attention and isinstance(named.get("scale"), torch.SymFloat):
            scale = named.pop("scale")
            query, args = (args[0], args[1:]) if args else (named.pop("query"), ())
            return func(query * scale, *args, **named, scale=1.0)
        copies = self._copies if func in _MAY_COPY and args else None
        if copies is not None and lies_contiguous(args[0]) is None:
            args = [copies.of(args[0]), *args[1:]]
        if func is torch.cdist and named.get("compute_mode", "").endswith("if_necessary"):
            named["compute_mode"] = "donot_use_mm_for_euclid_dist"
        for computed in (of_sizes, with_open_sizes, scaled):
            if (found := computed(func, args, named)) is not None:
                return found
        if func in JOINS and args and isinstance(args[0], Steps):
            return args[0].joined(axis_of_join(args, named), new=func is torch.stack)
        if func in _SLICES and len(args) > 3:  # places that are counted from the end
            ends = (args[0].shape[args[1]] + end if _is_below(end) else end for end in args[2:4])
            args = [*args[:2], *ends, *args[4:]]
        if func in CUTS and args:
            dim = named.get("dim", args[2] if len(args) > 2 else 0)
            size = args[1] if len(args) > 1 else next(iter(named.values()))
            self._ties.settle(args[0].shape[dim])
            parts = _parts(args[0].shape[dim], size, counted=func in _CHUNKS)
            if parts is not None:
                return args[0].split(parts, dim)
            if isinstance(args[0].shape[dim], torch.SymInt) and (at := place()) is not None:
                if at in self._whole:
                    return (args[0],)
                self._cuts.add(at)
        if func in (_ASSIGN, _TAKE):
            args = [args[0], _with_places(args[1]), *args[2:]]
        if func in (_ASSIGN, _TAKE) and _has_open_place(args[1]):
            row, rest = _row(args[0], args[1])
            args = (row, rest, *args[2:])
        if self._hits is not None and (turns := self._hits.turns(func, args, named)) is not None:
            return turns
        result = _run(func, args, named)
        if self._hits is not None:
            self._hits.see(func, args, named, result)
        return result


def _run(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The call's result. Where one of torch's operators fails, it raises what it does in a run:
    of `view` a trace has a ValueError, which `except RuntimeError` doesn't catch.
    """
    try:
        return func(*args, **named)
    except ValueError as error:
        if isinstance(func, FunctionType):
            raise
        raise RuntimeError(str(error)) from error


def _classes(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return args[1] if len(args) > 1 else named.get("num_classes", -1)


def _with_places(index: Any) -> Any:
    """An index with a tensor of the places that a list of an open length has."""
    if isinstance(index, tuple):
        return tuple(map(_with_places, index))
    return index.whole() if isinstance(index, Steps) else index


def _has_open_place(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.SymInt) for part in parts)


def _row(whole: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The tensor at an index's places that are open sizes, and what the index takes of that.

    As torch has it, a place is taken before tensors among the other parts are looked at.
    """
    parts = [*index] if isinstance(index, tuple) else [index]
    dots = next((at for at, part in enumerate(parts) if part is ...), None)
    if dots is not None:
        parts[dots : dots + 1] = [slice(None)] * (whole.dim() - sum(map(_axes_of, parts)))
    rest: list[Any] = []
    for part in parts:
        if isinstance(part, torch.SymInt):
            whole = whole.select(sum(map(_axes_of, rest)), part)
        else:
            rest.append(part)
    return whole, (*rest, ...)


def _axes_of(part: Any) -> int:
    """How many axes of a tensor a part of an index is of."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1


def _is_below(number: Any) -> bool:
    """Whether an open size is negative, by the sample and then by what the trace demands."""
    if not isinstance(number, torch.SymInt) or not number.node.has_hint():
        return False
    return bool(number.node.expr.free_symbols) and number.node.hint < 0 and bool(number < 0)


def _parts(total: Any, size: Any, *, counted: bool) -> list[Any] | None:
    """The sizes of the parts of an open axis, if they are equal for every size of it.

    `size` is that of each part, or where they are `counted` their number.
    """
    if not isinstance(total, torch.SymInt) or not isinstance(size, (int, torch.SymInt)):
        return None
    other = divide(total.node.expr, size.node.expr if isinstance(size, torch.SymInt) else size)
    if other is None:
        return None
    if counted:
        return [total // size] * size if isinstance(size, int) else None
    return [size] * other if isinstance(other, int) else None


def _counts_in_floats(numbers: Sequence[Any]) -> bool:
    """Whether some of them are sizes and the others whole numbers, one of which is a float."""
    floats = [number for number in numbers if isinstance(number, float)]
    sizes = any(isinstance(number, torch.SymInt) for number in numbers)
    whole = all(isinstance(number, (int, float, torch.SymInt)) for number in numbers)
    return bool(floats) and sizes and whole and all(number.is_integer() for number in floats)
