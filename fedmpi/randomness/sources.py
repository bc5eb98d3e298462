"""Which source a draw comes from: one that the seed determines, or a secret one."""

from fedmpi.randomness.words import SeededWords, WordSource


def source(entropy: str, seed: int, purpose: str, party: int, round: int) -> WordSource:
    """`seeded`: anybody who knows the seed can repeat it. `os`: under a new key of the operating system, kept nowhere."""
    if entropy == "os":
        from fedmpi.crypto.prg import KeyStream  # only here: what is seeded needs no cipher

        return KeyStream.from_os(f"{purpose}/{party}/{round}".encode())
    return SeededWords(seed, purpose, party, round)
