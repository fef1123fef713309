"""Datasets: turns episodes of the store into LeRobot datasets ("shards"), and LeRobot datasets into episodes.

Out: export.py is the process, exporter.py decides what goes into which shard, maker.py makes it of what episodes.py
reads from the store, shards.py writes it, footage.py copies videos; plain.py gives shards the form of another dataset.
In: importer.py is the process, reader.py reads a dataset, anybody's. All use names.py, the columns.
robomimic.py reads and writes robomimic's files. single.py makes one episode a file to take along.
inspection.py looks for faults, for tools/data.py. Start with names.py, then `Exporter.work`.
It may import store, service.link, replay.views and training.plan. Nothing here imports torch; LeRobot, av and
pyarrow are imported only where a dataset is read or written, because they are an extra.
"""
