"""One file per question, each printing what it compares."""
