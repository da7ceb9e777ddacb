"""Answers that never reached their client, for a retry that comes to another process"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "undelivered",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("place", sa.LargeBinary(), nullable=False),
        sa.Column("completion_id", sa.Text(), nullable=False),
        sa.Column("kept_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["completion_id"], ["completions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("project", "place"),
    )
    op.create_index("ix_undelivered_completion", "undelivered", ["completion_id"])


def downgrade() -> None:
    op.drop_table("undelivered")
