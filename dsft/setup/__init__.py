"""What a run reads, compares, counts and tries before its first step."""
