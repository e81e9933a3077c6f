"""README's advice for models whose images no compiler joins to their text: the text alone."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import attngraph
from attngraph.errors import UsageError

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TEXT = {
    **TOWER,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "eos_token_id": None,
}
SQUARES = {**TOWER, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}


def _config(family: str) -> Any:
    return getattr(transformers, f"{family}Config")(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.Siglip2VisionConfig(**SQUARES),
    )


def _told() -> str:
    """The class that README shows, without the line that reads a checkpoint."""
    (found,) = re.findall(r"```\n(class TextAlone.*?)\nattngraph.optimize_decoder", README, re.S)
    return textwrap.dedent(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Lfm2Vl"])
def test_what_is_told_compiles_and_gives_the_tokens(family: str) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    model = kind(_config(family)).eval()
    with pytest.raises(
        UsageError, match=r"(pixel_values|input_features).*a subclass whose forward takes no more"
    ):
        attngraph.optimize_decoder(model)
    with pytest.raises(UsageError, match=r"no compiler joins these.*a subclass whose forward"):
        attngraph.optimize_multimodal(model)

    ids = torch.tensor([[1, 2, 3, 4, 7, 6], [0, 0, 9, 3, 11, 22]])
    mask = (ids != 0).long()
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    space: dict[str, Any] = {"Lfm2VlForConditionalGeneration": kind}
    exec(compile(_told(), "README.md", "exec"), space)
    model.__class__ = space["TextAlone"]
    found = attngraph.optimize_decoder(model).generate(ids, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(found, expected)
