"""The corpus is listed once each, and a type of every kind of input builds and runs."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.architectures import FirstTensor, architectures, build


def test_the_list_names_each_type_once_in_order() -> None:
    names = architectures()
    assert len(names) == 129
    assert names == sorted(set(names))


@pytest.mark.parametrize("model_type", ["electra", "marian", "deit", "aimv2", "unispeech"])
def test_a_tiny_model_gives_one_finite_tensor(model_type: str) -> None:
    built = build(model_type)
    assert isinstance(built.module, FirstTensor)
    assert not built.module.training
    assert len(built.args) == len(built.input_names)
    with torch.no_grad():
        output = built.module(*built.args)
    assert output.isfinite().all()


def test_an_implementation_that_a_type_lacks_is_transformers_own_error() -> None:
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        build("codegen", "sdpa")
