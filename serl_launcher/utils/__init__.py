"""Utils: what several rooms use and none owns. Nothing here imports from replay, datasets, training or
acting; of store, checkpoint.py takes how a folder is synced.

Without torch: logging.py (metrics: JSON lines, wandb, TensorBoard), recording.py (rerun, mp4), report.py (summary.json,
learning curve), schedule.py (learning rate), words.py (the word that was meant). With torch: checkpoint.py,
distributed.py (ranks), finite.py (NaN), optim.py (Adam, sharding), staging.py (tensors as a file in memory).
"""
