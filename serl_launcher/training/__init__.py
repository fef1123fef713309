"""Training: the plan of a run, and the trainer process that carries it out.

Read plan.py first (a run as data), then `Learner.run` in learner.py. trainer.py is the process, plan_state.py says
which update is next, ranks.py spreads it over GPUs, server_sync.py talks with the server, counters.py counts what
actors did, monitor.py shows it, writers.py publishes weights and keeps checkpoints.
It may import store, service, replay, algorithms, optim, types and config, but nothing of acting or datasets.
plan.py and plan_reader.py need no torch, because processes without it read the plan.
"""
