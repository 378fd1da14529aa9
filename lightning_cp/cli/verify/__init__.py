"""`lightning-cp verify`: a user's model with and without context parallelism."""
