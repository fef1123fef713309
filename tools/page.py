#!/usr/bin/env python
"""Shows a run in a browser, and takes an operator's orders: docs/guides/page.md.

tools/page.py RUN [--port PORT] [--host HOST --keys KEYS [--certificate FILE]]

For a run whose learner was started without page=PORT; also for one whose learner does not run any more, to look only.
Ctrl-C ends the page, and nothing else.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path

from serl_client.errors import ConfigError

from serl_launcher.error_log import in_one_sentence
from serl_launcher.page.server import Page
from serl_launcher.service.sockets import address_here
from serl_launcher.sharing import is_shared, keep_private


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, on this machine")
    parser.add_argument("--port", type=int, default=8088)
    parser.add_argument("--host", default="127.0.0.1", help="as page_host=HOST at a learner")
    parser.add_argument("--keys", type=Path, help="the folder of keys, which another host than loopback needs")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="as page_certificate=FILE at a learner")
    options = parser.parse_args()
    run_dir = options.run.resolve()
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{options.run} is no run's folder: give the run_dir of a learner that was started here")
    keep_private(is_shared(run_dir))
    os.nice(19)
    doors = {"host": options.host, "keys": options.keys, "certificate": options.certificate}
    page = Page(run_dir, address_here(run_dir), **doors)
    asyncio.run(page.run(options.port, signal.SIGTERM))


if __name__ == "__main__":
    main()
