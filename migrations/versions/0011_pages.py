"""Pages of completions of one project, version or failure are read from an index each"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_FAILED = sa.text("status <> 'complete'")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.create_index("ix_completions_project", "completions", ["project", "id"])
    op.create_index("ix_completions_version", "completions", ["project", "policy", "version", "id"])
    op.create_index(
        "ix_completions_failed",
        "completions",
        ["project", "status", "id"],
        sqlite_where=_FAILED,
        postgresql_where=_FAILED,
    )


def downgrade() -> None:
    op.drop_index("ix_completions_failed", "completions")
    op.drop_index("ix_completions_version", "completions")
    if op.get_bind().dialect.name == "postgresql":
        op.drop_index("ix_completions_project", "completions")
