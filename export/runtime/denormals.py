"""Denormal floats flushed to zero while onnxruntime computes on the CPU.

A masked score ends in exp(x) for x below -88, where onnxruntime's kernel computes with denormals,
and the processor takes a hundred cycles or so for each: under a mask half of an attention's time
goes there (bench/kernels.py). The least normal float32 is 1.2e-38.

A model that computes with such a number on purpose, as log(mask + 1e-45) does, is another model
without it. Its file says so, and its sessions count none as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attngraph.analysis.values.denormals import KEPT_KEY

_LEAST, _ONE = 5e-324, 1.0


def flushed() -> bool:
    """Whether this thread counts denormals as zero."""
    return _LEAST * _ONE == 0.0


@contextmanager
def denormals(*, flush: bool) -> Iterator[None]:
    """With `flush`, this thread counts denormals as zero inside; afterwards as before, either way.

    onnxruntime's own threads follow their session, and the one that calls it follows this: the
    first session of a process would set it for good.
    """
    before = flushed()
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def kept_by(metadata: Mapping[str, Any]) -> bool:
    """Whether a file with this metadata counts on denormal numbers."""
    return KEPT_KEY in metadata
