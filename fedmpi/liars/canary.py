"""Nothing imports this: whoever finds it among its modules let rank 0 name what it runs."""

from fedmpi.liars import toy


class Method(toy.Method):
    """As harmless as the one that it stands in for."""
