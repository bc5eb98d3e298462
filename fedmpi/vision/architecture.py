"""The networks by their numbers: how wide each layer is, and so how many weights a method shares.

`models` builds them from here. What a setting costs, and where a method's coordinates lie, follows without torch, which takes seconds to
import; a test holds both sides equal.
"""

from collections.abc import Iterator

KERNEL = 3  # of every convolution, as high as wide
FEATURES = 64  # that an extractor gives its head
CNN = ((16, 1), (32, 2), (64, 2), (64, 1))  # (width, stride) of each convolution
RESNET_STEM = 16
RESNET_STAGES = ((16, 1), (32, 2), (64, 2))  # (width, stride of the first block)
RESNET_BLOCKS = 3  # a stage, of two convolutions each


def convolutions(network: str, channels: int) -> Iterator[tuple[int, int]]:
    """(channels in, channels out) of each, in the order of the forward pass; behind each is a normalisation."""
    widths = [width for width, _ in CNN]
    if network == "resnet20":
        widths = [RESNET_STEM, *(width for width, _ in RESNET_STAGES for _ in range(2 * RESNET_BLOCKS))]
    return zip([channels, *widths], widths)


def conv_spans(network: str, channels: int) -> list[slice]:
    """Where each convolution's weights lie in the extractor's flat vector."""
    spans, at = [], 0
    for before, width in convolutions(network, channels):
        spans.append(slice(at, at + before * width * KERNEL**2))
        at = spans[-1].stop + 2 * width  # scale and shift of the normalisation, of either kind
    return spans


def extractor_size(network: str, channels: int) -> int:
    *_, (_, width) = convolutions(network, channels)
    return conv_spans(network, channels)[-1].stop + 2 * width


def head_size(classes: int) -> int:
    return classes * (FEATURES + 1)
