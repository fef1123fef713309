"""The durable store and the server in front of it: one process, the store's only writer, without torch.

Read server.py first (the loop), then store.py (what a commit is) and layout.py (the files, which readers map). No
module here imports replay, datasets, training or acting.
"""
