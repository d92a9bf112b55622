"""`kvferry serve`: run the engine and its admin service in this process."""

from __future__ import annotations


def serve() -> int:
    """Run the engine and the admin service until stopped.

    Everything is set by environment variables (KVFERRY_...), a .env file, or the TOML file that KVFERRY_CONFIG names.
    See `kvferry config check`.
    """
    from app.settings import Settings

    settings = Settings()
    from app.service import run

    return run(settings)
