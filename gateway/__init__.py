"""Everything of strop that answers HTTP."""

__version__ = "0.1.0"
