"""Heads of chunk policies: each is a loss and a sampler around one network."""
