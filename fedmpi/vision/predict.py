"""Predicting with a finished image model: the shared extractor from its file, a party's head and statistics from its own."""

import math

import numpy as np
import torch
from torch import nn

from fedmpi.data.images.store import Store
from fedmpi.errors import DataError
from fedmpi.vision.base import EVALUATION_BATCH
from fedmpi.vision.flat import FlatNetwork
from fedmpi.vision.models import build_extractor
from fedmpi.vision.training import Head, normalised

CPU = torch.device("cpu")


class Predictor:
    """On the CPU. `arrays` is what the model's file holds, `parts` what a party's does."""

    def __init__(self, meta: dict, arrays: dict[str, np.ndarray]):
        self.meta = meta
        self.weights = arrays.get("forward", arrays["theta"])

    def extractor(self, images: np.ndarray | None = None) -> nn.Module:
        """Running statistics are every party's own. With images (pixels 0 to 255) they are those of these images, as a party
        takes its training images', and the module is ready for tests; without, it is as new, in training mode."""
        net = self._net(self.weights)
        if images is not None:
            inputs = self.inputs(images)
            net.refresh_statistics(inputs.tensor_split(math.ceil(len(inputs) / EVALUATION_BATCH)))
        return self._plain(net).train(images is None)

    def party_extractor(self, parts: dict[str, np.ndarray]) -> nn.Module:
        return self._plain(self._party_net(parts)).eval()

    def inputs(self, images: np.ndarray) -> torch.Tensor:
        """Images (N, channels, height, width) of pixels 0 to 255 as the extractor takes them."""
        images, shape = np.asarray(images), tuple(self.meta["image_shape"])
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != shape or not len(images):
            raise DataError(
                f"images of shape {images.shape} and type {images.dtype}: this model takes (N, {', '.join(map(str, shape))}) "
                "of uint8, pixels 0 to 255"
            )
        return normalised(images, self.meta["mean"], self.meta["std"], CPU)

    @torch.no_grad()
    def scores(self, parts: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
        """(N, classes): what the head says, before any softmax."""
        head = Head(torch.from_numpy(parts["head_weight"]), torch.from_numpy(parts["head_bias"]))
        return head(self._party_net(parts).features(self.inputs(images).split(EVALUATION_BATCH))).numpy()

    def predict(self, parts: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
        """(N,) classes."""
        return self.scores(parts, images).argmax(axis=1)

    # ---- the figure of the run ----

    def test_data(self, store: Store, party: int) -> tuple[np.ndarray, np.ndarray]:
        shard = store.shard(party)
        return shard.test_x, shard.test_y

    def row(self, predicted: np.ndarray, wanted: np.ndarray) -> tuple[float, ...]:
        return int((predicted == wanted).sum()) / len(wanted), 1.0

    def summarise(self, total: np.ndarray) -> dict[str, float]:
        return {"accuracy": float(total[0] / total[1])}

    # ---- the pieces ----

    def _net(self, weights: np.ndarray) -> FlatNetwork:
        net = FlatNetwork(build_extractor(self.meta["network"], self.meta["image_shape"][0], self.meta["norm"]), CPU)
        net.load(torch.from_numpy(weights[: net.dimension].copy()))  # where the head is shared it stands at the end
        return net

    def _party_net(self, parts: dict[str, np.ndarray]) -> FlatNetwork:
        net = self._net(parts.get("weights", self.weights))
        net.statistics.copy_(torch.from_numpy(parts["statistics"]))
        return net

    def _plain(self, net: FlatNetwork) -> nn.Module:
        """The same network with parameters of its own, free of the flat vectors."""
        module = build_extractor(self.meta["network"], self.meta["image_shape"][0], self.meta["norm"])
        module.load_state_dict(net.module.state_dict())
        return module
