"""LocalLR: each party's private linear regression on item attributes, alone. Nothing is shared."""

from fedmpi.recsys.masked import Alone


class Method(Alone):
    kind = "lr"
