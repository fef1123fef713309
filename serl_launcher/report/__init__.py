"""The report of a run as one HTML file: no network, no script, nothing beside it.

Read page.py first, which puts the parts together. What they tell comes from training/facts.py.
It may import store, replay, datasets, config, and of training what needs no torch.
"""
