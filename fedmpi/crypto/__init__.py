"""Cryptographic primitives. Bytes in, bytes out."""
