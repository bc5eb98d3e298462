"""For the references without differential privacy: no noise, no clipping, and a refusal where a run expects them."""

import math

from fedmpi.errors import ConfigError


class Unnoised:
    """Mixed into a method. --epsilon must be inf and --clip is not looked at.

    Updates are still encoded as integers, which needs a range. 64 is longer than all the weights of a ResNet20 as it is
    drawn (norm 44), and five epochs of SGD move it by about 1; an update that is longer all the same ends the run instead
    of being shortened. --precision makes the steps within the range finer.
    """

    bound = 64.0

    def __init__(self, config, store, device: str = "cpu"):
        if math.isfinite(config.privacy.epsilon):
            raise ConfigError(
                f"epsilon = {config.privacy.epsilon:g}: {config.run.method} adds no noise and promises no epsilon; take inf"
            )
        super().__init__(config, store, device)
