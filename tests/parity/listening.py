"""Small models that read sounds, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.models.kit import HIDDEN
from tests.parity.test_decode import common

TOKEN = 7  # in whose place rows of images or sounds come

_AUDIO: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "num_mel_bins": 8,
}  # fmt: skip


def _heard(kind: str, text: str = "Llama", **audio: object) -> nn.Module:
    """Sounds of 32 frames through an encoder like Whisper's."""
    import transformers

    made: Any = getattr(transformers, f"{kind}Config")
    places = audio or {"max_source_positions": 16}
    tower = getattr(transformers, f"{kind}EncoderConfig")(**_AUDIO, **places)
    words = getattr(transformers, f"{text}Config")(
        **common(num_hidden_layers=1, num_key_value_heads=2, head_dim=16)
    )
    config = made(audio_config=tower, text_config=words, audio_token_id=TOKEN)
    model: nn.Module = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model


def _qwen3_asr() -> nn.Module:
    """Sounds of any number of chunks of 100 frames, two of which attend to each other."""
    from transformers import (
        Qwen3ASRConfig,
        Qwen3ASREncoderConfig,
        Qwen3ASRForConditionalGeneration,
        Qwen3Config,
    )

    audio = Qwen3ASREncoderConfig(
        num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
        d_model=16, n_window_infer=200, output_dim=HIDDEN, downsample_hidden_size=4,
    )  # fmt: skip
    text = Qwen3Config(
        **common(num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=2)
    )
    return Qwen3ASRForConditionalGeneration(
        Qwen3ASRConfig(audio_config=audio, text_config=text, audio_token_id=TOKEN, eos_token_id=2)
    )


def _fun_asr_nano() -> nn.Module:
    """Frames come first, three in one; there are 40 places for them, and a mask is taken."""
    import transformers
    from transformers.models.fun_asr_nano import FunAsrNanoAdaptorConfig

    audio = transformers.FunAsrNanoEncoderConfig(
        num_mel_bins=4, num_stacked_frames=3, hidden_size=16, num_attention_heads=2,
        intermediate_size=24, num_hidden_layers=3, num_timestamp_prediction_layers=1,
        max_position_embeddings=41, fsmn_kernel_size=5,
    )  # fmt: skip
    adaptor = FunAsrNanoAdaptorConfig(
        hidden_size=HIDDEN, num_attention_heads=2, intermediate_size=HIDDEN // 4,
        num_hidden_layers=1, projector_hidden_size=24,
    )  # fmt: skip
    text = transformers.Qwen3Config(
        **common(num_key_value_heads=2, head_dim=16, max_position_embeddings=256)
    )
    config = transformers.FunAsrNanoConfig(
        audio_config=audio, adaptor_config=adaptor, text_config=text, audio_token_id=TOKEN
    )
    return transformers.FunAsrNanoForConditionalGeneration(config)


def granite_speech() -> nn.Module:
    """Frames come first, and a mask says which rows of the encoder are real."""
    import transformers

    encoder = transformers.GraniteSpeechEncoderConfig(
        input_dim=8, num_layers=2, hidden_dim=16, num_heads=2, output_dim=6, context_size=8,
        max_pos_emb=16, conv_kernel_size=3,
    )  # fmt: skip
    projector = transformers.Blip2QFormerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        encoder_hidden_size=16, cross_attention_frequency=1,
    )  # fmt: skip
    config = transformers.GraniteSpeechConfig(
        encoder_config=encoder,
        projector_config=projector,
        text_config=transformers.GraniteConfig(**common(num_key_value_heads=2)),
        audio_token_index=TOKEN,
        has_lora_adapter=False,
        window_size=6,
        downsample_rate=3,
    )
    return transformers.GraniteSpeechForConditionalGeneration(config)


LISTENING: dict[str, Callable[[], nn.Module]] = {
    "qwen2_audio": lambda: _heard("Qwen2Audio", "Qwen2"),
    "voxtral": lambda: _heard("Voxtral"),
    "glmasr": lambda: _heard("GlmAsr", max_position_embeddings=16),
    "audioflamingo3": lambda: _heard("AudioFlamingo3", "Qwen2", max_source_positions=16),
    "qwen3_asr": _qwen3_asr,
    "fun_asr_nano": _fun_asr_nano,
}
