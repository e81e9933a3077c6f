"""Tests of what the oldest torch that is supported, 2.11, can't do itself, each with the reason."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

IS_OLD = TorchVersion(torch.__version__) < "2.12"
_LATER = {
    "test_capture.py::test_a_saved_program_gives_the_same_graph[encoder-lengths]": (
        "torch.export calls min(s, 4*s) == s violated"
    ),
    "test_conditionals.py::test_the_side_that_is_taken_shows[_attends]": (
        "torch.cond refuses a branch that reads a weight and its transpose"
    ),
    "test_output_classes.py::test_what_may_hide_a_tensor_is_refused[<lambda>]": (
        "torch refuses a subclass of list first, in words of its own"
    ),
    "test_python_numbers.py::test_a_number_is_what_the_tensor_holds[power]": (
        "a number to the power of a tensor is a condition on the number"
    ),
    "test_bad_input.py::test_what_python_asks_of_a_tensors_values_is_told_with_the_users_line"
    "[number": "torch names no line",
    "test_formulas.py::test_formula[batch-quantile": "quantile takes no open sizes",
    "test_formulas.py::test_formula[batch-nanquantile": "quantile takes no open sizes",
    "test_formulas.py::test_formula[batch-padded-before]": "pad_sequence isn't traced on the left",
    "[slices]": "a slice whose bounds are tensors isn't traced",
    "[relative, of the first DeBERTa]": "a slice whose bounds are tensors isn't traced",
}


def skip_later(items: list[pytest.Item]) -> None:
    """Under an older torch, skips what is of a later one."""
    for item in items if IS_OLD else ():
        for part, reason in _LATER.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__}: {reason}"))
