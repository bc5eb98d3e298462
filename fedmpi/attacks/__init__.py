"""What an observer makes of what it sees: ratings out of masked ratings, and out of gradients (MMF 2.2.2, 3.3, 4.2).

Each attack is a function of the observer's view alone. The truth is passed apart from it, and only to score.
"""
