"""Surprise's fits for `benchmarks.recsys_speed`, under a Python that has it and needs nothing of fedmpi.

python recsys_surprise.py FOLDER    # with train.npy and test.npy, columns party, item, rating; prints one JSON list
"""

import json
import math
import statistics
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import surprise

TUNED = {"n_factors": 20, "reg_all": 0.1}
EPOCHS = 60
REPEATS = 3
FITS = {
    "SVD, tuned": (surprise.SVD, TUNED | {"n_epochs": EPOCHS}),
    "SVD, defaults": (surprise.SVD, {}),
    "SVD++, defaults": (surprise.SVDpp, {}),
}
# Whether the tuned fit could have stopped earlier.
FITS |= {f"SVD, {epochs} epochs": (surprise.SVD, TUNED | {"n_epochs": epochs}) for epochs in range(20, EPOCHS, 10)}


def triples(path: Path) -> list[tuple[int, int, float]]:
    users, items, values = np.load(path).T
    return list(zip(users.astype(int).tolist(), items.astype(int).tolist(), values.tolist()))


def fit(kind, settings: dict, train, test) -> dict:
    """Medians over a few fits, each from another start. The time is of `fit` alone, the data being in its format."""
    rows = []
    for start in range(1 if kind is surprise.SVDpp else REPEATS):
        model = kind(**settings, random_state=start)
        wall, cpu = perf_counter(), process_time()
        model.fit(train)
        wall, cpu = perf_counter() - wall, process_time() - cpu
        squares = [(prediction.est - prediction.r_ui) ** 2 for prediction in model.test(test)]
        rows.append({"rmse": math.sqrt(statistics.fmean(squares)), "wall": wall, "cpu": cpu})
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | {"fits": rows}


def main() -> None:
    folder = Path(sys.argv[1])
    test = triples(folder / "test.npy")
    data = surprise.Dataset(surprise.Reader(rating_scale=(1, 5)))
    start = perf_counter()
    train = data.construct_trainset([(*triple, None) for triple in triples(folder / "train.npy")])
    prepared = perf_counter() - start
    rows = [{"fit": name, **fit(*how, train, test)} for name, how in FITS.items()]
    print(json.dumps({"surprise": surprise.__version__, "prepare": prepared, "rows": rows}))


if __name__ == "__main__":
    main()
