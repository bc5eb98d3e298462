"""LocalFM: each party's private factorisation machine on item attributes, alone. Nothing is shared."""

from fedmpi.recsys.masked import Alone


class Method(Alone):
    kind = "fm"
