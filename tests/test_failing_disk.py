"""An actor whose disk is full, fails or damages what it holds: nothing acknowledged is lost, and somebody is told."""

import errno
import json
import subprocess
import sys
import time

import pytest
from serl_client import messages as m
from serl_client.outbox import Outbox

from tests.test_service import ServerProcess, episode, stored, wait_until
from tools.faults import shim
from tools.faults.shim import READ, RENAME, UNLINK, WRITE

ACTOR = """
import json, logging, sys, time
from pathlib import Path
from serl_client import Spec, TrainerClient, outbox
from serl_client.errors import ConfigError
sys.path.insert(0, {root!r})
from tests.test_failing_disk import records
logging.basicConfig(format="%(message)s")
folder, address = Path(sys.argv[1]), sys.argv[2]
outbox.FILE_BYTES, told, number = 2000, set(), 0
try:
    client = TrainerClient(address, actor=folder.name, spec=Spec.from_dict(json.loads(sys.argv[3])), outbox=folder)
except ConfigError as error:
    sys.exit(str(error))
with client:
    while not (folder / "stop").exists():
        if client.directive["mode"] == "collect":
            for record in records(client.epoch, number, client.directive["number"]):
                while not client.room and not (folder / "stop").exists():
                    told.add(client.fault)
                    client.wait(0.01)
                client.push(record)
            number += 1
        time.sleep(0.005)
    print(json.dumps([client.epoch, number, sorted(told), client.drain(15)]))
"""
