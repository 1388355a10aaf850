"""From what a source's path names to its lines. Reads files; what a row means is for `dsft.data.formats`."""
