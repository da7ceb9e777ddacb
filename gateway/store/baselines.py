"""Running baselines: what a policy's rewards have been, and those of its tasks."""

from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.models import Base


class Baseline(Base):
    """Running mean and variance of a policy's rewards, and of those of single tasks."""

    __tablename__ = "baselines"

    project: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    """Empty for the policy as a whole."""
    mean: Mapped[float]
    variance: Mapped[float]
    count: Mapped[int]
    """Rewards that went into it; old ones fade."""
    updated_at: Mapped[float]
