"""FedMF: matrix factorisation on the raw ratings, MMF 2.2.

Shared: the item factors Q (and item biases). Local: p_u, and the ratings. Noised: nothing. In the clear, a party's gradients
show which items it rated and, over two rounds, how (MMF 2.2.2): `python -m fedmpi.audit` shows it.
"""

from fedmpi.recsys.factorisation import Factorisation


class Method(Factorisation):
    pass
