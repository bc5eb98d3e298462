"""Flower's SecAgg+ without its network, for `benchmarks.secagg_cost --against flwr`.

The client's stages are its own functions. The server's unmasking is put together from the fastest run of each piece, in
the order and number of `SecAggPlusWorkflow.unmask_stage`, so a lower bound: in one go it takes minutes at n = 100. Its
defaults, but for the threshold, which is ours, and everybody a neighbour of everybody.
"""

from importlib import import_module
from time import process_time

import numpy as np

CLIPPING, TARGET, MODULUS = 8.0, 1 << 22, 1 << 32  # its defaults


class Flower:
    def __init__(self, n: int, d: int, threshold: int, dropped: int):
        # Here, so that the benchmark runs without Flower.
        from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
        from flwr.common.secure_aggregation import ndarrays_arithmetic
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares
        from flwr.common.secure_aggregation.secaggplus_constants import Key

        # Its package has a function of the same name, which `import` would give.
        mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
        self._mod, self._key, self._arithmetic = mod, Key, ndarrays_arithmetic
        self._decode, self._combine = bytes_to_ndarray, combine_shares
        self._n, self._threshold, self._dropped = n, threshold, dropped
        self._floats = [np.random.default_rng(0).standard_normal(d)]
        self._parameters = ndarrays_to_parameters(self._floats)
        self._peers = {}  # party -> its two public keys
        for party in range(1, n):
            pairs = mod.generate_key_pairs(), mod.generate_key_pairs()
            self._peers[party] = [mod.public_key_to_bytes(public) for _, public in pairs]
        self.best: dict[str, float] = {}  # CPU seconds of the fastest run

    def run(self) -> None:
        """One client's set-up and masked vector, and one of each piece of unmasking."""
        state = self._mod.SecAggPlusState()
        self._share(state)
        self._open(state, self._mask(state))

    def _timed(self, name: str, call, *given):
        start = process_time()
        result = call(*given)
        self.best[name] = min(process_time() - start, self.best.get(name, float("inf")))
        return result

    def _share(self, state) -> None:
        key, mod = self._key, self._mod
        configs = {key.SAMPLE_NUMBER: self._n, key.SHARE_NUMBER: self._n, key.THRESHOLD: self._threshold}
        configs |= {
            key.CLIPPING_RANGE: CLIPPING,
            key.TARGET_RANGE: TARGET,
            key.MOD_RANGE: MODULUS,
            key.MAX_WEIGHT: 1000.0,
        }
        own = self._timed("keys", mod._setup, state, configs)
        keys = {"0": [own[key.PUBLIC_KEY_1], own[key.PUBLIC_KEY_2]]}
        self._timed("shares", mod._share_keys, state, keys | {str(party): pair for party, pair in self._peers.items()})

    def _mask(self, state) -> list[bytes]:
        key, mod = self._key, self._mod
        shares = state.rd_seed_share_dict[0], state.sk1_share_dict[0]  # as good as those that others would have dealt
        texts = [
            mod.encrypt(state.ss2_dict[party], mod.share_keys_plaintext_concat(party, 0, *shares))
            for party in self._peers
        ]
        bundles = {key.CIPHERTEXT_LIST: texts, key.SOURCE_LIST: list(self._peers)}
        sent = self._timed("masked", mod._collect_masked_vectors, state, bundles, 100, self._parameters)
        self._timed("quantize", mod.quantize, self._floats, CLIPPING, TARGET)
        return sent[key.MASKED_PARAMETERS]

    def _open(self, state, sent: list[bytes]) -> None:
        mod, arithmetic = self._mod, self._arithmetic
        for name, secret in (("open seed", state.rd_seed), ("open key", state.sk1)):
            shares = mod.create_shares(secret, state.threshold, self._n)[: self._n - self._dropped]
            assert self._timed(name, self._combine, shares) == secret
        vector = self._timed("decode", lambda: [self._decode(part) for part in sent])
        shapes = arithmetic.get_parameters_shape(vector)
        mask = self._timed("mask", mod.pseudo_rand_gen, state.rd_seed, MODULUS, shapes)
        self._timed("add", arithmetic.parameters_addition, vector, mask)
        self._timed("agree", self._agree, state.sk1, self._peers[1][0])

    def _agree(self, private: bytes, public: bytes) -> bytes:
        mod = self._mod
        return mod.generate_shared_key(mod.bytes_to_private_key(private), mod.bytes_to_public_key(public))

    # ---- the figures, CPU seconds ----

    def set_up(self) -> float:
        return self.best["keys"] + self.best["shares"]

    def masking(self) -> float:
        # It quantises in this stage; fedmpi has encoded the update before.
        return self.best["masked"] - self.best["quantize"]

    def unmasking(self) -> float:
        """With the sum of the masked vectors, which fedmpi also forms there."""
        best, stay = self.best, self._n - self._dropped
        masks = best["mask"] + best["add"]
        survivors = stay * (best["decode"] + best["add"] + best["open seed"] + masks)
        # It takes off the masks between a dropped party and everyone, dropped or not.
        return survivors + self._dropped * (best["open key"] + (self._n - 1) * (best["agree"] + masks))
