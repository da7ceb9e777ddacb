"""The first schema"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "completion_uses",
        sa.Column("row", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("step_id", ROW_ID, nullable=True),
        sa.Column("completion_id", sa.Text(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("row"),
    )
    with op.batch_alter_table("completion_uses", schema=None) as batch_op:
        batch_op.create_index("ix_uses_completion", ["completion_id"], unique=False)
        batch_op.create_index("ix_uses_step", ["step_id"], unique=False)

    op.create_table(
        "events",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("detail", JSON, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_policy", ["project", "policy", "id"], unique=False)

    op.create_table(
        "groups",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("project", "policy", "id"),
    )
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.create_index(
            "ix_groups_policy_updated", ["project", "policy", "updated_at"], unique=False
        )

    op.create_table(
        "policies",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_served", sa.Text(), nullable=False),
        sa.Column("alias", sa.Integer(), nullable=False),
        sa.Column("head", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("lora", JSON, nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "name"),
    )
    op.create_table(
        "steps",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("metrics", JSON, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("steps", schema=None) as batch_op:
        batch_op.create_index("ix_steps_policy", ["project", "policy", "id"], unique=False)

    op.create_table(
        "trajectories",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("attribution", sa.Text(), nullable=False),
        sa.Column("rewarded", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("step_id", ROW_ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project", "id"),
    )
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.create_index("ix_trajectories_created", ["project", "created_at"], unique=False)
        batch_op.create_index(
            "ix_trajectories_group", ["project", "policy", "group_id"], unique=False
        )
        batch_op.create_index("ix_trajectories_parent", ["project", "parent_id"], unique=False)
        batch_op.create_index(
            "ix_trajectories_waiting",
            ["project", "policy", "split", "state", "rewarded"],
            unique=False,
        )

    op.create_table(
        "completions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("parent_choice", sa.Integer(), nullable=True),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("served_model", sa.Text(), nullable=True),
        sa.Column("replica", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=True),
        sa.Column("messages", sa.LargeBinary(), nullable=False),
        sa.Column("messages_shared", sa.Integer(), nullable=False),
        sa.Column("messages_count", sa.Integer(), nullable=False),
        sa.Column("messages_digest", sa.LargeBinary(), nullable=False),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_shared", sa.Integer(), nullable=False),
        sa.Column("prompt_digest", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("sampling", JSON, nullable=False),
        sa.Column("client_metadata", JSON, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("first_token_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("completions", schema=None) as batch_op:
        batch_op.create_index("ix_completions_created", ["project", "created_at"], unique=False)
        batch_op.create_index(
            "ix_completions_trajectory", ["project", "trajectory_id", "created_at"], unique=False
        )

    op.create_table(
        "rewards",
        sa.Column("row", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("trajectory_id", sa.Text(), nullable=False),
        sa.Column("completion_id", sa.Text(), nullable=True),
        sa.Column("choice", sa.Integer(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("details", JSON, nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_digest", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("id"),
        sa.UniqueConstraint("project", "idempotency_key", name="uq_rewards_idempotency"),
    )
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.create_index("ix_rewards_completion", ["completion_id"], unique=False)
        batch_op.create_index("ix_rewards_trajectory", ["project", "trajectory_id"], unique=False)

    op.create_table(
        "versions",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("adapter_path", sa.Text(), nullable=True),
        sa.Column("probe", JSON, nullable=True),
        sa.Column("probe_result", JSON, nullable=True),
        sa.Column("step_id", ROW_ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project", "policy"],
            ["policies.project", "policies.name"],
        ),
        sa.PrimaryKeyConstraint("project", "policy", "number"),
    )
    op.create_table(
        "choices",
        sa.Column("completion_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("token_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("sequence_digest", sa.LargeBinary(), nullable=True),
        sa.Column("thread_key", sa.LargeBinary(), nullable=True),
        sa.Column("continued", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["completion_id"], ["completions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("completion_id", "index"),
    )
    with op.batch_alter_table("choices", schema=None) as batch_op:
        batch_op.create_index("ix_choices_thread", ["thread_key"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("choices", schema=None) as batch_op:
        batch_op.drop_index("ix_choices_thread")

    op.drop_table("choices")
    op.drop_table("versions")
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.drop_index("ix_rewards_trajectory")
        batch_op.drop_index("ix_rewards_completion")

    op.drop_table("rewards")
    with op.batch_alter_table("completions", schema=None) as batch_op:
        batch_op.drop_index("ix_completions_trajectory")
        batch_op.drop_index("ix_completions_created")

    op.drop_table("completions")
    with op.batch_alter_table("trajectories", schema=None) as batch_op:
        batch_op.drop_index("ix_trajectories_waiting")
        batch_op.drop_index("ix_trajectories_parent")
        batch_op.drop_index("ix_trajectories_group")
        batch_op.drop_index("ix_trajectories_created")

    op.drop_table("trajectories")
    with op.batch_alter_table("steps", schema=None) as batch_op:
        batch_op.drop_index("ix_steps_policy")

    op.drop_table("steps")
    op.drop_table("policies")
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.drop_index("ix_groups_policy_updated")

    op.drop_table("groups")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_policy")

    op.drop_table("events")
    with op.batch_alter_table("completion_uses", schema=None) as batch_op:
        batch_op.drop_index("ix_uses_step")
        batch_op.drop_index("ix_uses_completion")

    op.drop_table("completion_uses")
