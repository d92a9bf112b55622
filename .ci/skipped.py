"""Print the tests that a JUnit report of pytest says were skipped for want of a Debian package, one a line."""

import sys
from xml.etree import ElementTree

for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    skipped = case.find("skipped")
    if skipped is not None and skipped.get("message", "").startswith("needs Debian's"):
        sys.stdout.write(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}\n")
