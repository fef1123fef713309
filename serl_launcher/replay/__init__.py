"""Replay: reads what the server stored and draws batches from it, for the trainer.

views.py says what an episode is and selects episodes; choice.py holds the steps at which windows may start; buffer.py
reads one source; mixture.py mixes sources and views into a Batch. Start with `ReplayMixture.sample`.
It may import `store.layout` and `types`, but nothing of training, acting or datasets. views.py and choice.py need no
torch, because processes without it import them.
"""
