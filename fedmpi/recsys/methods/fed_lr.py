"""FedLR: one linear regression on item attributes and user profile for all parties.

Shared: its parameters. Local: the ratings and the profile. Noised: nothing.
"""

from fedmpi.recsys.context import Context


class Method(Context):
    kind = "lr"
