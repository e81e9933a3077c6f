"""What a generation config asks for and `generate` doesn't do is told."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from attngraph.decoding.rules import Rules


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"num_beams": 4}, "num_beams = 4"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size = 3"),
        ({"stop_strings": ["stop"]}, "stop_strings = ['stop']"),
        ({"penalty_alpha": 0.6}, "penalty_alpha = 0.6"),
        ({"do_sample": True}, "told otherwise: temperature=1.0, top_k=50."),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9}, "0.6, top_p=0.9."),
    ],
)
def test_a_setting_without_a_rule_is_told(setting: dict[str, Any], told: str) -> None:
    rules = Rules.of_config(GenerationConfig(**setting))
    (note,) = rules.notes
    assert told in note
    assert Rules.from_json(rules.to_json(), "x") == rules


def test_settings_that_change_nothing_or_are_kept_are_not_told() -> None:
    config = GenerationConfig(num_beams=1, repetition_penalty=1.2, min_length=2)
    assert Rules.of_config(config).notes == []
    likeliest = GenerationConfig(do_sample=False, temperature=0.6, top_p=0.9, min_p=0.1)
    assert Rules.of_config(likeliest).notes == []


def test_what_leaves_out_tokens_that_may_be_drawn_is_told_where_they_are_drawn() -> None:
    notes = Rules.of_config(GenerationConfig(do_sample=True, top_k=0, min_p=0.1)).notes
    assert [note.partition("min_p = 0.1")[1] for note in notes] == ["min_p = 0.1", ""]
