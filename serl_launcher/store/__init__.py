"""Store: what was collected, as files that survive whatever may happen. No sockets, no torch.

Read store.py first (what a commit is), then layout.py (the files, which readers map).
Of the other rooms it imports nothing.
"""
