"""Federated recommendation: every user is a party, the item factors are shared. Paper MMF."""
