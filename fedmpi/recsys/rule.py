"""Who may share in the clear: the hybrid's rule, MMF 3.2, evaluated by each party on its own data.

    --clear-rule indicator<=0.03,recovery<=0.3,ranking<=0.6

A party shares in the clear if every condition holds for it: its indicator J, MMF (15), on ratings scaled to [0, 1]; the
share of its ratings that the recovery attack finds to less than one step; the share of its true top tenth that the ranking attack finds.
J alone says how well the private model fits, which is not how well it hides: the two attacks are tried as well.
"""

import contextlib
import re
from dataclasses import dataclass

import numpy as np

from fedmpi.attacks.indicator import indicator
from fedmpi.attacks.ranking import hit_ratios
from fedmpi.attacks.recovery import recovery_hits
from fedmpi.errors import ConfigError

NAMES = ("indicator", "recovery", "ranking")
TOP = 0.1


@dataclass(frozen=True)
class ClearRule:
    most: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "ClearRule":
        most = {}
        for part in filter(None, (word.strip() for word in text.split(","))):
            found = re.fullmatch(r"(\w+)\s*<=\s*([0-9.eE+-]+)", part)
            name, bound = "", 0.0
            with contextlib.suppress(ValueError):
                name, bound = (found.group(1), float(found.group(2))) if found else (name, bound)
            if name not in NAMES or not 0 <= bound <= 1:
                raise ConfigError(
                    f"clear_rule = {part}: must be NAME<=BOUND, separated by commas, with names {', '.join(NAMES)} and bounds "
                    "from 0 to 1"
                )
            most[name] = bound
        return cls(most)

    def figures(self, offsets: np.ndarray, masked: np.ndarray, ratings: np.ndarray, scale) -> dict[str, np.ndarray]:
        """Every figure of the rule for each party."""
        lowest, highest, step = scale
        return {
            "indicator": indicator(offsets, masked, (lowest, highest)),
            "recovery": recovery_hits(offsets, masked, ratings, levels=(1,), step=step)[0] / np.diff(offsets),
            "ranking": hit_ratios(offsets, masked, ratings, tops=(TOP,)).hit[0],
        }

    def holds(self, offsets: np.ndarray, masked: np.ndarray, ratings: np.ndarray, scale) -> np.ndarray:
        """Which parties share in the clear. A figure that a party with a single rating does not have keeps it hidden."""
        found = self.figures(offsets, masked, ratings, scale)
        return np.all([found[name] <= bound for name, bound in self.most.items()], axis=0)
