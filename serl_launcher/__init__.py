"""The learner: everything that runs on the GPU box. It imports serl_client, never robot_infra.

Read launcher.py first: it starts the processes, whose `main` lies in service, datasets (two), training and acting. They
share config.py (the command line), service/link.py (how a process asks the server) and types.py (a batch, a decision).
Imports go one way: store <- service, replay <- datasets, training <- acting, and networks <- policies <- algorithms <-
training.
"""
