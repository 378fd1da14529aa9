"""`lightning-cp bench balance`."""
