"""What follows from the facts of all hosts: each module takes `Seen`, gives findings. Pure."""
