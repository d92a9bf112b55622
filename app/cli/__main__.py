"""`python -m kvferry.app.cli` is `kvferry`."""

import sys

from kvferry.app.cli import main

sys.exit(main())
