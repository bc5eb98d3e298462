"""FedMMF with the high-order mask: a private neural network with one hidden layer on item attributes.

Shared: the item factors Q of the masked ratings. Local: the private model, p_u, and the ratings. Noised: nothing. In the clear,
gradients show which items a party rated, and its ratings less what its private model predicts.
"""

from fedmpi.recsys.masked import Masked


class Method(Masked):
    kind = "nn"
