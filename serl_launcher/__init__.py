"""The learner: everything that runs on the GPU box. It imports serl_client, never robot_infra.

Read launcher.py first: it starts the processes, whose `main` lies in store, datasets (two), training and acting. They
share config.py (the command line), learner_link.py (how a process asks the server) and types.py (a batch, a decision).
Imports go one way: store <- replay <- datasets, training <- acting, and networks <- policies <- algorithms <- training.
"""
