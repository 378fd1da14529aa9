"""`lightning-cp plan`."""
