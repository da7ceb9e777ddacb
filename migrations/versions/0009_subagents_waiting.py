"""Indexes of the few trajectories that a claim looks for beside the rewarded ones"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_OPEN = "state = 'open' AND split = 'train'"
_INDEXES = (
    (
        "ix_trajectories_revised",
        ["project", "policy", "group_id"],
        f"{_OPEN} AND settled_revision IS NOT NULL",
    ),
    (
        "ix_trajectories_lent",
        ["project", "policy", "group_id", "created_at"],
        f"{_OPEN} AND parent_id IS NOT NULL",
    ),
)


def upgrade() -> None:
    for name, columns, where in _INDEXES:
        condition = sa.text(where)
        op.create_index(
            name, "trajectories", columns, sqlite_where=condition, postgresql_where=condition
        )


def downgrade() -> None:
    for name, _, _ in _INDEXES:
        op.drop_index(name, "trajectories")
