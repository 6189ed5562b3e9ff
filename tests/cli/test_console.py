"""console: lines that nobody can read any more are dropped."""

import os
import subprocess
import sys

PROGRAM = """
from megalith.cli.console import Console, say
console = Console()
console.show("first")
console.show_progress("second")
say("third")
"""


def test_a_pipe_whose_reader_has_ended_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
