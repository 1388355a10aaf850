"""How this process was started: takes environment variables and the parents' command lines, gives a
`Launched`; touches no torch and starts nothing."""
