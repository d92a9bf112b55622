"""Alembic environment: runs migrations on the connection, and in the transaction, of `kvferry.app.store.migrate`."""

from alembic import context

from kvferry.app.store.schema import METADATA

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations cannot be run by alembic directly; use `kvferry db upgrade`")
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
