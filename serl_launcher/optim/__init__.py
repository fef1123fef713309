"""Optim: how weights change.

optimizer.py steps them, on one rank or many; schedule.py is the learning rate; averaging.py follows weights with
averages; distributed.py says which rank this is, and sums over all.
It may import types, and nothing of replay, datasets, training, acting or the models.
"""
