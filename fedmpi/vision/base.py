"""What every image method has in common, whatever it shares: the network, the parties' data, and the reference lines.

Files of methods are read on ranks that never train, for their settings, and torch takes seconds to import: here and there
it is imported by the functions that compute, and by the files that hold nothing else (`training`, `flat`, `models` ...).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from fedmpi.algorithm import PartyAlgorithm, References, Score
from fedmpi.config import Config, Count, CountOrZero, Positive, Range
from fedmpi.privacy.mechanism import BoundedVector
from fedmpi.randomness.words import SeededWords
from fedmpi.vision import architecture

if TYPE_CHECKING:
    import torch

    from fedmpi.data.images.store import Store
    from fedmpi.vision.augment import Augmentation
    from fedmpi.vision.flat import FlatNetwork
    from fedmpi.vision.models import ResNet20, SmallCNN
    from fedmpi.vision.training import Head, PartyData

EVALUATION_BATCH = 256

# For the references without differential privacy. Updates are still encoded as integers, which needs a range: 64 is longer than
# all the weights of a ResNet20 as it is drawn (norm 44), and five epochs of SGD move it by about 1; an update that is longer all
# the same ends the run instead of being shortened. --precision makes the steps within the range finer.
NOT_PRIVATE = BoundedVector(64.0)


class ImageMethod(PartyAlgorithm):
    """One network for all parties of a rank; what differs from party to party is swapped in."""

    task = "classification"

    @dataclass(frozen=True)
    class Settings(PartyAlgorithm.Settings):
        network: Literal["cnn", "resnet20"] = "cnn"
        """cnn: four layers, meant for 8x8 digits; resnet20 (He 2016, option A) for the papers' data; any image size"""
        norm: Literal["batch", "group"] = "batch"
        """normalisation; batch statistics stay on the party"""
        head_epochs: CountOrZero = 15
        """phase 1: epochs on the head, extractor frozen"""
        ext_epochs: Count = 5
        """phase 2: epochs on the extractor, head frozen"""
        batch_size: Annotated[int, Range(least=2)] = 32
        """samples a step"""
        head_lr: Positive = 0.01
        """learning rate of the head"""
        ext_lr: Positive = 0.01
        """learning rate of the extractor"""
        augment: bool = False
        """phase 2 sees each image moved by a few pixels at random, and mirrored where that keeps its class; never phase 1,
        whose features are cached, and never a test"""

    settings: Settings

    def __init__(self, config: Config, store: Store, device: str = "cpu"):
        assert isinstance(config.method, self.Settings)
        self.config, self.settings = config, config.method
        self.seed = config.run.seed
        self.store, self._device = store, device
        self._data: dict[int, PartyData] = {}
        # --keep-parties: what each party predicted with in the last test, and the shared vector that was tested.
        self._tested: dict[int, dict[str, np.ndarray]] = {}
        self._tested_theta = np.zeros(0, np.float32)

    @functools.cached_property
    def net(self) -> FlatNetwork:
        """As it is drawn from the seed. Made when it is first asked for: sizes are known without it, and without torch."""
        import torch

        from fedmpi.vision.models import build_extractor, initialise

        extractor = build_extractor(self.settings.network, self.store.image_shape[0], self.settings.norm)
        initialise(extractor, torch.Generator().manual_seed(int(self._rng("initial", 0, 0).integers(2**63))))
        net = self._flatten(extractor, torch.device(self._device))
        if net.dimension != self.dimension:
            raise ValueError(
                f"{type(self).__name__}: {net.dimension} weights are shared, its dimension is {self.dimension}"
            )
        self._initial = net.to_numpy(net.weights).copy()
        return net

    @functools.cached_property
    def _augmentation(self) -> Augmentation | None:
        from fedmpi.vision.augment import Augmentation

        return Augmentation.of(self.store, self.net.device) if self.settings.augment else None

    @classmethod
    def pick_device(cls, setting: str, threads: int) -> str:
        import torch

        from fedmpi.vision.device import keep_freed_memory, pick_device

        torch.set_num_threads(threads)
        keep_freed_memory()
        return pick_device(setting, os.environ)

    @property
    def data_fingerprint(self) -> int:
        return self.store.fingerprint

    @property
    def dimension(self) -> int:
        return architecture.extractor_size(self.settings.network, self.store.image_shape[0])

    def initial(self) -> np.ndarray:
        _ = self.net  # which draws it
        return self._initial.copy()

    def forward_weights(self, theta: torch.Tensor) -> torch.Tensor:
        """The weights of the forward pass for a received theta."""
        return theta

    def augmented(self, images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """A batch as the extractor is to see it in training; without --augment the batch itself, and nothing is drawn."""
        return images if self._augmentation is None else self._augmentation(images, rng)

    def _flatten(self, extractor: SmallCNN | ResNet20, device: torch.device) -> FlatNetwork:
        """The network whose weights are the shared vector; here the extractor alone."""
        from fedmpi.vision.flat import FlatNetwork

        return FlatNetwork(extractor, device)

    # ---- the test ----

    @abstractmethod
    def make_ready(self, party: int, theta: np.ndarray, round: int) -> Head:
        """Load the network that the party is tested with, running statistics included, and give the head that goes with
        it; leaves no trace in the party's state."""

    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        head, data = self.make_ready(party, theta, round), self._shard(party)
        if self.config.run.keep_parties and round == self.config.run.rounds:
            self._remember(party, head, theta)
        correct, loss = self._test(head, data)
        return Score(correct, len(data.test_y), loss)

    def own_parts(self, parties, theta, round):
        """The last test has made them already, unless metrics stay home: a party's rounds at home are not done twice."""
        for party in parties:
            if party not in self._tested or not self._tested_with(theta):
                self._remember(party, self.make_ready(party, theta, round), theta)
        each = [self._tested[party] for party in parties]
        if any("weights" in parts for parts in each):
            each = [{"weights": self._forward(theta)} | parts for parts in each]
        return {name: np.stack([parts[name] for parts in each]) for name in each[0]}

    def _remember(self, party: int, head: Head, theta: np.ndarray) -> None:
        """Weights only where they are the party's own: those of a shared forward pass stand in the model."""
        if not self._tested_with(theta):
            self._tested, self._tested_theta = {}, theta
        own = {"statistics": self.net.statistics, "head_weight": head.weight, "head_bias": head.bias}
        if not np.array_equal(self.net.to_numpy(self.net.weights), self._forward(theta)):
            own["weights"] = self.net.weights
        self._tested[party] = {name: self.net.to_numpy(part).copy() for name, part in own.items()}

    def _tested_with(self, theta: np.ndarray) -> bool:
        return np.array_equal(self._tested_theta, theta, equal_nan=True)

    def _forward(self, theta: np.ndarray) -> np.ndarray:
        return self.net.to_numpy(self.forward_weights(self.net.from_numpy(theta)))

    # ---- what a finished run leaves ----

    def shared_arrays(self, theta):
        return self.net.named(theta)

    def model_facts(self):
        return {
            "predicts": "images",
            "network": self.settings.network,
            "norm": self.settings.norm,
            "image_shape": list(self.store.image_shape),
            "classes": self.store.num_classes,
            "mean": list(self.store.mean),
            "std": list(self.store.std),
            "settings": dataclasses.asdict(self.settings),
        }

    def model_arrays(self, theta):
        """The weights of the forward pass, where they are others than the shared ones."""
        forward = self._forward(theta)
        return {} if np.array_equal(forward, theta) else {"forward": forward}

    # ---- the reference lines ----

    def references(self, party: int, theta: np.ndarray) -> References:
        """Heads keep training over a run's rounds; the untrained extractor's head gets as many epochs, or the comparison
        would credit the extractor with what the head learnt."""
        data, head, received = self._shard(party), self._first_head(self.net.device), self.net.from_numpy(theta)
        self._tune_head(head, data, received, self._rng("untrained", party, 0), self.config.run.rounds + 1)
        untrained, _ = self._test(head, data)
        alone = self._train_alone(party, data, received) if self.config.evaluation.local_epochs else None
        return References(untrained, alone, len(data.test_y))

    def _train_alone(self, party: int, data: PartyData, theta: torch.Tensor) -> int | None:
        """The local-only reference: extractor and head trained together on the party's data alone, nothing sent."""
        rng = self._rng("local-only", party, 0)
        head = self._first_head(self.net.device)
        self.net.load(theta)
        self.net.reset_statistics()
        own = (head.weight.requires_grad_(True), head.bias.requires_grad_(True))

        def scores(images: torch.Tensor) -> torch.Tensor:
            head.weight.grad = head.bias.grad = None
            return head(self.net.extractor(images))

        def move(gradient: torch.Tensor) -> None:
            self.net.weights.sub_(gradient, alpha=self.settings.ext_lr)
            for values in own:
                assert values.grad is not None
                values.detach().sub_(values.grad, alpha=self.settings.head_lr)

        self.train(data, rng, scores, move, self.config.evaluation.local_epochs)
        self._refresh_statistics(data)
        return self._test(head, data)[0]

    # ---- the pieces ----

    def train(
        self,
        data: PartyData,
        rng: np.random.Generator,
        scores: Callable[[torch.Tensor], torch.Tensor],
        move: Callable[[torch.Tensor], object],
        epochs: int,
    ) -> float:
        """Passes over the party's batches: `scores` has what the network says of images, and `move` gets the gradient at
        `net.weights` and changes them. Returns the mean loss of the last epoch."""
        from torch.nn.functional import cross_entropy

        from fedmpi.vision.training import batches

        self.net.module.train()
        total, seen = 0.0, 0
        for epoch in range(epochs):
            for batch in batches(len(data.train_y), self.settings.batch_size, rng):
                self.net.gradients.zero_()
                loss = cross_entropy(scores(self.augmented(data.train_x[batch], rng)), data.train_y[batch])
                loss.backward()
                move(self.net.gradients)
                if epoch == epochs - 1:
                    total, seen = total + float(loss.detach()) * len(batch), seen + len(batch)
        return total / max(seen, 1)

    def _tune_head(self, head: Head, data: PartyData, theta: torch.Tensor, rng, rounds: int = 1) -> float:
        """Phase 1, as often as in `rounds` rounds. The extractor does not move, so its features are computed once."""
        self.net.load(self.forward_weights(theta))
        self._refresh_statistics(data)
        features = self.net.features(data.train_x.split(EVALUATION_BATCH))
        settings = self.settings
        epochs = rounds * settings.head_epochs
        return head.train(features, data.train_y, epochs, settings.batch_size, settings.head_lr, rng)

    def _refresh_statistics(self, data: PartyData) -> None:
        # Equal parts: the statistics are means over parts, and a part of one sample would weigh as much as one of many.
        self.net.refresh_statistics(data.train_x.tensor_split(math.ceil(len(data.train_x) / EVALUATION_BATCH)))

    def _test(self, head: Head, data: PartyData) -> tuple[int, float]:
        return head.test(self.net.features(data.test_x.split(EVALUATION_BATCH)), data.test_y)

    def _shard(self, party: int) -> PartyData:
        from fedmpi.vision.training import PartyData

        if party not in self._data:
            shard = self.store.shard(party)
            self._data[party] = PartyData.load(shard, self.store.mean, self.store.std, self.net.device)
        return self._data[party]

    def _first_head(self, device: torch.device | str) -> Head:
        """theta_cls^0 of DSU's Algorithm 1, the same for every party. Heads of one origin ask the extractor for much the
        same; drawn for each party anew, they pull it in as many directions as there are parties, and the mean is small."""
        from fedmpi.vision.training import Head

        return Head.new(architecture.FEATURES, self.store.num_classes, self._rng("head", 0, 0), device)

    def _rng(self, purpose: str, party: int, round: int) -> np.random.Generator:
        return SeededWords(self.seed, purpose, party, round).generator()
