"""FedRep (Collins 2021): a shared representation under local heads. The ceiling of the methods that share an extractor.

Shared: the whole extractor, dense. Local: head and running statistics. Noised: nothing; --epsilon must be inf. It is
CENTAUR without noise and with a clipping bound that is never reached, bit for bit.
"""

from fedmpi.vision.base import NOT_PRIVATE
from fedmpi.vision.methods import centaur


class Method(centaur.Method):
    sends = NOT_PRIVATE
