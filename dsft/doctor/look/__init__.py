"""What a host tells of itself: each module gives plain facts, fit for JSON. Runs on the host that is asked,
and imports nothing of the run."""
