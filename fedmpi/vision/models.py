"""Networks, each in two parts: an extractor, and a linear head that most methods keep local."""

import torch
from torch import nn
from torch.nn import functional as F

from fedmpi.errors import ConfigError
from fedmpi.vision.architecture import CNN, FEATURES, RESNET_BLOCKS, RESNET_STAGES, RESNET_STEM


def normaliser(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(min(8, channels), channels)


class SmallCNN(nn.Module):
    """Four 3x3 convolutions for 8x8 digits; most weights lie in the last two, where DSU sparsifies."""

    features = FEATURES

    def __init__(self, channels: int, norm: str):
        super().__init__()
        layers, previous = [], channels
        for width, stride in CNN:
            layers += [nn.Conv2d(previous, width, 3, stride, 1, bias=False), normaliser(norm, width), nn.ReLU()]
            previous = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).mean(dim=(2, 3))


class BasicBlock(nn.Module):
    """He 2016: two 3x3 convolutions and a shortcut without parameters (option A)."""

    def __init__(self, before: int, width: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = normaliser(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = normaliser(norm, width)
        self.stride = stride
        self.extra = width - before

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride != 1 or self.extra:
            # Option A: subsample, and pad the new channels with zeros.
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2)
            )
        return F.relu(out + x)


class ResNet20(nn.Module):
    """He 2016, section 4.2 with n = 3: 19 convolutions here, the 20th layer is the head."""

    features = FEATURES

    def __init__(self, channels: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, RESNET_STEM, 3, 1, 1, bias=False)
        self.norm1 = normaliser(norm, RESNET_STEM)
        blocks, before = [], RESNET_STEM
        for width, first in RESNET_STAGES:
            for at in range(RESNET_BLOCKS):
                blocks.append(BasicBlock(before, width, 1 if at else first, norm))
                before = width
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return self.blocks(out).mean(dim=(2, 3))


class Classifier(nn.Module):
    """Extractor and head as one network, for methods that share both."""

    def __init__(self, extractor: nn.Module, weight: torch.Tensor, bias: torch.Tensor):
        super().__init__()
        self.extractor = extractor
        classes, features = weight.shape
        self.head = nn.Linear(features, classes)
        self.head.weight.data, self.head.bias.data = weight, bias

    def forward(self, x):
        return self.head(self.extractor(x))


NETWORKS: dict[str, type[SmallCNN | ResNet20]] = {"cnn": SmallCNN, "resnet20": ResNet20}


def build_extractor(network: str, channels: int, norm: str) -> SmallCNN | ResNet20:
    if network not in NETWORKS:
        raise ConfigError(f"network = {network}: must be one of {', '.join(NETWORKS)}")
    return NETWORKS[network](channels, norm)


def initialise(extractor: nn.Module, generator: torch.Generator) -> None:
    """He initialisation from one generator, module by module, so that every rank draws the same weights."""
    for module in extractor.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
