"""`kvferry serve`: run the engine and its admin service in this process."""

from __future__ import annotations

from kvferry.app.cli.console import ExitCode, complain


def serve() -> int:
    """Run the engine and the admin service until stopped.

    Configured by environment variables (KVFERRY_...), a .env file, or the TOML file that KVFERRY_CONFIG names. See
    `kvferry config check`.
    """
    from kvferry.app.settings import Settings

    settings = Settings()
    # Imported late because it loads torch: a bad setting is reported at once.
    from kvferry.app.serve.process import run
    from kvferry.core.errors import StartError

    try:
        return run(settings)
    except StartError as error:
        for problem in str(error).splitlines():
            complain(problem)
        return ExitCode.USAGE
