"""A shared secret from the shares of those who hold them, although some of them may lie."""

from collections.abc import Callable, Mapping

from fedmpi.crypto.shamir import decode, int_to_secret, lagrange_weights, reconstruct
from fedmpi.errors import CryptoError


class BadDealer(CryptoError):
    """A dealer that is to blame, whoever holds its shares."""

    def __init__(self, dealer: int):
        self.dealer, self.what = dealer, "shared another secret than it committed to"
        super().__init__(f"party {dealer} {self.what}")


class Opening:
    """For all secrets of a round: owners with the same places left share their Lagrange weights."""

    def __init__(self, threshold: int):
        self._threshold = threshold
        self._weights: dict[tuple[int, ...], list[int]] = {}

    def open(
        self, owner: int, shares: Mapping[int, tuple[int, int]], fits: Callable[[bytes], bool]
    ) -> tuple[bytes, list[int]]:
        """(the secret, the holders whose shares were wrong), from holder -> (place, share); `fits` says whether a secret is the one
        that the owner committed to. CryptoError if it cannot be found."""
        t = self._threshold
        if len(shares) < t:
            raise CryptoError(f"{len(shares)} shares of party {owner} came back, the threshold is {t}")
        points, values = map(list, zip(*shares.values()))
        secret = _checked(reconstruct(self._weights_at(tuple(points[:t])), values[:t]), fits)
        if secret is not None:
            return secret, []
        unknown = f"the shares of party {owner} do not fit its commitment, and there are too few to tell who lied"
        if len(shares) == t:  # which lie on some polynomial: the dealer must not be blamed for a holder's lie
            raise CryptoError(unknown)
        try:
            value, wrong = decode(points, values, t)
        except CryptoError:
            raise CryptoError(unknown) from None
        secret = _checked(value, fits)
        if secret is None:
            raise BadDealer(owner)
        holders = list(shares)
        return secret, [holders[position] for position in wrong]

    def _weights_at(self, points: tuple[int, ...]) -> list[int]:
        if points not in self._weights:
            self._weights[points] = lagrange_weights(points)
        return self._weights[points]


def _checked(value: int, fits: Callable[[bytes], bool]) -> bytes | None:
    try:
        secret = int_to_secret(value)
    except CryptoError:
        return None
    return secret if fits(secret) else None
