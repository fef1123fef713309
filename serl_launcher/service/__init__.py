"""Service: the server in front of the store, in one process with it. No torch.

Read server.py first (the loop), then intake.py (whose turn it is, and what a group is). welcome.py answers a Hello,
updates.py tells clients what is valid now, access.py says who is let in, peers.py who they are; keeper.py opens the
store again after a failure. link.py is the other side: how the learner's own processes ask the server.
It may import store, and nothing of replay, datasets, training or acting.
"""
