"""Has an episode made into a file that a person takes along, by a process of its own, one at a time."""

import asyncio
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from serl_client.errors import ConfigError

MAKER = "serl_launcher.datasets.single"  # started by its name: what it imports may stall no page
FORMATS = {"mp4": ".mp4", "shard": ".zip"} if find_spec("lerobot") and find_spec("av") else {}  # as the name ends
MADE_S = 120.0  # seconds that it may take
_alone = asyncio.Semaphore(1)


async def made(run_dir: Path, episode: str, format: str) -> bytes:
    """Return the file of an episode. format: of FORMATS. Raises ConfigError if there is none, as its maker says."""
    if format not in FORMATS:
        raise ConfigError(f"there is no download {format[:40]!r} here: it needs `. examples/install.sh --extra data`")
    async with _alone:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, f"episode{FORMATS[format]}")
            command = "-m", MAKER, str(run_dir), episode, str(out)
            process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
            try:
                _, said = await asyncio.wait_for(process.communicate(), MADE_S)
            except TimeoutError:
                raise ConfigError(f"making it took more than {MADE_S:.0f} s: ask again on an idle machine") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode:
                lines = said.decode(errors="replace").strip().splitlines()
                raise ConfigError((lines or ["its maker failed"])[-1].removeprefix("error: "))
            return out.read_bytes()
