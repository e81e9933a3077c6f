"""Small models that read images, as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.models.kit import HIDDEN
from tests.parity.listening import TOKEN
from tests.parity.test_decode import common


def _llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(**common(num_hidden_layers=1))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _gemma3() -> nn.Module:
    """A window that is shorter than an image, in every second layer."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=4,
    )  # fmt: skip
    text = Gemma3TextConfig(
        **common(
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=vision, text_config=text, image_token_id=TOKEN, mm_tokens_per_image=4
        )
    )
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def _text_of_qwen() -> dict[str, object]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    return common(
        num_hidden_layers=1,
        num_key_value_heads=2,
        rope_scaling=rope,
        bos_token_id=1,
        eos_token_id=2,
    )


def _qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 16, "hidden_size": HIDDEN, "depth": 1, "num_heads": 2, "patch_size": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=_text_of_qwen(), vision_config=vision, image_token_id=TOKEN)
    )


def _qwen2_5_vl() -> nn.Module:
    """Windows of two by two tokens in the first layer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 16, "out_hidden_size": HIDDEN, "depth": 2, "num_heads": 2, "patch_size": 2,
        "intermediate_size": 24, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_text_of_qwen(), vision_config=vision, image_token_id=TOKEN)
    )


def _internvl() -> nn.Module:
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLVisionConfig,
        Qwen2Config,
    )

    vision = InternVLVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=[16, 16], patch_size=[4, 4],
    )  # fmt: skip
    text = Qwen2Config(**common(num_hidden_layers=1, num_key_value_heads=2))
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _in_rows(kind: str) -> nn.Module:
    """Rows of images, with a mask of where they have pixels."""
    import transformers

    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**common(num_hidden_layers=1)),
        image_token_id=TOKEN,
        scale_factor=2,
    )
    made: nn.Module = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return made


def _qwen3_vl() -> nn.Module:
    """Two layers of the decoder add features of two layers of the encoder."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {
        "hidden_size": 16, "out_hidden_size": HIDDEN, "depth": 3, "num_heads": 2, "patch_size": 2,
        "intermediate_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {**_text_of_qwen(), "num_hidden_layers": 2, "head_dim": 16}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=TOKEN)
    )


def _pixtral() -> nn.Module:
    from transformers import (
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PixtralVisionConfig,
    )

    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=PixtralVisionConfig(**_OF_PIXTRAL),
            text_config=LlamaConfig(**common(num_hidden_layers=1)),
            image_token_id=TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )


def _mistral3() -> nn.Module:
    """Two by two patches become a token."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        MistralConfig,
        PixtralVisionConfig,
    )

    text = MistralConfig(**common(num_hidden_layers=1, num_key_value_heads=2, head_dim=16))
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            vision_config=PixtralVisionConfig(**_OF_PIXTRAL),
            text_config=text,
            image_token_id=TOKEN,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        )
    )


_OF_PIXTRAL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 32, "patch_size": 4,
}  # fmt: skip


def _llava_next() -> nn.Module:
    """Tiles of two by two tokens in four resolutions."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=vision,
            text_config=LlamaConfig(**common(num_hidden_layers=1)),
            image_token_id=TOKEN,
            image_grid_pinpoints=[[8, 16], [16, 8], [16, 16], [24, 8]],
        )
    )


def _paligemma() -> nn.Module:
    """All of the prompt sees itself, in a window too, and positions count from 1."""
    from transformers import (
        Gemma2Config,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4, projection_dim=HIDDEN,
    )  # fmt: skip
    text = Gemma2Config(
        **common(num_hidden_layers=1, num_key_value_heads=2, head_dim=16, sliding_window=3)
    )
    return PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(
            vision_config=vision, text_config=text, image_token_id=TOKEN, projection_dim=HIDDEN
        )
    )


def _llava_onevision() -> nn.Module:
    """As LLaVA-NeXT; an image of more than two tiles is shrunk, and one among others is not cut."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=12, patch_size=4,
    )  # fmt: skip
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            vision_config=vision,
            text_config=Qwen2Config(**common(num_hidden_layers=1, num_key_value_heads=2)),
            image_token_id=TOKEN,
            image_grid_pinpoints=[[12, 24], [24, 24], [24, 12], [24, 36]],
            vision_aspect_ratio="anyres_max_2",
        )
    )


_PATCHED: dict[str, Any] = {
    "hidden_size": 16, "out_hidden_size": HIDDEN, "depth": 2, "num_heads": 2, "patch_size": 2,
    "intermediate_size": 24,
}  # fmt: skip


def _glm4v() -> nn.Module:
    """Its table of positions is resampled by where each patch lies in its image."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = common(
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={**rope, "partial_rotary_factor": 0.5},
        eos_token_id=2,
    )
    return Glm4vForConditionalGeneration(
        Glm4vConfig(
            vision_config={**_PATCHED, "image_size": 8}, text_config=text, image_token_id=TOKEN
        )
    )


def _exaone4_5() -> nn.Module:
    """Images lie on grids, and their tokens are placed as text; few key heads see patches."""
    from transformers import Exaone4_5_Config, Exaone4_5_ForConditionalGeneration

    vision = {
        **_PATCHED, "window_size": 8, "fullatt_block_indexes": [1], "num_key_value_heads": 1,
    }  # fmt: skip
    text = common(
        model_type="exaone4_5_text",
        num_key_value_heads=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    return Exaone4_5_ForConditionalGeneration(
        Exaone4_5_Config(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _qwen3_5() -> nn.Module:
    """A decoder that keeps states."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = common(
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        rope_parameters={**rope, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    )
    vision = {**_PATCHED, "num_position_embeddings": 16}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _llama4() -> nn.Module:
    """Its class projects what `get_image_features` gives, and some layers attend in chunks."""
    from transformers import (
        Llama4Config,
        Llama4ForConditionalGeneration,
        Llama4TextConfig,
        Llama4VisionConfig,
    )

    vision = Llama4VisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=4, vision_output_dim=24, projector_input_dim=24,
        projector_output_dim=24,
    )  # fmt: skip
    text = Llama4TextConfig(
        **common(
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size_mlp=48,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            attention_chunk_size=8,
            no_rope_layers=[1, 0],
        )
    )
    return Llama4ForConditionalGeneration(
        Llama4Config(vision_config=vision, text_config=text, image_token_index=TOKEN)
    )


def _gemma4(**more: object) -> nn.Module:
    """Images are patches with their places, layers have inputs for each token, and last layers read
    the keys of others; it listens too."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "patch_size": 2,
        "pooling_kernel_size": 2, "position_embedding_size": 32, "standardize": True,
    }  # fmt: skip
    audio = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 4], "conv_kernel_size": 3, "attention_chunk_size": 4,
        "attention_context_left": 3, "output_proj_dims": 24,
    }  # fmt: skip
    text: dict[str, object] = {
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8,
    }  # fmt: skip
    config = {"audio_config": audio, "text_config": common(**{**text, **more})}
    if more:
        config["audio_config"] = None
    ids = {"image_token_id": TOKEN, "audio_token_id": TOKEN - 1, "video_token_id": TOKEN - 2}
    return Gemma4ForConditionalGeneration(Gemma4Config(vision_config=vision, **config, **ids))


def _gemma4_large() -> nn.Module:
    """It has no audio tower, and in layers with a window an image sees all of itself."""
    return _gemma4(use_bidirectional_attention="vision", hidden_size_per_layer_input=0)


def _deepseek_vl() -> nn.Module:
    """The model that it puts a head on encodes its images."""
    from transformers import (
        DeepseekVLConfig,
        DeepseekVLForConditionalGeneration,
        LlamaConfig,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(**common(num_hidden_layers=1))
    return DeepseekVLForConditionalGeneration(
        DeepseekVLConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


SEEING: dict[str, Callable[[], nn.Module]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl": _internvl,
    "qwen3_vl": _qwen3_vl,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "paligemma": _paligemma,
    "smolvlm": lambda: _in_rows("SmolVLM"),
    "idefics3": lambda: _in_rows("Idefics3"),
    "glm4v": _glm4v,
    "exaone4_5": _exaone4_5,
    "qwen3_5": _qwen3_5,
    "llama4": _llama4,
    "deepseek_vl": _deepseek_vl,
    "gemma4": _gemma4,
    "gemma4_large": _gemma4_large,
}
