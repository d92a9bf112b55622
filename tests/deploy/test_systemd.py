"""The unit for systemd: valid, and with the settings and exit code of kvferry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.app.cli.console import ExitCode
from kvferry.app.settings.fields import SETTING_NAMES
from tests.deploy.conftest import ROOT

UNIT = ROOT / "deploy" / "systemd" / "kvferry.service"


def test_unit_is_valid_by_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    # It checks that the program exists.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvferry/bin/kvferry", "/bin/true"))
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([analyze, "verify", unit], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_sets_only_settings_and_stops_at_wrong_ones() -> None:
    text = UNIT.read_text()
    names = {
        name.lower().removesuffix("_file") for name in re.findall(r"^Environment=KVFERRY_(\w+)=", text, re.MULTILINE)
    }
    assert names - {"config"} <= set(SETTING_NAMES)
    assert f"RestartPreventExitStatus={ExitCode.USAGE}" in text
