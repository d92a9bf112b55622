"""Python interpreter of a process of pytest-xdist, forked from the process that commands are forked from.

Otherwise each process of a run would import PyTorch, transformers and kvferry for itself, in 7 s of CPU time. Runs as a
file, with the arguments of an interpreter, and needs the standard library only.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harness.commands import start_command

# Ctrl-C ends the process of pytest, and closes the streams.
signal.signal(signal.SIGINT, signal.SIG_IGN)
words = sys.argv[sys.argv.index("-c") :]
sys.exit(start_command(words, os.environ, Path.cwd(), 1, 2, stdin=0).wait())
