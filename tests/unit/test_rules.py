"""What a generation config asks for and `generate` doesn't do is told."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from attngraph.decoding.rules import Rules


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"num_beams": 4}, "num_beams = 4"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size = 3"),
    ],
)
def test_a_setting_without_a_rule_is_told(setting: dict[str, int], told: str) -> None:
    rules = Rules.of_config(GenerationConfig(**setting))
    (note,) = rules.notes
    assert told in note
    assert Rules.from_json(rules.to_json(), "x") == rules


def test_settings_that_change_nothing_or_are_kept_are_not_told() -> None:
    config = GenerationConfig(num_beams=1, repetition_penalty=1.2, min_length=2)
    assert Rules.of_config(config).notes == []
