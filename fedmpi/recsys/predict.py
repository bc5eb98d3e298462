"""Predicting with a finished rating model: item factors or a context model from its file, a party's part from its own."""

import numpy as np

from fedmpi.data.ratings.store import RatingStore
from fedmpi.errors import DataError
from fedmpi.recsys.models import make


class Predictor:
    """`arrays` is what the model's file holds, `parts` what a party's does. Items are rows of the catalogue, `item_ids`."""

    def __init__(self, meta: dict, arrays: dict[str, np.ndarray]):
        self.meta, self.arrays = meta, arrays
        self.settings = meta["settings"] if "settings" in meta else meta["ratings"]  # as it was called before

    def predict(self, parts: dict[str, np.ndarray], items: np.ndarray) -> np.ndarray:
        """(N,) ratings, within the scale."""
        items = np.asarray(items)
        if items.ndim != 1 or items.dtype.kind not in "iu" or np.any((items < 0) | (items >= self.meta["items"])):
            raise DataError(
                f"items of shape {items.shape} and type {items.dtype}: this model takes (N,) whole numbers from 0 to "
                f"{self.meta['items'] - 1}, rows of item_ids"
            )
        predicted = np.zeros(len(items))
        if "shared_model" in self.meta:
            of_user = np.broadcast_to(parts["user_features"], (len(items), len(parts["user_features"])))
            x = np.concatenate((self.arrays["item_features"][items], of_user), axis=1)
            predicted += self._modelled(self.meta["shared_model"], self.arrays["theta"].astype(np.float64), x)
        if "factors" in parts:
            offset, own = parts["factors"][0], parts["factors"][1:]
            predicted += offset + self.arrays["item_factors"][items].astype(np.float64) @ own
            if "item_bias" in self.arrays:
                predicted += self.arrays["item_bias"][items]
        if "private_model" in parts:
            x = self.arrays["item_features"][items]
            predicted += self._modelled(self.meta["private_model"], parts["private_model"], x)
        lowest, highest, _ = self.meta["scale"]
        return np.clip(predicted, lowest, highest)

    def _modelled(self, kind: str, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
        model = make(kind, x.shape[1], self.settings["mask_rank"], self.settings["mask_hidden"])
        return self.settings["rating_centre"] + model.predict(parameters[None], x[None])[0]

    # ---- the figures of the run ----

    def test_data(self, store: RatingStore, party: int) -> tuple[np.ndarray, np.ndarray]:
        block = store.party(party)
        return block.test_items, block.test_values

    def row(self, predicted: np.ndarray, wanted: np.ndarray) -> tuple[float, ...]:
        error = predicted - wanted
        return float(np.square(error).sum()), float(np.abs(error).sum()), float(len(error))

    def summarise(self, total: np.ndarray) -> dict[str, float]:
        squared, absolute, number = total
        return {"rmse": float(np.sqrt(squared / number)), "mae": float(absolute / number)}
