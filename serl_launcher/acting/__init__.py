"""Acting: answers observations with actions of published weights, in a process of its own or inside an actor.

Read host.py first: PolicyHost holds the weights and answers. local.py is a thread with one inside an actor. server.py
is the inference process, which answers many actors in batches; graphs.py records CUDA graphs. bridge.py lets openpi's
clients ask the same batches.
It may import algorithms, types, service (access, peers, link), store.weights and training (build, finite, memory), but
nothing of replay or datasets.
"""
