"""Use the operating system: files, locks, disks, processes, cores and memory. Imports no torch."""
