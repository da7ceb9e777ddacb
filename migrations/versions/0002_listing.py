"""Indexes for listing completions by policy and by metadata"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("ix_completions_policy", "completions", ["project", "policy", "id"])
    if op.get_bind().dialect.name == "sqlite":
        op.create_index(
            "ix_completions_metadata", "completions", ["project", "id", "client_metadata"]
        )
    else:
        op.create_index(
            "ix_completions_metadata_keys",
            "completions",
            [sa.text("client_metadata jsonb_path_ops")],
            postgresql_using="gin",
        )


def downgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    name = "ix_completions_metadata" if sqlite else "ix_completions_metadata_keys"
    op.drop_index(name, "completions")
    op.drop_index("ix_completions_policy", "completions")
