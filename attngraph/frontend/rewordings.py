"""What torch.export can't trace as it is written, in words of the same meaning that it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DATA: Any = torch.Tensor.data
_DATA_OF = _DATA.__get__


class Rewordings(TorchFunctionMode):
    """Within it, `x.data` is `x.detach()`: the same memory, which a trace would lose sight of.

    And `arange(n - 1, -1, -1.0)` counts in integers before it is floating: a length that is rounded
    from floats is no size that others can be compared with.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func == _DATA_OF:
            return args[0].detach()
        if func is torch.arange and _counts_in_floats(args):
            named.setdefault("dtype", torch.get_default_dtype())
            args = [int(arg) if isinstance(arg, float) else arg for arg in args]
        return func(*args, **named)


def _counts_in_floats(numbers: Sequence[Any]) -> bool:
    """Whether some of them are sizes and the others whole numbers, one of which is a float."""
    floats = [number for number in numbers if isinstance(number, float)]
    sizes = any(isinstance(number, torch.SymInt) for number in numbers)
    whole = all(isinstance(number, (int, float, torch.SymInt)) for number in numbers)
    return bool(floats) and sizes and whole and all(number.is_integer() for number in floats)
