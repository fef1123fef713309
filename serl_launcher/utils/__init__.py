"""Utils: what several rooms use and none owns. Nothing here imports from store, replay, datasets, training or acting.

Without torch: logging.py (metrics as JSON lines, wandb), recording.py (rerun, mp4), report.py (summary.json, learning
curve), schedule.py (learning rate). With torch: checkpoint.py, distributed.py (ranks), optim.py (Adam, sharding).
"""
