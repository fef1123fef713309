"""Page: shows a run in a browser, and takes an operator's orders. A process of the learner; no torch.

door.py says who is let in, certificate.py with which TLS; links.py makes the links; doorstep.py bounds what browsers
hold, on a port of ports.py; stream.py stands in for a websocket. folder.py reads the run's folder and asks the server;
images.py finds images in the store. orders.py is the server's client for what changes something, drivers.py for what
moves a robot; downloads.py has an episode made into a file. Start with `server.main`.
It may import `store`, `service`, and of `training` what reads plans and metrics; nothing here writes the store.
"""
