"""`python -m app.cli` is `kvferry`."""

import sys

from app.cli import main

sys.exit(main())
