"""Alembic migrations of the metadata store, applied by `app.store.migrate`."""
