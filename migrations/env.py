"""Runs the migrations on the connection it is given, or on the one of the settings."""

from alembic import context
from sqlalchemy import Connection

from gateway.store import drains, keys, tracing_models  # noqa: F401
from gateway.store.models import Base


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    from gateway.store import Database, StoreSettings

    with Database(StoreSettings().url()).write() as connection:
        run(connection)
