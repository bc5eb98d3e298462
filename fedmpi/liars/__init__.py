"""The attacks that once worked, played against the real code: `fedmpi attack`.

Whoever lies here is made of the product's own parts with something put in between; whoever is lied to is the product as it is.
"""
