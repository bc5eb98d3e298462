"""Taking the masks off: who masked with whom, who holds shares of whose secret, and from the survivors' answers the sum.

Made when it is settled whose inputs are in the sum. Nothing here changes from then on but the answers that it is given.
"""

from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.crypto.masks import add_masks
from fedmpi.crypto.shamir import SEEDS, decode_share
from fedmpi.errors import CryptoError, Fault
from fedmpi.secagg.disputes import Group, alone
from fedmpi.secagg.material import Material
from fedmpi.secagg.messages import Answer, MaskedInput, Unmask
from fedmpi.secagg.opening import Dealt, Opening, Unfit
from fedmpi.secagg.rules import Meter, Rules
from fedmpi.wire.bits import PackedSum
from fedmpi.wire.phases import Cost, Phase

Masks = list[tuple[bytes, int]]  # (key, sign) of what is added to the sum
Opened = dict[int, dict[int, Answer]]  # holder -> owner -> answer


class Unmasking:
    def __init__(
        self,
        rules: Rules,
        material: Material,
        inputs: Mapping[int, MaskedInput],
        group: Group = alone,
    ):
        """`inputs` of those who sent them, the protocol's U3. `group`: who speaks through one rank."""
        self._rules, self._material, self._inputs, self._group = rules, material, inputs, group
        self._neighbours, dealt = material.neighbours, material.dealt
        self._unopened = {party: frozenset(message.unopened) for party, message in inputs.items()}
        self._needed = [party for party in dealt if party in inputs or self.holders(party, inputs)]
        short = [owner for owner in self._needed if len(self.holders(owner, inputs)) < rules.threshold]
        # The secret of a dropped party is lost with so few holders: whoever masked with it says what with.
        self.direct = frozenset(owner for owner in short if owner not in inputs)
        self.lost = next((owner for owner in short if owner in inputs), None)  # a survivor that cannot be opened
        self.faults: list[Fault] = []  # who was caught at what
        self.disputes: set[tuple[int, int]] = set()  # (holder, dealer) of a wrong share: it was dealt, or opened, wrong

    def masked_with(self, party: int) -> list[int]:
        """The peers that a survivor agreed on masks with: those whose bundle it opened."""
        unopened = self._unopened[party]
        return [peer for peer in self._neighbours[party] if peer in self._material.dealt and peer not in unopened]

    def holders(self, owner: int, alive: Container[int]) -> list[int]:
        """Survivors that have a share of the owner's secrets and could open it, as far as they are `alive`."""
        others = (
            peer
            for peer in self._neighbours[owner]
            if peer in alive and peer in self._inputs and owner not in self._unopened[peer]
        )
        return sorted([*others, *([owner] if owner in alive and owner in self._inputs else [])])

    def direct_for(self, party: int) -> tuple[int, ...]:
        """The dropped parties whose mask it is asked for."""
        return tuple(owner for owner in self.masked_with(party) if owner in self.direct) if self.direct else ()

    # ---- the sum ----

    def sum(self, answers: Mapping[int, Unmask], threads: int, meter: Meter) -> NDArray[np.uint64]:
        """In Z_{2^b}; CryptoError if the answers do not open it."""
        with meter(Phase.UNMASK, Cost.SHAMIR_COMBINE):
            opened = {holder: {a.owner: a for a in message.answers} for holder, message in answers.items()}
            secrets = self._open_all(opened)
        masks = [pair for owner in sorted(self.direct) for pair in self._told_masks(owner, opened)]
        with meter(Phase.UNMASK, Cost.DH):
            for owner, secret in secrets.items():
                masks += self._masks_of(owner, secret)
        with meter(Phase.UNMASK, Cost.AGGREGATE):
            total = self._sum_inputs()
        with meter(Phase.UNMASK, Cost.PRG):
            add_masks(total, [key for key, _ in masks], [sign for _, sign in masks], threads=threads)
        within: NDArray[np.uint64] = total.astype(np.uint64) & np.uint64((1 << self._rules.bits) - 1)
        return within

    def _sum_inputs(self) -> NDArray[np.unsignedinteger[Any]]:
        total = PackedSum(self._rules.dimension, self._rules.bits)
        for message in self._inputs.values():
            total.add(message.values)
        return total.total().astype(self._rules.lane)

    def _open_all(self, opened: Opened) -> dict[int, bytes]:
        """b_u of every survivor and the other secret of every dropped party that somebody masked with. All are tried, also after one that
        cannot be opened: where few cannot, it was those who dealt them."""
        opening, secrets = Opening(self._rules.threshold, self._group), dict[int, bytes]()
        unfit: dict[int, Unfit] = {}
        needed = [owner for owner in self._needed if owner not in self.direct]
        for owner in needed:
            try:
                secrets[owner] = self._open(owner, opened, opening)
            except Unfit as error:
                unfit[owner] = error
        if 2 * len(unfit) >= len(needed):  # holders lie, and dealers are not to be blamed for it
            raise CryptoError(f"the shares of {len(unfit)} parties fit nothing, and there are too few to tell who lied")
        for owner in (owner for owner, error in unfit.items() if error.dealt):
            what = "dealt shares that do not fit what it committed to"
            self.faults.append(Fault(owner, Phase.SHARE_KEYS, what, certain=False))
            self.disputes |= {(holder, owner) for holder in self.holders(owner, opened) if holder != owner}
        if unfit:
            raise next(iter(unfit.values()))
        return secrets

    def _open(self, owner: int, opened: Opened, opening: Opening) -> bytes:
        """One of them, checked against what its owner committed to."""
        material, survived = self._material, owner in self._inputs
        fits, field = (material.fits_seed, SEEDS) if survived else (material.fits_key, material.key_field)
        places, holders = material.places(owner), self.holders(owner, opened)
        shares = {holder: (places[holder], decode_share(opened[holder][owner].share, field)) for holder in holders}
        secret, liars = opening.open(Dealt(owner, shares, partial(fits, owner), field))
        what = f"sent a wrong share of party {owner}"
        # A dealer may have dealt it wrong to another, but not to itself.
        self.faults += [Fault(holder, Phase.UNMASK, what, certain=holder == owner) for holder in liars]
        self.disputes |= {(holder, owner) for holder in liars if holder != owner}
        return secret

    def _masks_of(self, owner: int, secret: bytes) -> Masks:
        """A survivor's own mask, from b; or what survivors masked with a dropped party, from its other secret."""
        if owner in self._inputs:
            return [(self._material.self_mask(owner, secret), -1)]
        masks = self._material.pair_masks(owner, secret, self.holders(owner, self._inputs))
        return [(key, _comes_off(other, owner)) for other, key in masks.items()]

    def _told_masks(self, owner: int, opened: Opened) -> Masks:
        """What survivors masked with a dropped party, as each says. One that says it wrong spoils the sum as it could have by its
        input, and no more."""
        holders = self.holders(owner, self._inputs)
        silent = [holder for holder in holders if holder not in opened]
        if silent:
            raise CryptoError(
                f"party {silent[0]}, which masked with party {owner}, has not answered, and fewer hold shares of that "
                f"one's secret than the threshold is {self._rules.threshold}"
            )
        return [(opened[holder][owner].share, _comes_off(holder, owner)) for holder in holders]


def _comes_off(survivor: int, dropped: int) -> int:
    """MMF (9) with its sign: a survivor that is the lower one has added the mask of the pair, and it comes off."""
    return -1 if survivor < dropped else 1
