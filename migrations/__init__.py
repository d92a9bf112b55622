"""Alembic migrations of the metadata store, applied by `kvferry.app.store.migrate`."""
