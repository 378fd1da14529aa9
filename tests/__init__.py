"""The tests; a package, so that `tests._harness` can be imported by name."""
