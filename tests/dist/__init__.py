"""Tests that run on groups of processes."""
