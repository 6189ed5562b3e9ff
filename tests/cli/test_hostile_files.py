"""Whatever an input file contains: exit code 2, one message, nothing changed, in little memory and time.

Generated: every kind of damage to every kind of file, and seeded changes of bits and of JSON and YAML values.
"""

import hashlib
import sys

import pytest

from tests.cli.hostile_files import DAMAGES, READERS, bounded, copy_of, flip_a_bit, make_sound, mutate
from tests.sampling import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

# a text may have any size, and take any amount of time
LEFT_OUT = {("text", "3 GB"), ("compressed lines", "3 GB")}
# valid as text, if odd
LEFT_OUT |= {("text", damage) for damage in ("deep nesting", "deep objects", "5,000 digits")}
PAIRS = [(name, damage) for name in READERS for damage in DAMAGES if (name, damage) not in LEFT_OUT]
TREES = [name for name, reader in READERS.items() if reader.file.endswith((".json", ".yaml"))]


def each_reader(names, num_seeds):
    """Each reader with each seed; `make test` takes each once."""
    return sampled([(name, seed) for name in names for seed in range(num_seeds)], lambda one: {one[0]})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    make_sound(folder)
    return folder


def state_of(folder):
    """Every file below ``folder`` except locks: its hash, or size and modification time if it is too large to read."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    large = {path: path.stat() for path in files if path.stat().st_size > 2**30}
    small = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path not in large}
    return small | {path: (status.st_size, status.st_mtime_ns) for path, status in large.items()}


def assert_refused_or_read(reader, folder, *, may_be_read):
    """Runs the command on a damaged file: one message and no changes; or success, where something valid is left."""
    before = state_of(folder)
    with bounded():
        found = reader.read(folder)
    assert found.code in ((0, 2) if may_be_read else (2,)), found.err
    assert "Traceback" not in found.err
    if found.code == 2:
        assert found.err.startswith("error: ")
        assert len(found.err) < 20_000
        assert reader.file.rpartition("/")[2].partition(".")[0] in found.err or may_be_read
        assert state_of(folder) == before


@pytest.mark.parametrize(("name", "damage"), sampled(PAIRS))
def test_a_damaged_file_is_refused_by_its_name(name, damage, sound, tmp_path):
    reader, folder = READERS[name], copy_of(sound, tmp_path / "copy")
    DAMAGES[damage](folder / reader.file)
    assert_refused_or_read(reader, folder, may_be_read=damage in reader.survives)


@pytest.mark.parametrize(
    ("name", "seed"), sampled([(name, seed) for name in READERS for seed in range(12)], shows=lambda one: {one[0]})
)
def test_a_flipped_bit_is_refused_or_harmless(name, seed, sound, tmp_path):
    reader, folder = READERS[name], copy_of(sound, tmp_path / "copy")
    flip_a_bit(folder / reader.file, seed)
    assert_refused_or_read(reader, folder, may_be_read=True)


@pytest.mark.parametrize(
    ("name", "seed"), sampled([(name, seed) for name in TREES for seed in range(40)], shows=lambda one: {one[0]})
)
def test_other_values_in_a_file_of_settings_are_refused_or_harmless(name, seed, sound, tmp_path):
    reader, folder = READERS[name], copy_of(sound, tmp_path / "copy")
    mutate(folder / reader.file, seed)
    assert_refused_or_read(reader, folder, may_be_read=True)
