"""LocalNN: each party's private neural network with one hidden layer on item attributes, alone. Nothing is shared."""

from fedmpi.recsys.masked import Alone


class Method(Alone):
    kind = "nn"
