"""Short-time Fourier transforms, written as frames, a window and a transform of each frame.

x of length L has T = 1 + (L − n) // hop frames of n samples. The way back adds the windowed frames
up where they overlap, and divides by what the squared windows add up to there.
"""

from __future__ import annotations

from attngraph.ir import Builder, Graph, Node, TensorType, Value
from attngraph.ir.dead import erase_dead
from attngraph.ir.dims import Dim, as_dim
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked

_PADS = {
    "reflect": "aten.reflection_pad1d",
    "replicate": "aten.replication_pad1d",
    "constant": "aten.constant_pad_nd",
}
_FORWARD = ("aten.stft", "aten.stft.center")


def spell_out_signals(graph: Graph, checked: Checked) -> None:
    """Replaces each stft and istft by what they are made of."""
    build = Builder(graph)
    for node in list(graph):
        if node.op not in (*_FORWARD, "aten.istft"):
            continue
        source = node.inputs[0]
        if source is None or not isinstance(source.type, TensorType):
            continue
        build.at(node, node.loc)
        made = _transformed(build, node) if node.op in _FORWARD else _restored(build, node)
        # By its definition, for all sizes: trials may have none that a frame fits into.
        if made is not None and checked.replace([(node.output, made)], proved=True):
            erase_dead(graph, [node])


def _transformed(build: Builder, node: Node) -> Value | None:
    """(…, L) to (…, frequencies, T)."""
    source = node.source
    centred = node.op == "aten.stft.center" and attribute(node, "center")
    mode = _PADS.get(attribute(node, "pad_mode")) if centred else None
    if source.dtype.is_complex or attribute(node, "align_to_window") or (centred and not mode):
        return None
    size, hop, window, norm = _settings(build, node)
    length = source.shape[-1]
    rows = build("aten.reshape", source, shape=[1, length]) if len(source.shape) == 1 else source
    if mode:
        padding = {"pad" if mode == "aten.constant_pad_nd" else "padding": [size // 2] * 2}
        rows = build(mode, rows, **padding)
    frames = build("aten.unfold", rows, dimension=-1, size=size, step=hop)
    if window is not None:
        frames = build("aten.mul.Tensor", frames, window)
    half = attribute(node, "onesided") in (None, True)
    found = build("aten.fft_rfft" if half else "aten.fft_fft", frames, dim=-1, norm=norm)
    found = build("aten.transpose.int", found, dim0=-2, dim1=-1)
    if len(source.shape) == 1:
        found = build("aten.squeeze.dim", found, dim=0)
    return found if node.output.dtype.is_complex else build("aten.view_as_real", found)


def _restored(build: Builder, node: Node) -> Value | None:
    """(…, frequencies, T) to (…, L)."""
    source = node.source
    if node.output.dtype.is_complex:
        return None
    *_, frequencies, count = source.shape
    size, hop = _lengths(node)
    whole = as_dim(size + hop * (count - 1))
    start = size // 2 if attribute(node, "center") else 0
    length = attribute(node, "length")
    end = as_dim(whole - start if length is None else start + length)
    if length is not None and not (isinstance(end, int) and isinstance(whole, int)):
        return None
    if isinstance(end, int) and isinstance(whole, int) and end > whole:
        return None  # it is padded with zeros
    size, hop, window, norm = _settings(build, node)
    half = attribute(node, "onesided")
    half = frequencies == size // 2 + 1 if half is None else half
    spectra = build("aten.transpose.int", source, dim0=-2, dim1=-1)
    if half:
        frames = build("aten.fft_irfft", spectra, n=size, dim=-1, norm=norm)
    else:
        frames = build("aten.real", build("aten.fft_ifft", spectra, dim=-1, norm=norm))
    if window is None:
        window = build("aten.full", size=[size], fill_value=1.0, dtype=frames.dtype)
    frames = build("aten.mul.Tensor", frames, window)
    if len(source.shape) == 2:
        frames = build("aten.reshape", frames, shape=[1, count, size])
    squares = build("aten.mul.Tensor", window, window)
    squares = build("aten.expand", squares, size=[1, count, size])
    summed, weights = (
        build(
            "aten.slice.Tensor", _overlapped(build, each, whole, hop), dim=-1, start=start, end=end
        )
        for each in (frames, squares)
    )
    found = build("aten.div.Tensor", summed, weights)
    return build("aten.reshape", found, shape=list(node.output.shape))


def _overlapped(build: Builder, frames: Value, whole: Dim, hop: int) -> Value:
    """(rows, T, n) added up where frames overlap: (rows, 1, 1, whole)."""
    size = frames.shape[-1]
    columns = build("aten.transpose.int", frames, dim0=-2, dim1=-1)
    return build(
        "aten.col2im",
        columns,
        output_size=[1, whole],
        kernel_size=[1, size],
        dilation=[1, 1],
        padding=[0, 0],
        stride=[1, hop],
    )


def _lengths(node: Node) -> tuple[int, int]:
    """The length of a frame, and from one to the next."""
    size = int(attribute(node, "n_fft"))
    return size, int(attribute(node, "hop_length") or size // 4)


def _settings(build: Builder, node: Node) -> tuple[int, int, Value | None, str | None]:
    """The length of a frame, the hop, a window as long as a frame, and the transform's norm."""
    size, hop = _lengths(node)
    length = int(attribute(node, "win_length") or size)
    window: Value | None = input_of(node, "window")
    if window is None and length < size:
        source = node.source
        dtype = source.dtype.to_real()
        window = build("aten.full", size=[length], fill_value=1.0, dtype=dtype)
    if window is not None and length < size:
        left = (size - length) // 2
        window = build("aten.constant_pad_nd", window, pad=[left, size - length - left])
    norm = "ortho" if attribute(node, "normalized") else None
    return size, hop, window, norm
