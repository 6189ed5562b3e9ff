"""Pickles are read as data: nothing they name is imported or called."""

import argparse
import datetime
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest

from megalith.errors import CheckpointError
from megalith.models.megatron.inert_pickle import Inert, origin_of, read_pickle


class Runs:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@dataclass
class Point:
    x: int
    y: tuple[int, ...]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_and_fields_of_objects_are_read_in_every_protocol_of_torch(protocol):
    given = {"n": 3, "text": "ä", "list": [1.5, None, True], "point": Point(1, (2, 3)), "bytes": b"ab"}
    found = read_pickle(pickle.dumps(given, protocol), "it")
    point = found.pop("point")
    assert origin_of(point).endswith(".Point")
    assert point.fields() == {"x": 1, "y": (2, 3)}
    if protocol < 3:  # these protocols write bytes as a call
        assert isinstance(found.pop("bytes"), Inert)
        given.pop("bytes")
    given.pop("point")
    assert found == given


def test_what_a_pickle_would_run_is_not_run(tmp_path):
    content = pickle.dumps({"args": Runs(f"touch {tmp_path / 'ran'}")})
    found = read_pickle(content, "it")
    assert origin_of(found["args"]) == f"{os.system.__module__}.system"
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists()


def test_no_module_that_a_pickle_names_is_imported():
    # GLOBAL of a module that nothing here imports, called without arguments
    program = (
        "import sys; from megalith.models.megatron.inert_pickle import read_pickle;"
        "read_pickle(b'cthis\\nprint\\n)R.', 'it'); read_pickle(b'cwave\\nopen\\n)R.', 'it');"
        "assert not {'this', 'wave'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ})


def test_subclasses_of_dict_and_list_keep_what_was_put_into_them():
    from collections import OrderedDict, defaultdict

    found = read_pickle(pickle.dumps([OrderedDict(a=1), defaultdict(list, b=[2])]), "it")
    assert [part.items for part in found] == [[("a", 1)], [("b", [2])]]


def test_elements_are_added_in_place():
    """Otherwise a pickle of one list, within the size limits, would take hours to read."""
    found = Inert()
    found.append(1)
    before = found.items
    found.append(2)
    found[3] = 4
    assert found.items is before
    assert before == [1, 2, (3, 4)]


def test_a_namespace_is_its_fields():
    found = read_pickle(pickle.dumps(argparse.Namespace(lr=0.1, when=datetime.date(2026, 1, 2))), "it")
    assert origin_of(found) == "argparse.Namespace"
    assert found.fields()["lr"] == 0.1
    assert origin_of(found.fields()["when"]) == "datetime.date"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"not a pickle",
        b".",
        b"0.",
        b"K\x01)R.",  # a number is called
        b"cos\nsystem\n}b.",  # state for a class
        b"\x82\x01.",  # an extension
        b"h\x05.",  # a memo entry that was never stored
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x00.",  # 2^56 bytes in an array
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",
        b"Q.",
        b"I" + b"9" * 5000 + b"\n.",
        b"(" * 100_000 + b".",
        b"]" * 100_000 + b"a" * 200_000 + b".",
        b"\x80\x02X\x01",  # truncated
        b"}N" + b"\x85" * 300_000 + b"Ns.",  # a key of nested tuples, whose hash overflows the stack
        b"(N" + b"\x85" * 300_000 + b"Nd.",
        b"(N" + b"\x85" * 300_000 + b"\x91.",
        b"ca\nb\nq\0" + b"h\0)\x81" * 100_000 + b".",  # an object for each 4 bytes
        b"".join(b"ca\n%d\n0" % number for number in range(2000)) + b"N.",  # a class for each 8
    ],
)
def test_what_is_no_sound_pickle_is_an_error_that_names_it(content):
    with pytest.raises(CheckpointError, match=r"^it is not a pickle that can be read as data"):
        read_pickle(content, "it")
