"""Tasks: each says what is minimized and what it needs of a run beside the policy. `dsft.spec.task` has the
facts of a task that need no torch."""
