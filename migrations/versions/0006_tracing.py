"""What is still to be sent to Langfuse, what came from there, and what a judge was asked"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"

JSON = sa.JSON().with_variant(JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("completions", sa.Column("traceparent", sa.Text(), nullable=True))
    op.add_column("rewards", sa.Column("withdrawn_at", sa.Double(), nullable=True))
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "langfuse_outbox",
        sa.Column("row", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("row"),
    )
    op.create_index("ix_langfuse_outbox_project", "langfuse_outbox", ["project", "row"])
    op.create_table(
        "langfuse_traces",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project", "trace_id", "trajectory_id"),
    )
    op.create_table(
        "langfuse_cursors",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("position", sa.Double(), nullable=False),
        sa.Column("compared_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project"),
    )
    op.create_table(
        "langfuse_scores",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("reward_id", sa.Text(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "id"),
    )
    op.create_index("ix_langfuse_scores_at", "langfuse_scores", ["project", "at"])
    op.create_table(
        "judge_calls",
        sa.Column("row", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("answer", JSON, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("cost", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("row"),
    )
    op.create_index("ix_judge_calls_key", "judge_calls", ["key"])
    op.create_index("ix_judge_calls_policy", "judge_calls", ["project", "policy", "at"])
    op.create_table(
        "judged_groups",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("project", "policy", "group_id"),
    )


def downgrade() -> None:
    for table in (
        "judged_groups",
        "judge_calls",
        "langfuse_scores",
        "langfuse_cursors",
        "langfuse_traces",
        "langfuse_outbox",
        "leases",
    ):
        op.drop_table(table)
    op.drop_column("rewards", "withdrawn_at")
    op.drop_column("completions", "traceparent")
