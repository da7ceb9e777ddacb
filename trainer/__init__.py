"""Everything of strop that needs torch."""
