"""Looking at a step: the audit of its first forward, and trackers for tests and reports."""
