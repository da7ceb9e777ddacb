"""The trajectory database. Imports neither FastAPI nor vLLM nor torch."""

from gateway.store.database import Database
from gateway.store.settings import StoreSettings

__all__ = ["Database", "StoreSettings"]
