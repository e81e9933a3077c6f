"""Remedies with which a trace is tried again, where its error is one that they may help against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch

from attngraph.frontend.interface.fixed_inputs import outputs_boxed
from attngraph.frontend.rewording.comparisons import decided_comparisons, wants_bool
from attngraph.frontend.rewording.constants import depends_on_data, known_constants
from attngraph.frontend.rewording.contiguity import excludes_a_size, undecided_contiguity
from attngraph.frontend.rewording.counted_bins import counted_bins
from attngraph.frontend.tracing.trace_errors import raises_itself

Remedy = Callable[[], AbstractContextManager[None]]
_FIXES = "your code specialized it to be a constant"


@contextmanager
def _compiled_anew() -> Iterator[None]:
    """Dynamo forgets what it compiled before.

    A loop's body goes through it, in eager too. It looks for one that it has by asking the sizes of
    the trace whether they are those of an earlier call. Each no stays as a condition, and a yes
    makes the dim a constant.
    """
    torch._dynamo.reset()
    yield


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """`torch.compiler.is_exporting()` and `is_compiling()` say no.

    Code that asks them computes something else in a trace than in a run, and what fails in the one
    may be left out of the other: transformers makes no mask where there is nothing to hide, but for
    a trace a full one, whose size need not be that of the layers behind it.
    """
    with (
        patch.object(torch.compiler, "is_exporting", lambda: False),
        patch.object(torch.compiler, "is_compiling", lambda: False),
    ):
        yield


_REMEDIES: Mapping[Remedy, Callable[[str], bool]] = {
    decided_comparisons: wants_bool,
    undecided_contiguity: excludes_a_size,
    _compiled_anew: lambda message: excludes_a_size(message) or _FIXES in message,
    known_constants: depends_on_data,
    counted_bins: depends_on_data,
}


@dataclass
class Remedies:
    """The remedies that a model's traces have `taken`, each once and for all that come after."""

    taken: list[Remedy] = field(default_factory=list)

    def take(self, error: Exception) -> bool:
        """Takes all that may help against an error; whether there are any."""
        found = [cure for cure, helps in _REMEDIES.items() if helps(str(error))]
        if raises_itself(error):
            found.append(_as_in_a_run)
        new = [cure for cure in found if cure not in self.taken]
        self.taken += new
        return bool(new)

    def box_outputs(self, module: torch.nn.Module) -> bool:
        """Takes dtypes, Enums and the like for constants that the model returns; not twice."""
        if any(isinstance(cure, partial) for cure in self.taken):
            return False
        self.taken.append(partial(outputs_boxed, module))
        return True

    @contextmanager
    def also(self, cure: Remedy) -> Iterator[Callable[[], None]]:
        """Takes one within; it stays taken afterwards if what this gives was called."""
        before = [*self.taken]
        stays: list[bool] = []
        self.taken = list(dict.fromkeys([*before, cure]))
        try:
            yield lambda: stays.append(True)
        finally:
            if not stays:
                self.taken = before
