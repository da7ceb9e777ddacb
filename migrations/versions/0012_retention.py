"""How long projects are kept, where they have said so themselves"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "retention",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("days", sa.Double(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("project"),
    )


def downgrade() -> None:
    op.drop_table("retention")
