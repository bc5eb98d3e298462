"""A finished run's model, to be used.

    import fedmpi.model

    model = fedmpi.model.load("runs/demo-dp-pfeddsu-s0")
    model.shared              # the shared parameters: {"layers.0.weight": array, ...}, {"item_factors": ..., ...}
    model.sha256, model.meta  # summary.json's model_sha256; method, network, input shape, scale ...
    model.extractor()         # images: the torch module that the parties share

What a party predicts with stays with the party. A run with --keep-parties leaves it on the disks of the ranks that hosted
them, and where that is at hand (the folder `parties` of the run),

    model.party(3).predict(images)    # uint8 (N, channels, height, width) -> classes
    model.party(3).predict(items)     # rows of the catalogue, model.arrays["item_ids"] -> ratings
    model.evaluate()                  # every kept party on its own test data: the scores of summary.json

The files are NumPy archives without pickle, and can be read without fedmpi: `theta` is the shared vector, `meta` a JSON text.
"""

import importlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedmpi.errors import ConfigError, DataError
from fedmpi.report.sealed import read_sealed, vector_sha256
from fedmpi.runtime import build
from fedmpi.runtime.keep import FORMAT, STATE, kept_files

# What reads a model, by the word in its `meta`; a file never names code.
READERS = {"images": "fedmpi.vision.predict", "ratings": "fedmpi.recsys.predict"}


def load(path: str | Path) -> "Model":
    """The model of a run's folder, or of its model.npz; DataError if it is not the one that the run wrote."""
    path = Path(path)
    if path.is_dir():
        if not (path / "model.npz").exists():
            raise DataError(f"{path}: no model.npz there; a run writes it when it ends")
        path = path / "model.npz"
    arrays = read_sealed(path)
    try:
        meta = json.loads(str(arrays.pop("meta")))
        if meta["format"] != FORMAT:
            raise DataError(f"{path} has format {meta['format']}, this fedmpi reads {FORMAT}")
        shared = {name: arrays[name] for name in meta["shared"]}
        sha256, named = vector_sha256(arrays["theta"]), meta["model_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a model ({type(error).__name__}: {error})") from None
    for said, where in ((named, "its meta"), (_summary(path.parent)["model_sha256"], "summary.json")):
        if said not in (None, sha256):
            raise DataError(f"{path} holds another model ({sha256[:12]}...) than {where} names ({said[:12]}...)")
    return Model(path.parent, shared, sha256, meta, arrays)


def _summary(run: Path) -> dict[str, str | None]:
    """What summary.json says of the model and of the data; nothing where the file alone was handed on."""
    wanted = ("model_sha256", "data_crc32")
    try:
        found = json.loads((run / "summary.json").read_text())
        return {name: found[name] for name in wanted}
    except FileNotFoundError:
        return dict.fromkeys(wanted)
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{run / 'summary.json'} is damaged: expected {' and '.join(wanted)}") from None


@dataclass(frozen=True, eq=False)
class Model:
    run: Path  # the folder that it lies in
    shared: dict[str, np.ndarray]  # the shared parameters by name
    sha256: str
    meta: dict
    arrays: dict[str, np.ndarray]  # everything in its file

    def extractor(self, images: np.ndarray | None = None):
        """The shared extractor as a torch module of its own, with the weights of the forward pass. Running statistics are
        each party's own: give images (uint8) to have theirs, or take a party's extractor."""
        return self._able("extractor")(images)

    def parties(self) -> list["Party"]:
        """The parties whose parts are at hand, in order."""
        files = kept_files(self.run, 0, self.meta["parties"] - 1)
        found = (self._party(path, number) for path in files for number in self._kept(path)[0])
        return sorted(found, key=lambda party: party.number)

    def party(self, number: int) -> "Party":
        for path in kept_files(self.run, number, number):
            if number in self._kept(path)[0]:
                return self._party(path, number)
        raise DataError(
            f"{self.run / 'parties'}: nothing of party {number}; a run with --keep-parties leaves it on the rank that hosts it"
        )

    def evaluate(self) -> dict[str, float]:
        """The scores of summary.json, from what the parties kept and the run's prepared data."""
        parties = self.parties()
        if len(parties) != self.meta["parties"]:
            raise DataError(
                f"{self.run / 'parties'}: {len(parties)} of {self.meta['parties']} parties; run with --keep-parties, and bring "
                "the files of all hosts together"
            )
        rows = []
        for party in parties:
            x, wanted = party.test_data()
            rows.append(self._reader.row(party.predict(x), wanted))
        return self._reader.summarise(np.array(rows).sum(axis=0))

    @cached_property
    def _reader(self):
        if self.meta.get("predicts") not in READERS:
            raise ConfigError(
                f"method = {self.meta['method']}: its model is only named arrays, nothing predicts with them"
            )
        return importlib.import_module(READERS[self.meta["predicts"]]).Predictor(self.meta, self.arrays)

    def _able(self, ability: str):
        """What only some readers can do."""
        found = getattr(self._reader, ability, None)
        if found is None:
            raise ConfigError(f"method = {self.meta['method']}: a model of {self.meta['predicts']} has no {ability}")
        return found

    @cached_property
    def _store(self):
        store = build.open_store(build.load_config(self.run))
        if store is None or _summary(self.run)["data_crc32"] not in (None, f"{store.fingerprint:08x}"):
            raise DataError(f"{store.path if store else 'none'} is not the data that {self.run} was trained on")
        return store

    @cached_property
    def _files(self) -> dict[Path, tuple[dict[int, int], dict[str, np.ndarray]]]:
        return {}

    def _party(self, path: Path, number: int) -> "Party":
        places, arrays = self._kept(path)
        own = {name: values[places[number]] for name, values in arrays.items()}
        state = {name.removeprefix(STATE): own.pop(name) for name in list(own) if name.startswith(STATE)}
        return Party(self, number, own, state)

    def _kept(self, path: Path) -> tuple[dict[int, int], dict[str, np.ndarray]]:
        """A file's parties with their place in it, and its arrays."""
        if path not in self._files:
            arrays = read_sealed(path)
            if str(arrays.pop("model_sha256", "")) != self.sha256:
                raise DataError(f"{path} belongs to another model than {self.sha256[:12]}...")
            places = {party: place for place, party in enumerate(arrays.pop("parties").tolist())}
            self._files[path] = places, arrays
        return self._files[path]


@dataclass(frozen=True, eq=False)
class Party:
    """One party's part of the model. `parts` is what it predicts with; `state` what it would train on from."""

    model: Model
    number: int
    parts: dict[str, np.ndarray]
    state: dict[str, np.ndarray]

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes of images (uint8, (N, channels, height, width)), or ratings of items (rows of the catalogue)."""
        return self.model._reader.predict(self.parts, x)

    def scores(self, images: np.ndarray) -> np.ndarray:
        """Images: what the head says of every class, before any softmax."""
        return self.model._able("scores")(self.parts, images)

    def extractor(self):
        """Images: the extractor with this party's running statistics (and weights, where they are its own), ready for tests."""
        return self.model._able("party_extractor")(self.parts)

    def test_data(self) -> tuple[np.ndarray, np.ndarray]:
        """What the run tested this party on, from the run's prepared data: (images, labels) or (items, ratings)."""
        return self.model._reader.test_data(self.model._store, self.number)
