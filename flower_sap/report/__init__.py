"""What came of runs: comparisons, tables and figures, from events and trials."""
