"""Power cuts: whatever was promised is there when only what was synced survives, and no sync is there for show."""

import random

import pytest

from tests.faults import power

# Without this sync some cut breaks a promise.
NEEDED = (
    ". (made run)", "run (made store)", "run (made weights)", "run/store (made late)",
    *(f"run/store/{source} (made published)" for source in ("demo", "online", "late")),
    *(f"run/store/{source}/{file} (made)" for source in ("demo", "online", "late") for file in ("rows", "steps")),
    *(f"run/store/{source}/published (made)" for source in ("demo", "online", "late")),
    *(f"run/store/{source}/{file}" for source in ("demo", "online") for file in ("rows", "steps")),
    "run/store/index.new", "run/store/index.sqlite-wal", "run/store/index.sqlite",
    "run/store (made index.sqlite-shm)", "run/weights/*.checksums.part",
    "run/weights/*.safetensors.part", "run/weights (named *.safetensors)",
)  # fmt: skip
# Which are always tried.
FEW = ("run/store/index.sqlite-wal", "run/store/online/rows", "run/weights/*.safetensors.part")
# Another one that follows before anything is promised does the same: that of SQLite for its log, in the same folder ...
COVERED = ("run/store (made online)", "run/store (named index.sqlite)")
# ... or the file counts only when it has got its last name.
NOT_YET = (
    "run/store/index.new-journal", "run/store (made index.new-journal)", "run/store/index.new-wal",
    "run/store (made index.new-shm)",
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    """(trace, folder, {site: numbers of its syncs}) of one run of a server."""
    with power.recorded() as (trace, root):
        yield trace, root, power.sites(trace, root)


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_every_cut_that_keeps_only_what_was_synced_keeps_every_promise(recorded, every):
    trace, root, _ = recorded
    assert list(power.strict(trace, root, every=every)) == []


@pytest.mark.slow
def test_cuts_that_keep_some_of_the_rest_torn_and_out_of_order_keep_every_promise(recorded):
    trace, root, _ = recorded
    numbers = random.Random(3).sample(range(len(trace)), 100)
    assert list(power.kept_in_part(trace, root, {number: number for number in numbers})) == []


def test_every_sync_of_the_run_is_known(recorded):
    assert sorted(recorded[2]) == sorted((*NEEDED, *COVERED, *NOT_YET))


@pytest.mark.parametrize(
    "site", [site if site in FEW else pytest.param(site, marks=pytest.mark.slow) for site in NEEDED]
)
def test_without_one_of_its_syncs_a_cut_breaks_a_promise(recorded, site):
    trace, root, sites = recorded
    assert power.without(trace, root, sites[site]) is not None


@pytest.mark.slow
def test_without_both_syncs_of_a_name_a_cut_breaks_a_promise(recorded):
    """Each of the two alone does for a name; without all of the folder's it is lost."""
    trace, root, sites = recorded
    of_folder = [numbers for site, numbers in sites.items() if site.startswith("run/store (")]
    assert power.without(trace, root, [number for numbers in of_folder for number in numbers]) is not None
