"""The fewest bytes that the content of a round can take: no code of it is shorter in the mean.

Content is what a party has to say (its update) and what it has to learn (how the model changed). Everything else that a round moves,
keys, shares, headers, figures, is not in the bound, so that a ratio to it shows all of that as overhead.

Up
    masked        every coordinate is uniform over Z_2^b, by the masks: b bits, exactly
    in the clear  with noise: value = signal + the party's share of the noise, independent, and H(signal + noise) >= H(noise), which is
                  log2(deviation) + 2.05 bits of a discrete Gaussian. Without noise there is no law of the values, and no bound
    support       own and union: log2 C(d, k), what k of d coordinates hold if one choice is as likely as another
Down
    the sum       with noise: H(sum) >= H(noise of the whole cohort), of as many coordinates as a party sends. Where parties choose their
                  own, coordinate j has k_j/n of the variance; entropy is concave in it, so that the least, given how many coordinates
                  were sent in all, is where the choices agree. The model follows from the sum, so --download full has the same bound.
                  Without noise: no law, no bound
    support       union: log2 C(d, k), once
"""

from __future__ import annotations

from fedmpi.bill import laws
from fedmpi.bill.shape import Setting
from fedmpi.wire.sums import entropy_bits as noise_bits
from fedmpi.wire.support import entropy_bits as support_bits


def bound(setting: Setting, bill: laws.Bill) -> tuple[float | None, float | None]:
    """(up, down) bytes of a party and round, in the mean over those that take part; None where no law is known."""
    config, shape = setting.config, setting.shape
    if not shape.shares:
        return None, None
    count, support = bill.coordinates, config.aggregation.support
    mechanism = setting.mechanism(config)
    if support == "union":
        mechanism = mechanism.over(count)
    hidden = bill.hidden / bill.taking_part
    up: float | None = hidden * count * bill.bits
    if hidden < 1:
        up = (
            up + (1 - hidden) * count * noise_bits(mechanism.share(round(bill.taking_part)))
            if mechanism.noisy
            else None
        )
    down = count * noise_bits(mechanism.summed * mechanism.encoding.sensitivity) if mechanism.noisy else None
    if up is not None and support in ("own", "union"):
        up += support_bits(shape.proposed, shape.dimension)
    if down is not None and support == "union":
        down += support_bits(count, shape.dimension)
    return (None if up is None else up / 8), (None if down is None else down / 8)
