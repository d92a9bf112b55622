"""Runs migrations on the connection, and within the transaction, that `kvferry.app.store.migrate` hands over."""

from alembic import context

from kvferry.app.store.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations are run by kvferry itself: use `kvferry db upgrade`")
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
