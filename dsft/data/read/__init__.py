"""Read data files: from the path of a source to its lines. `dsft.data.formats` interprets the rows."""
