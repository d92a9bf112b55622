"""Print what an installation needs, one per line: of build, project, and the extras that are named as arguments."""

import sys
import tomllib
from pathlib import Path

given = tomllib.loads(Path("pyproject.toml").read_text())
project = given["project"]
extras = (requirement for name in sys.argv[1:] for requirement in project["optional-dependencies"][name])
sys.stdout.writelines(f"{one}\n" for one in (*given["build-system"]["requires"], *project["dependencies"], *extras))
