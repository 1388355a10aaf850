"""On the path of ranks that a test launches, in place of matplotlib: to import it and to draw a run's curves
takes a second."""

raise ImportError("tests draw no curves")
