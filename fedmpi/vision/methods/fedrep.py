"""FedRep (Collins 2021): a shared representation under local heads. The ceiling of the methods that share an extractor.

Shared: the whole extractor, dense. Local: head and running statistics. Noised: nothing; --epsilon must be inf. It is
CENTAUR without noise and with a clipping bound that is never reached, bit for bit.
"""

from fedmpi.vision.methods import centaur
from fedmpi.vision.methods._unnoised import Unnoised


class Method(Unnoised, centaur.Method):
    pass
