"""`lightning-cp bench packed`."""
