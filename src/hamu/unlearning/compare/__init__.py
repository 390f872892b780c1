"""Several methods and settings on one problem: the runs of a comparison and their figures."""
