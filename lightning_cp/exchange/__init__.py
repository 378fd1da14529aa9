"""Running a plan: the loop over rounds, forward and backward."""
