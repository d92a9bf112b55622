"""What ships: pins for everything, a Makefile that says what it needs, and a plain, unprivileged image."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvferry import __version__
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import SECRET_NAMES
from tests.cli.conftest import ROOT
from tests.harness.debian import installed
from tests.harness.http_server import serve
from tests.harness.service_process import serving
from tests.harness.waiting import DEADLINE_S

PARTS = ("app", "core", "cuda_ops", "migrations")


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        name, equals, version = line.partition("==")
        assert equals, f"{line!r} is not a pin"
        found[canonicalize_name(name)] = Version(version)
    assert len(found) == len(lines), "no package is pinned twice"
    return found


@pytest.fixture
def packages() -> list[str]:
    """The packages of a distribution, as pyproject.toml lists them."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])


def test_packages_in_the_project_file_are_those_of_the_tree(packages: list[str]) -> None:
    folders = {path.parent.relative_to(ROOT) for top in PARTS for path in (ROOT / top).rglob("*.py")}
    assert packages == sorted(["kvferry", *(".".join(("kvferry", *folder.parts)) for folder in folders)])
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders - {Path("migrations/versions")})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", ".")
    subprocess.run([*pip, "./source"], cwd=folder, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_when_installed_adds_one_name(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {"kvferry", f"kvferry-{__version__}.dist-info"}
    files = {path.relative_to(ROOT) for top in PARTS for path in (ROOT / top).rglob("*") if path.is_file()}
    wanted = {f"kvferry/{file.as_posix()}" for file in files if "__pycache__" not in file.parts}
    assert {name for name in wheel.namelist() if name.startswith("kvferry/")} == {"kvferry/__init__.py", *wanted}


@pytest.mark.long
def test_wheel_when_run_beside_folders_named_as_ours_serves(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    for name in PARTS:
        (tmp_path / "state" / name).mkdir(parents=True)
        (tmp_path / "state" / name / "__init__.py").write_text("raise RuntimeError('not ours')")
    settings = {"engine": "none", "pool_bytes": "8MiB"}
    with serving(tmp_path / "state", import_path=tmp_path / "installed", **settings) as served:
        files = re.findall(r'(?:src|href)="([\w./]+\.\w+)"', served.http.get("/ui/").text)
        assert "app.js" in files
        for path in (*files, "pages/overview.js", "vendor/uPlot.esm.js"):
            assert served.http.get(f"/ui/{path}").status_code == 200, path
        assert "swagger" in served.http.get("/docs").text
        assert served.get("/admin/v1/evictions")["items"] == []
    found = subprocess.run(
        [sys.executable, "-c", "import kvferry.app; print(kvferry.__file__)"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)


@pytest.fixture(scope="module")
def lean_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of import paths as `pip install kvferry` leaves it: without the extra `embedded`."""
    folder = tmp_path_factory.mktemp("lean")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("torch", "transformers", "__editable__")) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    (folder / "kvferry").symlink_to(ROOT)
    return folder


def run_lean(lean_path: Path, state: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    # Without `site`, the interpreter does not look into the virtual environment's own packages.
    code = f"import sys; sys.path.append({str(lean_path)!r}); from kvferry.app.cli import main; sys.exit(main())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *words],
        env=environment | {"KVFERRY_STATE_DIR": str(state), "KVFERRY_PORT": "0"} | settings,
        cwd=state,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("command", ["serve", pytest.param("config check", marks=pytest.mark.long)])
def test_embedded_engine_without_its_extra_is_refused_by_name(command: str, lean_path: Path, tmp_path: Path) -> None:
    done = run_lean(lean_path, tmp_path, *command.split())
    assert done.returncode == 2
    assert "KVFERRY_ENGINE=embedded: torch and transformers not installed" in done.stderr
    assert "pip install 'kvferry[embedded]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_configuration_without_an_engine_needs_no_extra(lean_path: Path, tmp_path: Path) -> None:
    done = run_lean(lean_path, tmp_path, "config", "check", KVFERRY_ENGINE="none", KVFERRY_POOL_BYTES="8MiB")
    assert (done.returncode, done.stderr) == (0, "settings are valid\n")


def test_every_dependency_is_pinned_within_its_range(project: dict[str, Any], pins: dict[str, Version]) -> None:
    extras = project["optional-dependencies"].values()
    wanted = map(Requirement, [*project["dependencies"], *(one for extra in extras for one in extra)])
    for requirement in (one for one in wanted if one.name != project["name"]):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def dry_run(*words: str, tmp_path: Path) -> str:
    """What `make` would run in a fresh checkout."""
    done = make("-n", *words, f"VENV={tmp_path}/venv")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_serve_installs_no_tools_of_developers(tmp_path: Path) -> None:
    assert ".[embedded]" in dry_run("serve", tmp_path=tmp_path)
    assert ".[dev]" not in dry_run("serve", tmp_path=tmp_path)
    assert ".[dev]" in dry_run("lint", tmp_path=tmp_path)


def test_make_when_an_index_of_torch_is_named_uses_that_one(tmp_path: Path) -> None:
    commands = dry_run("serve", "TORCH_INDEX=file:///wheels", tmp_path=tmp_path).splitlines()
    (line,) = (command for command in commands if "torch" in command)
    assert "--extra-index-url file:///wheels" in line
    assert "--extra-index-url" not in dry_run("serve", "TORCH_INDEX=", tmp_path=tmp_path)


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *words],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_make_without_a_suitable_python_names_the_versions(tmp_path: Path) -> None:
    for python in ("false", "no-such-python"):
        done = make("test", f"PYTHON={python}", f"VENV={tmp_path}/venv")
        assert done.returncode != 0
        assert f"kvferry needs Python 3.11, 3.12 or 3.13, and PYTHON={python} is none" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_installs_again_only_when_requirements_change(tmp_path: Path) -> None:
    stamps = tmp_path / ".serving", tmp_path / ".installed"
    question = ("-q", str(stamps[-1]), f"VENV={tmp_path}")
    for stamp in stamps:
        assert make(*question).returncode == 1, f"{stamp.name} is not there yet"
        stamp.touch()
    assert make(*question).returncode == 0
    for name in ("pyproject.toml", "constraints.txt"):
        changed = make(*question, "-W", name)
        assert changed.returncode == 1, f"{name} changed"


Step = tuple[str, str]


@pytest.fixture
def steps() -> list[Step]:
    """The Dockerfile's instructions and their arguments, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(steps: list[Step], name: str) -> list[str]:
    return [rest for instruction, rest in steps if instruction == name]


def last_stage(steps: list[Step]) -> list[Step]:
    starts = [index for index, (name, _) in enumerate(steps) if name == "FROM"]
    return steps[starts[-1] :]


def test_image_requirements_are_those_of_project_and_extras(project: dict[str, Any]) -> None:
    script = ROOT / "deploy/image/requirements.py"
    done = subprocess.run([sys.executable, script, "redis"], cwd=ROOT, check=True, capture_output=True, text=True)
    extra = project["optional-dependencies"]["redis"]
    assert done.stdout.splitlines()[-len(extra) :] == extra
    assert set(project["dependencies"]) < set(done.stdout.splitlines())


def test_image_runs_as_a_user_that_owns_its_state(steps: list[Step]) -> None:
    steps = last_stage(steps)
    (user,) = arguments(steps, "USER")
    assert int(user) > 0
    names = [name for name, _ in steps]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    (volume,) = arguments(steps, "VOLUME")
    assert f"--uid {user} " in " ".join(arguments(steps, "RUN"))
    assert f"--home-dir {volume} " in " ".join(arguments(steps, "RUN"))
    environment = arguments(steps, "ENV")[0]
    assert f"KVFERRY_STATE_DIR={volume}" in environment
    assert f"NUMBA_CACHE_DIR={volume}/" in environment, "the root may be read-only"


def test_image_holds_no_secret_and_only_known_settings(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(re.findall(r"KVFERRY_([A-Z_]+)=(\S+)", " ".join(arguments(steps, "ENV"))))
    assert not {name for name in given if name.lower() in SECRET_NAMES}
    for name, value in given.items():
        monkeypatch.setenv(f"KVFERRY_{name}", value)
    assert Settings(admin_token="t" * 16).host == "0.0.0.0", "reachable, and so it starts with a token only"
    assert arguments(steps, "EXPOSE") == [str(Settings(admin_token="t" * 16).port)]


def test_image_gets_every_package_and_nothing_else(steps: list[Step], packages: list[str]) -> None:
    copied = " ".join(rest for rest in arguments(steps, "COPY") if not rest.startswith("--from")).split()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored
    for name in ("__init__.py", *{package.split(".")[1] for package in packages if "." in package}):
        assert name in copied
        assert f"!{name}" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    sources = {word for word in copied if not word.startswith(("./", "/"))}
    assert allowed == {"deploy/image" if word.startswith("deploy/image/") else word for word in sources}


def test_compose_keeps_the_state_in_the_folder_of_the_image() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["kvferry"]
    (volume,) = service["volumes"]
    assert f"VOLUME {volume.partition(':')[2]}\n" in (ROOT / "Dockerfile").read_text()
    assert "shm_size" in service, "for pools of the kind shm"


def is_healthy(**settings: str) -> bool:
    """What the image's health check says of a service with these settings."""
    environment = os.environ | {f"KVFERRY_{name}": value for name, value in settings.items()}
    script = ROOT / "deploy/image/healthy.sh"
    return subprocess.run(["sh", script], env=environment, check=False, timeout=DEADLINE_S).returncode == 0


@pytest.mark.parametrize("healthy", [True, False])
def test_health_check_distinguishes_a_healthy_service(healthy: bool) -> None:
    installed("curl", "curl")
    app = FastAPI()
    if healthy:
        app.get("/healthz")(lambda: {"status": "ok"})
    with serve(app) as running:
        assert is_healthy(PORT=str(running.port), HOST="0.0.0.0") == healthy


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.2", "127.0.0.2"), ("::", "::1"), ("::1", "::1")])
def test_health_check_asks_the_address_that_is_served(host: str, bound: str) -> None:
    installed("curl", "curl")
    with socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            pytest.skip(f"this machine has no address {bound}")
        listener.settimeout(DEADLINE_S)
        listener.listen()
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(is_healthy, PORT=str(listener.getsockname()[1]), HOST=host)
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert answer.result(DEADLINE_S)
