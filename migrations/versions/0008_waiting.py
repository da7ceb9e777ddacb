"""What waits in each group, so that a ready one is found without reading the others; choices"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_OPEN = "state = 'open' AND split = 'train'"
_INDEXES = (
    ("ix_groups_waiting", "groups", ["project", "policy", "waiting"], "waiting > 0"),
    ("ix_groups_oldest", "groups", ["project", "policy", "oldest_at"], "waiting > 0"),
    (
        "ix_groups_ended",
        "groups",
        ["project", "policy", "oldest_at"],
        "(closed_at IS NOT NULL OR choices IS NOT NULL) AND oldest_at IS NOT NULL",
    ),
    (
        "ix_trajectories_open",
        "trajectories",
        ["project", "policy", "group_id", "rewarded", "created_at"],
        _OPEN,
    ),
)
_MEMBERS = (
    "FROM trajectories t WHERE t.project = groups.project AND t.policy = groups.policy "
    f"AND t.group_id = groups.id AND t.{_OPEN.replace('split', 't.split')}"
)


def upgrade() -> None:
    op.add_column("groups", sa.Column("waiting", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("groups", sa.Column("oldest_at", sa.Double(), nullable=True))
    op.add_column("groups", sa.Column("choices", sa.Integer(), nullable=True))
    for name, table, columns, where in _INDEXES:
        condition = sa.text(where)
        op.create_index(name, table, columns, sqlite_where=condition, postgresql_where=condition)
    op.execute(
        f"UPDATE groups SET waiting = (SELECT count(*) {_MEMBERS} AND t.rewarded), "
        f"oldest_at = (SELECT min(t.created_at) {_MEMBERS})"
    )
    op.drop_index("ix_trajectories_waiting", "trajectories")


def downgrade() -> None:
    op.create_index(
        "ix_trajectories_waiting",
        "trajectories",
        ["project", "policy", "split", "state", "rewarded"],
    )
    for name, table, _, _ in _INDEXES:
        op.drop_index(name, table)
    for column in ("choices", "oldest_at", "waiting"):
        op.drop_column("groups", column)
