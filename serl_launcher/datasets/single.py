"""Makes one episode a file to take along: a video of its cameras, or a shard of its own as a zip archive.

A process of its own, `python -m serl_launcher.datasets.single RUN EPISODE OUT`, because LeRobot brings torch.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from serl_client.errors import ConfigError
from serl_client.spec import Spec

from serl_launcher.datasets import recording, shards
from serl_launcher.datasets.episodes import Gone, Rows, open_run
from serl_launcher.datasets.names import INSTALL, MANIFEST
from serl_launcher.error_log import in_one_sentence
from serl_launcher.replay.views import EpisodeInfo


def make(run_dir: Path, episode: str, out: Path) -> None:
    """Write a closed episode to `out`: a video if its name ends in .mp4, else a shard in a .zip.

    Raises ConfigError if a package is missing, if there is no such episode, if it goes on or has left the store, and
    for a video without a camera.
    """
    if lacking := shards.missing():
        raise ConfigError(f"this needs {', '.join(lacking)}: {INSTALL}")
    spec, readers, infos = open_run(run_dir)
    info = next((each for each in infos if each.id == episode), None)
    if info is None or not info.closed:
        raise ConfigError(f"{episode!r:.100} is no episode that has ended: choose another one")
    try:
        rows = readers[info.source].rows(info)
        if out.suffix != ".mp4":
            _archive(out, spec, info, rows)
        elif not recording.record_video(out, rows, info._asdict(), spec):
            raise ConfigError("this robot has no camera, so there is no video: take the shard")
    except Gone:
        raise ConfigError(f"{episode} has left the store, newer steps took its room: look into RUN/datasets") from None


def _archive(out: Path, spec: Spec, info: EpisodeInfo, rows: Rows) -> None:
    """Write a shard that holds this episode alone, verified as any other."""
    codec, phases = shards.codec_for(spec), [info.phase]
    with TemporaryDirectory(dir=out.parent) as folder:
        part = Path(folder, "shard")
        written = shards.write(part, spec, codec, [(info, shards.table(info, rows, spec, phases))])
        shards.verify(part, spec, written)
        manifest = shards.manifest("", info.source, 1, spec, phases, codec, 1, [info], [])
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.make_archive(str(out.with_suffix("")), "zip", part)


@in_one_sentence()
def main() -> None:
    run_dir, episode, out = sys.argv[1:]
    make(Path(run_dir), episode, Path(out))


if __name__ == "__main__":
    main()
