"""Endpoints that carry frames between ranks, and the ledger that counts them."""
