"""Shows episodes of a run as its store holds them: small images of its cameras, else the state as lines."""

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from serl_client.errors import RetakeError
from serl_client.spec import IMAGES, Array

from serl_launcher.datasets.episodes import EpisodeReader, Gone
from serl_launcher.datasets.names import is_image
from serl_launcher.report.charts import Line, chart
from serl_launcher.report.elements import Markup, element, number
from serl_launcher.store.layout import Layout
from serl_launcher.store.schema import EpisodeInfo
from serl_launcher.training.facts import Facts
from serl_launcher.training.tallies import Point, counts, succeeded, thinned

FRAMES, SIDE, CAMERAS = 5, 128, 2  # images of an episode, their longer side in pixels, and cameras that are shown
LINES, MOMENTS = 6, 100  # numbers of the state that are shown, at so many steps at most


def episodes_shown(facts: Facts) -> list[Markup]:
    """Return figures of the first, of a failed and of the last episode that the store still holds."""
    if facts.spec is None:
        return []
    readers = {
        name: EpisodeReader(facts.run_dir / "store" / name, Layout(facts.spec, source.capacity))
        for name, source in facts.sources.items() if (facts.run_dir / "store" / name / "published").exists()
    }  # fmt: skip
    held = [e for e in facts.all_episodes if counts(e) and e.source in readers and e.first >= readers[e.source].tail]
    failed = [episode for episode in held if episode.success is not None and not succeeded(episode)]
    chosen = {"first": held[:1], "failed": failed[-1:], "last": held[-1:]}
    return [
        figure for name, episodes in chosen.items() for episode in episodes
        if (figure := _figure(f"The {name} episode", readers[episode.source], episode))
    ]  # fmt: skip


def _figure(title: str, reader: EpisodeReader, episode: EpisodeInfo) -> Markup | None:
    try:
        rows = reader.rows(episode)
        images = [name for name, feature in reader.layout.spec.observation.items() if is_image(feature)]
        strips = [_strip(name.removeprefix(IMAGES), rows[name]) for name in images[:CAMERAS]]
    except (Gone, RetakeError, OSError, ValueError):
        return None  # it has left the store, or its files are damaged
    judged = "not judged" if episode.success is None else "success" if succeeded(episode) else "no success"
    helped = f", a person drove {episode.intervened}" if episode.intervened else ""
    said = f"{episode.phase}: {episode.steps} steps{helped}, return {number(episode.reward)}, {judged}"
    if strips:
        return element("figure", element("h3", title), *strips, element("figcaption", said), class_="card")
    return _lines(title, said, rows)


def _strip(camera: str, images: Sequence[Array]) -> Markup:
    shown = thinned(range(len(images)), FRAMES)
    pictures = [element("img", src=_jpeg(images[i]), alt=f"{camera}, step {i}", title=f"{camera}, step {i}")
                for i in shown]  # fmt: skip
    return element("div", *pictures, class_="strip")


def _jpeg(image: Array) -> str:
    """Return an image uint8 [H, W, C] as a small data URI."""
    from PIL import Image  # matplotlib brings it; the robot PC has none

    array = image[..., 0] if image.shape[-1] in (1, 2) else image[..., :3]
    picture = Image.fromarray(np.ascontiguousarray(array))
    picture.thumbnail((SIDE, SIDE))
    picture.save(file := io.BytesIO(), "jpeg", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _lines(title: str, said: str, rows: Mapping[str, Array]) -> Markup | None:
    name = next((name for name, column in rows.items() if name.startswith("observation.") and column.ndim == 2), None)
    if name is None:
        return None
    moments = thinned(range(len(rows[name])), MOMENTS)
    columns = rows[name][moments, :LINES].T.astype(float)
    lines = [
        Line([Point(at, value, value, value) for at, value in zip(moments, column.tolist(), strict=True)], str(i))
        for i, column in enumerate(columns)
    ]
    why = f"{said}. Lines: {name}, its first {len(lines)} numbers"
    return chart(title, why, lines, x="steps", says_last=False)
