"""What dsft asks of the operating system: files, locks, disks, processes, cores and memory. No torch."""
