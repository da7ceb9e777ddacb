"""Revisions of rewards, running baselines, and what a use was compared with"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_COLUMNS = {
    "trajectories": (
        sa.Column("revision", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("settled_revision", sa.Integer(), nullable=True),
    ),
    "completion_uses": (
        sa.Column("revision", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("baseline", sa.Double(), nullable=True),
        sa.Column("ratio", sa.Double(), nullable=True),
    ),
}


def upgrade() -> None:
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.add_column(table, column.copy())
    op.execute("UPDATE trajectories SET settled_revision = 0 WHERE state <> 'open'")
    op.create_index("ix_uses_trajectory", "completion_uses", ["trajectory_id"])
    op.create_table(
        "baselines",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        sa.Column("variance", sa.Double(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "policy", "task"),
    )


def downgrade() -> None:
    op.drop_table("baselines")
    op.drop_index("ix_uses_trajectory", "completion_uses")
    for table, columns in _COLUMNS.items():
        for column in columns:
            op.drop_column(table, column.name)
