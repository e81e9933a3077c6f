"""Speech and music."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.packages.kit import row


def _whisper_dims() -> Any:
    from whisper.model import ModelDimensions

    return ModelDimensions(
        n_mels=16,
        n_audio_ctx=20,
        n_audio_state=32,
        n_audio_head=2,
        n_audio_layer=2,
        n_vocab=64,
        n_text_ctx=24,
        n_text_state=32,
        n_text_head=2,
        n_text_layer=2,
    )


def _initialised(model: Any) -> Any:
    """Its positions are memory that nothing has written yet."""
    torch.nn.init.normal_(model.decoder.positional_embedding)
    return model


@row("openai-whisper whole", length=7, others=(11, 5))
def _whisper() -> Any:
    from whisper.model import Whisper

    return _initialised(Whisper(_whisper_dims())), lambda b, n: (
        torch.randn(b, 16, 40),
        torch.randint(0, 64, (b, n)),
    )


@row("openai-whisper encoder", others=())
def _whisper_encoder() -> Any:
    from whisper.model import Whisper

    return Whisper(_whisper_dims()).encoder, lambda b, n: (torch.randn(b, 16, 40),)


@row("openai-whisper decoder", length=7, others=(11, 5))
def _whisper_decoder() -> Any:
    from whisper.model import Whisper

    return _initialised(Whisper(_whisper_dims())).decoder, lambda b, n: (
        torch.randint(0, 64, (b, n)),
        torch.randn(b, 20, 32),
    )


@row("demucs transformer", others=())
def _demucs() -> Any:
    from demucs.transformer import CrossTransformerEncoder

    model = CrossTransformerEncoder(dim=32, num_heads=2, num_layers=3, hidden_scale=2.0)
    return model, lambda b, n: (torch.randn(b, 32, 4, 10), torch.randn(b, 32, 20))


@row("demucs HTDemucs", others=())
def _htdemucs() -> Any:
    from demucs.htdemucs import HTDemucs

    model = HTDemucs(
        ["drums", "bass"],
        channels=8,
        depth=2,
        nfft=256,
        t_layers=1,
        t_heads=2,
        bottom_channels=0,
        samplerate=8000,
        segment=1,
        dconv_depth=1,
    )
    return model, lambda b, n: (torch.randn(b, 2, 8000),)


@row("conformer block")
def _conformer() -> Any:
    from conformer import ConformerBlock

    model = ConformerBlock(dim=32, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=7)
    return model, lambda b, n: (torch.randn(b, n, 32),)


@row("conformer stack", others=())
def _conformers() -> Any:
    from conformer import Conformer

    model = Conformer(dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=7)
    return model, lambda b, n: (torch.randn(b, 12, 32),)
