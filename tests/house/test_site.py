"""The pages become a site, without a warning, and it loads nothing from elsewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.shared.common import ROOT

LOADS = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    made = {str(path.relative_to(site).with_suffix("")): path.read_text() for path in site.rglob("*.html")}
    assert {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")} <= {*made}
    assert [tag for text in made.values() for tag in LOADS.findall(text)] == []
    assert not any('class="mermaid"' in text for text in made.values())  # its script would come from elsewhere
    assert "takeover" in (site / "search.json").read_text()
