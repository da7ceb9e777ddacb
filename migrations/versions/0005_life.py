"""The life of a policy: trials, looks of the guard, pauses with a reason, leases, checkpoints"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"

_POLICIES = (
    sa.Column("state_reason", sa.Text(), nullable=True),
    sa.Column("forked_from", sa.Text(), nullable=True),
    sa.Column("base_digest", sa.Text(), nullable=True),
    sa.Column("rate_factor", sa.Double(), nullable=False, server_default="1"),
    sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("canary", sa.Integer(), nullable=True),
    sa.Column("canary_since", sa.Double(), nullable=True),
    sa.Column("lease_owner", sa.Text(), nullable=True),
    sa.Column("lease_expires", sa.Double(), nullable=True),
)
_VERSIONS = (
    sa.Column("looks", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("looked", sa.JSON().with_variant(JSONB(), "postgresql")),
    sa.Column("ended_at", sa.Double(), nullable=True),
    sa.Column("deleted_at", sa.Double(), nullable=True),
)
_GROUPS = (
    sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("reason", sa.Text(), nullable=True),
)
_STEPS = (sa.Column("reason", sa.Text(), nullable=True),)

_TABLES = {"policies": _POLICIES, "versions": _VERSIONS, "groups": _GROUPS, "steps": _STEPS}


def upgrade() -> None:
    for table, columns in _TABLES.items():
        for column in columns:
            op.add_column(table, column.copy())
    # When an earlier schema's versions were taken out of service is not known: from now on.
    op.execute(
        "UPDATE versions SET ended_at = created_at "
        "WHERE state IN ('retired', 'failed', 'superseded')"
    )


def downgrade() -> None:
    for table, columns in _TABLES.items():
        for column in columns:
            op.drop_column(table, column.name)
