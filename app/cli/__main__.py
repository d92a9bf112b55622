"""Entry point of `python -m kvferry.app.cli`, the same as `kvferry`."""

import sys

from kvferry.app.cli import main

sys.exit(main())
